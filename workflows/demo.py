"""Sample a tiny random Wan with Sol Attention through a real, headless ComfyUI.

    make demo        (or: python3 workflows/demo.py)

Finds a ComfyUI (comfy_local.find_comfyui), or clones and installs one below .demo/ when there is
none; gives it a base directory with this pack and a 10 MB random checkpoint; queues
api/wan_t2v_demo.json; and checks that a video and the report's picture came out. The last line
says how many attention calls ran sparse, how many dense and why, and where the files are.

Needs no GPU, no model download and no packages besides ComfyUI's own. Variables: COMFYUI_PATH,
COMFYUI_PYTHON (which ComfyUI), COMFYUI_REPO (where to clone from), PIP_ARGS (added to pip install).
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent


def _load_sibling(name: str):
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    spec = importlib.util.spec_from_file_location(f"hopper_sol_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


comfy_local = _load_sibling("comfy_local")

DEFAULT_REPO = "https://github.com/comfyanonymous/ComfyUI"
PROMPT_FILE = HERE / "api" / "wan_t2v_demo.json"
DEMO_ROOT = comfy_local.PACK_ROOT / ".demo"
# What ComfyUI and the demo import of packages that hold compiled code, and so can be broken.
COMPILED_MODULES = ("torch", "torchvision", "torchaudio", "safetensors", "av")


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why, and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if both files are there, 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--base",
        type=Path,
        default=DEMO_ROOT / "base",
        help="ComfyUI base directory to use and to leave behind (default: .demo/base)",
    )
    parser.add_argument("--port", type=int, help="port of the server (default: a free one)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for the sampling (default: 900)"
    )
    options = parser.parse_args(argv)
    # A plain SIGTERM would end us without stopping the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        say(demo(options.base.expanduser().absolute(), options.port, options.timeout))
    except (DemoError, comfy_local.ComfyError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def demo(base: Path, port: int | None, timeout: float) -> str:
    """Do all of it; the summary line. Raises DemoError, ComfyError."""
    checkout = find_or_install()
    say(f"ComfyUI {checkout.version} in {_shown(checkout.path)}")
    check_imports(checkout)
    comfy_local.link_pack(base)
    prompt = json.loads(PROMPT_FILE.read_text(encoding="utf-8"))
    make_checkpoint(checkout, base, _input(prompt, "HopperSolLoadVideoModel", "file"))

    with comfy_local.Server(checkout, base, port=port) as server:
        say(f"server on port {server.port}, log in {_shown(server.log_path)}")
        try:
            check_nodes(server, prompt)
            entry = server.run(prompt, timeout, on_poll=Progress(server))
            report = report_of(entry, prompt)
            video = output_file(entry, prompt, "SaveVideo", base)
            picture = output_file(entry, prompt, "SaveImage", base)
            return summary(report, _shown(video), _shown(picture))
        except comfy_local.ServerError:
            raise  # has the log's end in its text
        except (DemoError, comfy_local.ComfyError) as error:
            raise DemoError(
                f"{error}\nThe end of the server's log ({server.log_path}):\n{server.log_tail()}"
            ) from error


# ---- a ComfyUI to run


def find_or_install() -> Any:
    """The Checkout to use: one that is there, else our own, cloned and installed if need be.

    Raises:
        DemoError: COMFYUI_PATH names one that has no Python to run it, or installing failed.
    """
    own = comfy_local.DEMO_CHECKOUT
    for checkout in comfy_local.find_comfyui():
        if checkout.path.resolve() == own.resolve():
            break  # it may be half installed
        if checkout.python:
            return checkout
        if os.environ.get("COMFYUI_PATH"):
            raise DemoError(f"COMFYUI_PATH: {checkout}")
        say(f"passing over {checkout}")
    clone(own)
    install(own)
    checkout = comfy_local.checkout_at(own)
    if checkout.python is None:
        raise DemoError(f"{checkout}; remove {own} to install it anew")
    return checkout


def clone(path: Path) -> None:
    """Clone ComfyUI to `path`; nothing to do where it already is. Raises DemoError."""
    if (path / "main.py").is_file():
        return
    repo = os.environ.get("COMFYUI_REPO") or DEFAULT_REPO
    if shutil.which("git") is None:
        raise DemoError(
            "there is no ComfyUI here and no git to get one; install git, or set COMFYUI_PATH to "
            "a ComfyUI checkout"
        )
    say(f"no ComfyUI found; cloning {repo} into {_shown(path)}")
    part = path.with_name(path.name + ".part")
    for leftover in (part, path):
        if leftover.exists():
            shutil.rmtree(leftover)
    part.parent.mkdir(parents=True, exist_ok=True)
    _run_step(
        ["git", "clone", "--depth", "1", "--", repo, str(part)],
        f"could not clone {repo}; set COMFYUI_REPO to an address or a folder that git can clone "
        "ComfyUI from, or COMFYUI_PATH to a ComfyUI that is installed already",
    )
    if not (part / "main.py").is_file():
        raise DemoError(f"{repo} is no ComfyUI: it has no main.py; correct COMFYUI_REPO")
    part.rename(path)


def install(path: Path) -> None:
    """Install ComfyUI's requirements into <path>/.venv, unless that was done. Raises DemoError."""
    requirements = path / "requirements.txt"
    venv = path / ".venv"
    python = comfy_local.venv_python(venv)
    stamp = venv / "hopper_sol_installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == wanted:
        return

    has_pip = (
        python.is_file()
        and not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
    )
    if not has_pip:
        say(f"making a virtual environment in {_shown(venv)}")
        _run_step(
            [sys.executable, "-m", "venv", "--clear", str(venv)],
            f"{sys.executable} cannot make a virtual environment (on Debian and Ubuntu that takes "
            "the package python3-venv); or set COMFYUI_PATH to a ComfyUI that is installed already",
        )
    say(
        "installing ComfyUI's requirements; torch alone can be several GB, and PIP_ARGS is added "
        "to the command (an --extra-index-url that has another build of torch, say)"
    )
    pip_args = shlex.split(os.environ.get("PIP_ARGS", ""))
    _run_step(
        [str(python), "-m", "pip", "install", *pip_args, "-r", str(requirements)],
        "could not install ComfyUI's requirements; what is installed is kept, so that running "
        "this again goes on from there. PIP_ARGS is added to the command; or set COMFYUI_PATH to "
        "a ComfyUI that is installed already",
    )
    stamp.write_text(wanted + "\n", encoding="utf-8")


def check_imports(checkout: Any) -> None:
    """Import what ComfyUI's Python must have before the server is started. Raises DemoError."""
    requirements = checkout.path / "requirements.txt"
    listed = requirements.read_text(encoding="utf-8") if requirements.is_file() else ""
    # torchvision and torchaudio left ComfyUI's requirements in some versions.
    named = {re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0].lower() for line in listed.splitlines()}
    modules = [m for m in COMPILED_MODULES if m in named or m not in ("torchvision", "torchaudio")]
    code = (
        "import importlib, json, sys\n"
        "bad = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        bad[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(bad))\n"
    )
    done = subprocess.run(
        [checkout.python, "-c", code, *modules],
        cwd=checkout.path,
        capture_output=True,
        text=True,
    )
    try:
        bad = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise DemoError(
            f"{checkout.python} cannot import {', '.join(modules)}: exit code {done.returncode}\n"
            f"{done.stderr[-2000:]}"
        ) from None
    if bad:
        raise DemoError(_import_advice(checkout, bad))


def _import_advice(checkout: Any, bad: Mapping[str, str]) -> str:
    lines = [f"{checkout.python} cannot import what ComfyUI needs:"]
    lines += [f"  {name}: {error.splitlines()[0]}" for name, error in bad.items()]
    pip = f"{checkout.python} -m pip install"
    if set(bad) & {"torch", "torchvision", "torchaudio"}:
        lines.append(
            "torch, torchvision and torchaudio must be builds that belong together, all for the "
            "CPU or all for the same CUDA. Install the three in one command, with the --index-url "
            "that https://pytorch.org/get-started/locally gives for this machine:"
        )
        lines.append(f"  {pip} --force-reinstall torch torchvision torchaudio --index-url ...")
    if set(bad) - {"torch", "torchvision", "torchaudio"}:
        lines.append("Install ComfyUI's requirements:")
        lines.append(f"  {pip} -r {checkout.path / 'requirements.txt'}")
    lines.append("Or name another ComfyUI with COMFYUI_PATH, another Python with COMFYUI_PYTHON.")
    return "\n".join(lines)


# ---- what the prompt needs


def make_checkpoint(checkout: Any, base: Path, name: str) -> Path:
    """The tiny checkpoint's path, written if it is not there. Raises DemoError."""
    path = base / "models" / "diffusion_models" / name
    if not path.is_file():
        say(f"writing a random checkpoint to {_shown(path)}")
        _run_step(
            [str(checkout.python), str(HERE / "tiny_wan.py"), str(path)],
            f"could not write {path}",
        )
    return path


def check_nodes(server: Any, prompt: Mapping[str, Any]) -> None:
    """Name every node that the prompt uses and the server lacks. Raises DemoError."""
    known = server.object_info()
    missing = sorted({node["class_type"] for node in prompt.values()} - set(known))
    if missing:
        ours = any(name.startswith("HopperSol") for name in missing)
        hint = "see the log for why" if ours else "it is older than 0.3.64"
        raise DemoError(
            f"ComfyUI {server.checkout.version} has no node {', '.join(missing)}; {hint}"
        )


# ---- what came out


def report_of(entry: Mapping[str, Any], prompt: Mapping[str, Any]) -> dict:
    """The last run in the JSON that the Run Report node showed. Raises DemoError."""
    shown = entry.get("outputs", {}).get(_node(prompt, "HopperSolRunReport"), {})
    try:
        runs = json.loads(shown["json"][0])["runs"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DemoError(f"the Run Report node left no report in the history: {error!r}") from error
    if not runs:
        raise DemoError("the report lists no sampler run: Sol Attention was not in use")
    run = runs[-1]
    if run.get("status") != "finished":
        raise DemoError(f"the report's run has status {run.get('status')!r}, need 'finished'")
    if not run.get("self_attention_calls"):
        raise DemoError("the report counts no self-attention call: Sol Attention was never asked")
    return run


def output_file(
    entry: Mapping[str, Any], prompt: Mapping[str, Any], class_type: str, base: Path
) -> Path:
    """The file that the prompt's node of this class has saved below <base>/output.

    Raises:
        DemoError: the history names none, or it is not there, empty, or elsewhere.
    """
    output = (base / "output").resolve()
    saved = entry.get("outputs", {}).get(_node(prompt, class_type), {}).get("images") or []
    if not saved:
        raise DemoError(f"{class_type} saved no file, according to the history")
    name = Path(saved[0].get("subfolder", "")) / saved[0]["filename"]
    path = (output / name).resolve()
    if not path.is_relative_to(output):
        raise DemoError(f"{class_type} saved {name}, which is not below {output}")
    if not path.is_file():
        raise DemoError(f"{class_type} saved {name}, but {path} is not there")
    if path.stat().st_size == 0:
        raise DemoError(f"{class_type} saved {path}, but it is empty")
    # As the user wrote the base directory, not as links resolve it.
    return base / "output" / name


def summary(run: Mapping[str, Any], video: str, picture: str) -> str:
    """One line: calls counted of calls expected, how many sparse, how many dense and why, files."""
    seen = run["self_attention_calls"]
    # Every forward of the model has one self-attention a block; a report may not say how many.
    expected = run.get("forwards", 0) * run.get("num_blocks", 0) or seen
    sparse = f"sparse {run['sparse_calls']}"
    if run.get("backend"):
        sparse += f" ({', '.join(run['backend'])})"
    dense = f"dense {sum(run['dense_calls'].values())}"
    if run["dense_calls"]:
        reasons = (f"{count} x {reason}" for reason, count in run["dense_calls"].items())
        dense += f" ({', '.join(reasons)})"
    text = f"{seen} of {expected} self-attention calls counted: {sparse}, {dense}"
    if run.get("density") is not None:
        text += f", density {run['density']:.2f}"
    return f"{text} -> {video}, {picture}"


# ---- small things


class Progress:
    """Shows what wait() polls: in place on a terminal, a line now and then elsewhere."""

    def __init__(self, server: Any):
        self._server = server
        self._shown: tuple[str, float] = ("", -10.0)

    def __call__(self, state: str, seconds: float) -> None:
        # ComfyUI's progress bar ends up in its log: "... | 3/6 [00:01<...".
        bars = re.findall(r"\|\s*(\d+)/(\d+) \[", self._server.log_text())
        step = f", step {bars[-1][0]} of {bars[-1][1]}" if bars else ""
        text, every = state + step, 1.0 if sys.stdout.isatty() else 10.0
        if seconds - self._shown[1] >= every or text != self._shown[0]:
            say(f"{text}, {seconds:.0f} s")
            self._shown = (text, seconds)


def say(text: str) -> None:
    """A line of the demo's own on stdout."""
    sys.stdout.write(f"demo: {text}\n")
    sys.stdout.flush()


def _run_step(command: list[str], failure: str) -> None:
    """Run a command with its output shown. Raises DemoError with `failure`."""
    try:
        code = subprocess.run(command).returncode
    except OSError as error:
        code = error
    if code:
        raise DemoError(f"{failure} (failed: {shlex.join(command)}: {code})")


def _node(prompt: Mapping[str, Any], class_type: str) -> str:
    return next(i for i, node in prompt.items() if node["class_type"] == class_type)


def _input(prompt: Mapping[str, Any], class_type: str, name: str) -> Any:
    return prompt[_node(prompt, class_type)]["inputs"][name]


def _shown(path: Path) -> str:
    """`path` as seen from the current folder where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
