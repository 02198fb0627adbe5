"""workflows/demo.py and the prompt it runs, without a ComfyUI."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROMPT = json.loads((ROOT / "workflows" / "api" / "wan_t2v_demo.json").read_text())

# Nodes that ComfyUI 0.3.64 and 0.33.0 both have, with the inputs that both require.
CORE_NODES = {
    "ModelSamplingSD3": {"model", "shift"},
    "EmptyHunyuanLatentVideo": {"width", "height", "length", "batch_size"},
    "KSampler": {
        "model",
        "positive",
        "negative",
        "latent_image",
        "seed",
        "steps",
        "cfg",
        "sampler_name",
        "scheduler",
        "denoise",
    },
    "CreateVideo": {"images", "fps"},
    "SaveVideo": {"video", "filename_prefix", "format", "codec"},
    "SaveImage": {"images", "filename_prefix"},
}
# Outputs of each node by position, as far as the prompt links to them.
OUTPUTS = {
    "HopperSolLoadVideoModel": ["MODEL"],
    "HopperSolAttention": ["MODEL"],
    "HopperSolSyntheticConditioning": ["CONDITIONING"],
    "HopperSolRunReport": ["LATENT", "STRING", "IMAGE", "STRING"],
    "HopperSolLatentPreviewFrames": ["IMAGE"],
    "ModelSamplingSD3": ["MODEL"],
    "EmptyHunyuanLatentVideo": ["LATENT"],
    "KSampler": ["LATENT"],
    "CreateVideo": ["VIDEO"],
    "SaveVideo": [],
    "SaveImage": [],
}
INPUT_TYPES = {
    "model": "MODEL",
    "positive": "CONDITIONING",
    "negative": "CONDITIONING",
    "latent_image": "LATENT",
    "latent": "LATENT",
    "images": "IMAGE",
    "video": "VIDEO",
}
REPORT, SAVE_VIDEO, SAVE_IMAGE = "HopperSolRunReport", "SaveVideo", "SaveImage"


# ---- the prompt


def _ids(class_type):
    return [i for i, node in PROMPT.items() if node["class_type"] == class_type]


def test_prompt_nodes_are_core_or_ours():
    for node in PROMPT.values():
        class_type = node["class_type"]
        assert node["_meta"]["title"]
        if not class_type.startswith("HopperSol"):
            assert set(node["inputs"]) == CORE_NODES[class_type]


def test_prompt_links():
    for node in PROMPT.values():
        for name, value in node["inputs"].items():
            if name in INPUT_TYPES:
                source, output = value
                outputs = OUTPUTS[PROMPT[source]["class_type"]]
                assert outputs[output] == INPUT_TYPES[name], (node, name)
            else:
                assert not isinstance(value, list), (node, name)


def test_prompt_every_node_leads_to_an_output():
    used, todo = set(), _ids(REPORT) + _ids(SAVE_VIDEO) + _ids(SAVE_IMAGE)
    while todo:
        node_id = todo.pop()
        if node_id not in used:
            used.add(node_id)
            values = PROMPT[node_id]["inputs"].values()
            todo += [value[0] for value in values if isinstance(value, list)]
    assert used == set(PROMPT)


def test_prompt_report_comes_after_the_sampler():
    (report,) = _ids(REPORT)
    assert PROMPT[report]["inputs"]["latent"] == [_ids("KSampler")[0], 0]
    # Of the model that was sampled, and not of one before the attention was patched.
    sampled = PROMPT[_ids("KSampler")[0]]["inputs"]["model"]
    assert PROMPT[report]["inputs"]["model"] == sampled == [_ids("HopperSolAttention")[0], 0]


def test_prompt_has_enough_tokens():
    latent = PROMPT[_ids("EmptyHunyuanLatentVideo")[0]]["inputs"]
    frames = (latent["length"] - 1) // 4 + 1
    tokens = frames * (latent["height"] // 16) * (latent["width"] // 16)
    assert tokens == 1280
    assert tokens >= PROMPT[_ids("HopperSolAttention")[0]]["inputs"]["min_tokens"]


# ---- summary, report, files

RUN = {
    "status": "finished",
    "steps": 6,
    "num_blocks": 4,
    "forwards": 12,
    "self_attention_calls": 48,
    "sparse_calls": 36,
    "dense_calls": {"dense step": 8, "dense layer": 4},
    "other_calls": {"cross-attention": 48},
    "density": 0.294,
    "tokens": 1280,
    "seconds": 3.2,
    "backend": {"reference": 36},
}


def test_summary(demo):
    assert demo.summary(RUN, "out/demo.mp4", "out/report.png") == (
        "48 of 48 self-attention calls counted: sparse 36 (reference), "
        "dense 12 (8 x dense step, 4 x dense layer), density 0.29 -> out/demo.mp4, out/report.png"
    )


def test_summary_all_dense(demo):
    reason = "no backend: triton is not installed"
    run = {**RUN, "sparse_calls": 0, "dense_calls": {reason: 48}, "density": None, "backend": {}}
    assert demo.summary(run, "v", "p") == (
        f"48 of 48 self-attention calls counted: sparse 0, dense 48 (48 x {reason}) -> v, p"
    )


def test_summary_all_sparse(demo):
    run = {**RUN, "sparse_calls": 48, "dense_calls": {}, "backend": {"sm90": 40, "triton": 8}}
    assert demo.summary(run, "v", "p") == (
        "48 of 48 self-attention calls counted: sparse 48 (sm90, triton), dense 0, density 0.29 "
        "-> v, p"
    )


def test_summary_calls_missed(demo):
    run = {**RUN, "self_attention_calls": 40, "dense_calls": {"dense step": 4}}
    assert demo.summary(run, "v", "p").startswith("40 of 48 self-attention calls counted:")


def test_summary_small_report(demo):
    run = {k: RUN[k] for k in ("self_attention_calls", "sparse_calls", "dense_calls")}
    assert demo.summary(run, "v", "p").startswith(
        "48 of 48 self-attention calls counted: sparse 36"
    )


def _entry(runs, **outputs):
    (report,) = _ids(REPORT)
    shown = {"text": ["..."], "json": [json.dumps({"schema_version": 1, "runs": runs})]}
    return {"outputs": {report: shown, **outputs}}


def test_report_of(demo):
    other = {**RUN, "status": "error"}
    assert demo.report_of(_entry([other, RUN]), PROMPT) == RUN


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "left no report in the history"),
        ({"outputs": {_ids(REPORT)[0]: {"json": []}}}, "left no report in the history"),
        ({"outputs": {_ids(REPORT)[0]: {"json": ["{"]}}}, "left no report in the history"),
        (_entry([]), "lists no sampler run"),
        (_entry([{**RUN, "status": "error"}]), "status 'error', need 'finished'"),
        (_entry([{**RUN, "self_attention_calls": 0}]), "counts no self-attention call"),
    ],
    ids=["empty", "no json", "bad json", "no run", "error", "no calls"],
)
def test_report_of_bad_report(demo, entry, message):
    with pytest.raises(demo.DemoError, match=message):
        demo.report_of(entry, PROMPT)


def _saved(class_type, filename, subfolder="hopper_sol"):
    image = {"filename": filename, "subfolder": subfolder, "type": "output"}
    return {_ids(class_type)[0]: {"images": [image]}}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "output" / "hopper_sol").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("class_type", [SAVE_VIDEO, SAVE_IMAGE])
def test_output_file(demo, base, class_type):
    path = base / "output" / "hopper_sol" / "demo_00001_.mp4"
    path.write_bytes(b"x")
    entry = _entry([RUN], **_saved(class_type, path.name))
    assert demo.output_file(entry, PROMPT, class_type, base) == path


def test_output_file_none_saved(demo, base):
    with pytest.raises(demo.DemoError, match="SaveVideo saved no file"):
        demo.output_file(_entry([RUN]), PROMPT, SAVE_VIDEO, base)


def test_output_file_missing(demo, base):
    entry = _entry([RUN], **_saved(SAVE_VIDEO, "demo.mp4"))
    with pytest.raises(demo.DemoError, match=r"saved hopper_sol/demo\.mp4, but .* is not there"):
        demo.output_file(entry, PROMPT, SAVE_VIDEO, base)


def test_output_file_empty(demo, base):
    (base / "output" / "hopper_sol" / "demo.mp4").write_bytes(b"")
    entry = _entry([RUN], **_saved(SAVE_VIDEO, "demo.mp4"))
    with pytest.raises(demo.DemoError, match="but it is empty"):
        demo.output_file(entry, PROMPT, SAVE_VIDEO, base)


@pytest.mark.parametrize("subfolder", ["..", "../../x", "/etc"])
def test_output_file_elsewhere(demo, base, subfolder):
    entry = _entry([RUN], **_saved(SAVE_VIDEO, "passwd", subfolder))
    with pytest.raises(demo.DemoError, match="which is not below"):
        demo.output_file(entry, PROMPT, SAVE_VIDEO, base)


# ---- finding and installing


@pytest.fixture
def alone(demo, comfy_local, tmp_path, monkeypatch):
    """No ComfyUI anywhere; our own would be in tmp_path, and no command is really run."""
    own = tmp_path / "pack" / ".demo" / "ComfyUI"
    monkeypatch.setattr(comfy_local, "DEMO_CHECKOUT", own)
    monkeypatch.setattr(comfy_local, "find_comfyui", lambda: [])
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("COMFYUI_REPO", raising=False)
    monkeypatch.delenv("PIP_ARGS", raising=False)
    return own


def test_find_or_install_takes_the_first_usable(demo, comfy_local, alone, monkeypatch, capsys):
    bad = comfy_local.Checkout(Path("/a"), None, "0.3.64", "python lacks torch")
    good = comfy_local.Checkout(Path("/b"), Path("/b/python"), "0.33.0")
    monkeypatch.setattr(comfy_local, "find_comfyui", lambda: [bad, good])
    assert demo.find_or_install() == good
    assert "passing over ComfyUI 0.3.64 in /a, not usable" in capsys.readouterr().out


def test_find_or_install_does_not_pass_over_what_was_asked_for(
    demo, comfy_local, alone, monkeypatch
):
    bad = comfy_local.Checkout(Path("/a"), None, "0.3.64", "python lacks torch")
    monkeypatch.setattr(comfy_local, "find_comfyui", lambda: [bad])
    monkeypatch.setenv("COMFYUI_PATH", "/a")
    with pytest.raises(demo.DemoError, match=r"COMFYUI_PATH: .* python lacks torch"):
        demo.find_or_install()


@pytest.fixture
def repo(tmp_path, make_checkout):
    """A git repository with just enough to be a ComfyUI without requirements."""
    path = make_checkout(tmp_path / "repo")
    (path / "requirements.txt").write_text("# none\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], cwd=path, check=True)
    return path


@pytest.fixture
def steps(demo, comfy_local, alone, repo, monkeypatch):
    """Clone really, but stand a script in for the environment, and let pip fail while told to."""
    monkeypatch.setenv("COMFYUI_REPO", str(repo))
    monkeypatch.setattr(comfy_local, "NEEDED_MODULES", ("json",))
    real = demo._run_step

    class Steps(list):
        pip_fails = False

        def __call__(self, command, failure):
            self.append(command)
            if "venv" in command:
                python = comfy_local.venv_python(Path(command[-1]))
                python.parent.mkdir(parents=True)
                python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
                python.chmod(0o755)
            elif "pip" in command:
                if self.pip_fails:
                    raise demo.DemoError(failure)
            else:
                real(command, failure)

    recorded = Steps()
    monkeypatch.setattr(demo, "_run_step", recorded)
    return recorded


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")
def test_find_or_install_clones_and_installs_once(
    demo, comfy_local, alone, steps, monkeypatch, capfd
):
    monkeypatch.setenv("PIP_ARGS", "--quiet --index-url 'http://a b'")
    # What an interrupted clone leaves.
    leftover = alone.with_name("ComfyUI.part")
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("")

    checkout = demo.find_or_install()
    python = comfy_local.venv_python(alone / ".venv")
    assert checkout == comfy_local.Checkout(alone, python, "0.33.0")
    assert not leftover.exists() and not (alone / "half").exists()
    assert steps[0][:2] == ["git", "clone"]
    assert steps[1] == [sys.executable, "-m", "venv", "--clear", str(alone / ".venv")]
    pip_args = ["--quiet", "--index-url", "http://a b"]
    requirements = alone / "requirements.txt"
    assert steps[2:] == [[str(python), "-m", "pip", "install", *pip_args, "-r", str(requirements)]]

    assert demo.find_or_install() == checkout
    assert len(steps) == 3

    # New requirements are installed into the environment that is there.
    requirements.write_text("# still none\n")
    demo.find_or_install()
    assert steps[3:] == [steps[2]]


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")
def test_find_or_install_goes_on_where_it_failed(
    demo, comfy_local, alone, steps, monkeypatch, capfd
):
    steps.pip_fails = True
    with pytest.raises(demo.DemoError, match=r"could not install ComfyUI's requirements.*goes on"):
        demo.find_or_install()
    assert len(steps) == 3

    # It is found now, though it is not finished.
    monkeypatch.setattr(comfy_local, "find_comfyui", lambda: [comfy_local.checkout_at(alone)])
    steps.pip_fails = False
    assert demo.find_or_install().python == comfy_local.venv_python(alone / ".venv")
    assert steps[3:] == [steps[2]]


def test_clone_failure(demo, alone, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("COMFYUI_REPO", str(tmp_path / "no-such-repo"))
    with pytest.raises(demo.DemoError, match=r"could not clone .*set COMFYUI_REPO .*COMFYUI_PATH"):
        demo.clone(alone)
    assert not alone.exists()


def test_clone_something_else(demo, alone, repo, monkeypatch, capfd):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "rm", "-q", "main.py"], cwd=repo, check=True)
    subprocess.run([*git, "commit", "-qm", "y"], cwd=repo, check=True)
    monkeypatch.setenv("COMFYUI_REPO", str(repo))
    with pytest.raises(demo.DemoError, match=r"is no ComfyUI: it has no main\.py"):
        demo.clone(alone)
    assert not alone.exists()


def test_clone_without_git(demo, alone, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(demo.DemoError, match="no git to get one; install git, or set COMFYUI_PATH"):
        demo.clone(alone)


@pytest.fixture
def importing(demo, comfy_local, tmp_path, make_checkout, monkeypatch):
    """Run check_imports() with small modules of ours in the place of the real ones."""

    def run(requirements, **modules):
        path = make_checkout(tmp_path / "ComfyUI")
        (path / "requirements.txt").write_text(requirements)
        for name, body in modules.items():
            (path / f"{name}.py").write_text(body)
        demo.check_imports(comfy_local.Checkout(path, Path(sys.executable), "0.33.0"))

    return run


GOOD = {"torch": "", "safetensors": "", "av": ""}


def test_check_imports(importing):
    # Neither torchvision nor torchaudio is there, and neither is asked for.
    importing("torch\nav>=16\nsafetensors\n", **GOOD)


def test_check_imports_torchaudio(importing, demo):
    broken = "raise OSError('libcudart.so.13: cannot open shared object file\\nsecond line')"
    with pytest.raises(demo.DemoError) as error_info:
        importing("torch\ntorchvision\ntorchaudio\n", **GOOD, torchvision="", torchaudio=broken)
    text = str(error_info.value)
    assert "  torchaudio: OSError: libcudart.so.13: cannot open shared object file\n" in text
    assert "  torchvision" not in text
    assert "--force-reinstall torch torchvision torchaudio --index-url" in text
    assert "Install ComfyUI's requirements" not in text
    assert "COMFYUI_PATH" in text


def test_check_imports_av(importing, demo):
    with pytest.raises(demo.DemoError) as error_info:
        importing("torch\n", **{**GOOD, "av": "import no_such_module"})
    text = str(error_info.value)
    assert "  av: ModuleNotFoundError: No module named 'no_such_module'\n" in text
    assert "-m pip install -r " in text and "--force-reinstall" not in text


def test_check_imports_crash(importing, demo):
    crash = "import os, sys; sys.stderr.write('Illegal instruction'); os._exit(132)"
    with pytest.raises(demo.DemoError, match=r"(?s)exit code 132.*Illegal instruction"):
        importing("torch\n", **{**GOOD, "torch": crash})


def test_check_nodes(demo, comfy_local):
    class Server:
        checkout = comfy_local.Checkout(Path("/a"), None, "0.3.10")

        def __init__(self, *missing):
            self.missing = missing

        def object_info(self):
            names = {node["class_type"] for node in PROMPT.values()}
            return dict.fromkeys(names - set(self.missing))

    demo.check_nodes(Server(), PROMPT)
    with pytest.raises(demo.DemoError, match=r"0\.3\.10 has no node SaveVideo; it is older than"):
        demo.check_nodes(Server("SaveVideo"), PROMPT)
    with pytest.raises(demo.DemoError, match="no node HopperSolAttention; see the log for why"):
        demo.check_nodes(Server("HopperSolAttention"), PROMPT)


# ---- main


@pytest.mark.parametrize("kind", ["demo", "comfy"])
def test_main_failure(demo, comfy_local, monkeypatch, tmp_path, capsys, kind):
    error = demo.DemoError if kind == "demo" else comfy_local.ServerError

    def fail(*args):
        raise error("no luck")

    monkeypatch.setattr(demo, "demo", fail)
    monkeypatch.setattr(demo.signal, "signal", lambda *args: None)
    assert demo.main(["--base", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "demo: error: no luck\n"


def test_main_success(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo.signal, "signal", lambda *args: None)
    monkeypatch.setattr(demo, "demo", lambda *args: f"done {args}")
    assert demo.main(["--base", str(tmp_path), "--port", "1234", "--timeout", "5"]) == 0
    assert capsys.readouterr().out == f"demo: done {(tmp_path, 1234, 5.0)}\n"


def test_demo_from_another_folder(demo, comfy_local, tmp_path):
    """The script needs nothing but the standard library, and no particular current folder."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(ROOT / "workflows" / "demo.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--timeout" in done.stdout
