"""MiniMax-H3 loaded in FP8 and saved: its modulation is kept in FP8 and computed without."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytestmark = pytest.mark.comfy

LAYERS = 4
PARTS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
LINEARS = LAYERS * len(PARTS)
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
    """Runs a model of a file; the answer, with the video in "save"."""

    def sample(file="h3_plain", precision="fp8", patches=(), loader="HopperSolLoadVideoModel"):
        graph, link = h3.model(patches, f"{file}.safetensors", loader)
        if loader == "HopperSolLoadVideoModel":
            graph["load"]["inputs"]["linear_precision"] = precision
        graph["shift"] = node(
            "MiniMaxH3SigmaShift", model=["load", 0], shift_video=12.0, shift_audio=3.0
        )
        for side, variant in (("positive", 1), ("negative", 2)):
            graph[side] = node(
                "HopperSolSyntheticConditioning", model=["load", 0], variant=variant, tokens=64
            )
        graph["empty"] = node("EmptyMiniMaxH3LatentAV", width=192, height=192, length=22)
        graph["sample"] = node(
            "KSampler", model=link, positive=["positive", 0], negative=["negative", 0],
            latent_image=["empty", 0], seed=3, steps=2, cfg=1.0, sampler_name="euler",
            scheduler="simple", denoise=1.0,
        )  # fmt: skip
        graph["split"] = node("LTXVSeparateAVLatent", av_latent=["sample", 0])
        h3.finish(graph, link, ["sample", 0], save=False)
        graph["save"] = node("SaveLatent", samples=["split", 0], filename_prefix="test")
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
    assert "unexpected" not in h3.server.log_text()
