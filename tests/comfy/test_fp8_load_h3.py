"""MiniMax-H3 loaded in FP8 and saved: its modulation is kept in FP8, or in 16 bits on request."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytestmark = pytest.mark.comfy

LAYERS = 4
PARTS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
LINEARS = LAYERS * len(PARTS)
ADALN = {f"blocks.{block}.adaln_proj.linear" for block in range(LAYERS)}
KEEP = "fp8_keep_adaln"
NODE = ("fp8", "HopperSolFP8Linear", {})
FILES = {"h3_plain": {}, "h3_curves": {"curves": True}, "h3_prefix": {"prefix": "net."}}


def _script(name):
    path = Path(__file__).resolve().parents[2] / "workflows" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"load_test_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def h3(comfy):
    """A server whose ComfyUI has the model, with tiny checkpoints."""
    if comfy.version < (0, 29, 0):
        pytest.skip("this ComfyUI has no MiniMax-H3")
    tiny_h3 = _script("tiny_h3")
    for name, options in FILES.items():
        path = comfy.base / "models" / "diffusion_models" / f"{name}.safetensors"
        tiny_h3.write_checkpoint(path, tiny_h3.h3_state_dict(**options))
    return comfy


@pytest.fixture
def sample(h3, node):
    """Runs a model of a file; the answer, with the video in "save" and types in "weights"."""

    def sample(file="h3_plain", precision="fp8", patches=(), loader="HopperSolLoadVideoModel"):
        graph, link = h3.model(patches, f"{file}.safetensors", loader)
        if loader == "HopperSolLoadVideoModel":
            graph["load"]["inputs"]["linear_precision"] = precision
        h3.finish_h3(graph, link)
        graph["weights"] = node("ProbeH3Weights", model=["load", 0], latent=["sample", 0])
        return h3.queue(graph)

    return sample


def rel_l2(got, want):
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("file", FILES)
def test_every_linear_of_the_blocks_runs_in_fp8(sample, file):
    result = sample(file)
    linear = result.run()["linear"]
    assert linear["converted"] == LINEARS
    assert linear["converted_layers"] == dict.fromkeys(PARTS, "0-3")
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS and linear["fallbacks"] == {}
    assert linear["formats"] == {"bfloat16 at load": LINEARS}
    # Over curve points modulation is small and FP32, and stays.
    kept = [] if file == "h3_curves" else [f"{LAYERS} further Linears are kept in FP8 and computed"]
    assert [note.rpartition(" ")[0] for note in linear["notes"]] == kept
    assert 0.001 < rel_l2(result.latent(), sample(file, "default").latent()) < 0.12


def test_the_node_differs_by_the_modulation_only(sample):
    """It keeps that as it is; where there is none to keep, the latents are the same."""
    nodes = sample("h3_curves", "default", [NODE])
    assert torch.equal(sample("h3_curves").latent(), nodes.latent())
    nodes = sample("h3_plain", "default", [NODE])
    assert 0.0005 < rel_l2(sample("h3_plain").latent(), nodes.latent()) < 0.1


def types(result):
    """Of the weights of adaLN, as the server's model has them."""
    weights = result.probe("weights")
    return {weights[name] for name in ADALN}


def test_adaln_kept_as_it_is(h3, sample):
    """Then nothing is left in which the node differs; its Linears are FP8 as ever."""
    plain, result = sample("h3_plain", "default", [NODE]), sample(precision=KEEP)
    weights, linear = result.probe("weights"), result.run()["linear"]
    (kept,) = types(plain)  # bfloat16 or, on a CPU, float32
    assert types(result) == {kept} and not kept.startswith("float8")
    fp8 = {name for name, dtype in weights.items() if dtype.startswith("float8")}
    assert fp8 == {f"blocks.{block}.{part}" for block in range(LAYERS) for part in PARTS}
    assert linear["converted"] == LINEARS and linear["fallbacks"] == {}
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS
    assert linear["notes"] == [f"{LAYERS} further Linears (adaLN) are kept in {kept}"]
    latent = result.latent()
    assert latent.isfinite().all()
    assert torch.equal(latent, plain.latent())
    # The two are not taken for each other, whichever was loaded first.
    stored = sample()
    assert types(stored) == {"float8_e4m3fn"}
    assert not torch.equal(stored.latent(), latent)
    assert torch.equal(sample(precision=KEEP).latent(), latent)
    assert re.search(r"with adaLN kept in 16 bits [\d.]+ GiB \(\d+%\)", h3.server.log_text())


def test_over_curve_points_there_is_no_adaln_to_keep(h3, sample):
    before = len(h3.server.log_text())
    result = sample("h3_curves", KEEP)
    assert result.run()["linear"]["notes"] == []
    assert torch.equal(result.latent(), sample("h3_curves").latent())
    said = h3.server.log_text()[before:]
    assert "fp8_keep_adaln is the same as fp8 here" in said and "kept in 16 bits" not in said


def test_made_anew_it_still_keeps_adaln(h3, checkout):
    """As ComfyUI does it for torch.compile and for several GPUs; in 16 bits as on a GPU."""
    here, models = Path(__file__).parent, h3.base / "models" / "diffusion_models"
    counted = {}
    for precision in ("fp8", KEEP):
        command = [checkout.python, here / "measure_load.py", checkout.path, here.parents[1]]
        file = models / "h3_plain.safetensors"
        done = subprocess.run(
            [*map(str, (*command, file, file)), precision],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found = dict(re.findall(r"(counted|again) (\d+)", done.stdout.splitlines()[-1]))
        assert found["counted"] == found["again"]
        counted[precision] = int(found["counted"])
    with safe_open(models / "h3_plain.safetensors", framework="pt") as file:
        shapes = [file.get_slice(f"{name}.weight").get_shape() for name in ADALN]
    # A byte more for each weight, but no FP32 scale of a row and no text about the format, which
    # ComfyUI counts, too.
    text = len('{"format": "float8_e4m3fn_rows"}')
    more = sum(rows * columns - 4 * rows - text for rows, columns in shapes)
    assert counted[KEEP] - counted["fp8"] == more


def check_widened(sample, file, stored):
    """adaLN that is FP8 in ``file`` is widened once by KEEP, and by ``stored``, a run, at each use."""
    kept = sample(file, KEEP)
    (wide,) = types(sample("h3_plain", "default"))
    assert types(kept) == {wide} and types(stored) == {"float8_e4m3fn"}
    notes = kept.run()["linear"]["notes"]
    assert f"{LAYERS} further Linears (adaLN) are kept in {wide}" in notes
    # 16 bits hold an E4M3 number times such a power of two, so the weights are the same.
    assert torch.equal(kept.latent(), stored.latent())


def test_saved_and_loaded_again(h3, node, sample):
    graph, link = h3.model(file="h3_plain.safetensors")
    graph["shift"] = node(
        "MiniMaxH3SigmaShift", model=["load", 0], shift_video=12.0, shift_audio=3.0
    )
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="h3_saved", overwrite=True)
    said = h3.queue(graph).outputs["save"]["text"][0]
    assert said.startswith(
        f"diffusion_models/h3_saved.safetensors: {LINEARS + LAYERS} Linears in FP8"
    )
    with safe_open(h3.base / "output" / said.partition(":")[0], framework="pt") as file:
        keys = set(file.keys())
        assert "blocks.0.adaln_proj.linear.comfy_quant" in keys
        settings = bytes(file.get_tensor("blocks.0.mlp.fc1.comfy_quant").tolist())
        assert json.loads(settings)["format"] == "float8_e4m3fn"
        assert file.get_tensor("video_patch_proj.weight").dtype == torch.float32
    core = sample("h3_saved", loader="UNETLoader")
    plain = sample("h3_plain", "default")
    assert 0.0005 < rel_l2(core.latent(), plain.latent()) < 0.1
    ours = sample("h3_saved")
    assert ours.run()["linear"]["fp8_calls"] == 2 * LINEARS
    assert rel_l2(ours.latent(), core.latent()) < 0.1
    check_widened(sample, "h3_saved", ours)
    # Saved once more, modulation is FP8 again, the same numbers.
    graph, link = h3.model(file="h3_saved.safetensors")
    graph["load"]["inputs"]["linear_precision"] = KEEP
    graph["save"] = node("HopperSolSaveFP8Model", model=link, name="h3_again", overwrite=True)
    again = h3.queue(graph).outputs["save"]["text"][0]
    assert f": {LINEARS + LAYERS} Linears in FP8" in again
    with (
        safe_open(h3.base / "output" / said.partition(":")[0], framework="pt") as first,
        safe_open(h3.base / "output" / again.partition(":")[0], framework="pt") as second,
    ):
        for name in ADALN:
            numbers = [
                f.get_tensor(f"{name}.weight").float() * f.get_tensor(f"{name}.weight_scale")
                for f in (first, second)
            ]
            assert torch.equal(*numbers)
    assert "unexpected" not in h3.server.log_text()


def raw_h3():
    """Linears and modulation of the blocks in FP8 without scales."""
    names = {f"{name}.weight" for name in ADALN}
    names |= {f"blocks.{block}.{part}.weight" for block in range(LAYERS) for part in PARTS}
    tensors = _script("tiny_h3").h3_state_dict()
    return {k: v.to(torch.float8_e4m3fn) if k in names else v for k, v in tensors.items()}


def test_raw_fp8_adaln_is_widened(h3, sample):
    path = h3.base / "models" / "diffusion_models" / "h3_raw.safetensors"
    _script("tiny_h3").write_checkpoint(path, raw_h3())
    check_widened(sample, "h3_raw", sample("h3_raw"))
