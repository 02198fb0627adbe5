"""The shipped MiniMax-H3 workflows on a real server: as they are, and with a tiny model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.comfy

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
NAMES = ("h3_t2va", "h3_fl2va", "h3_ref2va", "h3_turbo", "h3_benchmark")
LAYERS = 4
VIDEO, AUDIO, TEXT = 7 * 36, 74, 64  # 192 x 192, 22 frames

# Nodes that name a file, and the input that does.
FILES = {
    "CLIPLoader": "clip_name",
    "HopperSolLoadVideoModel": "file",
    "LoadImage": "image",
    "LoraLoaderModelOnly": "lora_name",
    "VAELoader": "vae_name",
}
# What only files of several GiB could fill; the runs below go without.
TOO_LARGE = ("CLIPLoader", "VAELoader", "LoadImage", "VAEDecodeAudio")
# What stands in front of the video besides text and sound, and what brings it there.
IN_FRONT = {"h3_fl2va": ("first and last frame", 72), "h3_ref2va": ("reference picture", 15)}

spec = importlib.util.spec_from_file_location("h3_workflows_tiny", WORKFLOWS / "tiny_h3.py")
tiny_h3 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_h3)


def load(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


def of_kind(prompt, kind):
    return [key for key, node in prompt.items() if node["class_type"] == kind]


@pytest.fixture(scope="module")
def h3(comfy):
    """A server whose ComfyUI has the model."""
    if comfy.version < (0, 29, 0):
        pytest.skip("this ComfyUI has no MiniMax-H3")
    return comfy


@pytest.fixture
def tiny_models(h3):
    """Tiny files under the names in the workflows, for one test."""
    written = []
    for name in NAMES:
        prompt = load(name)
        for kind, folder in (
            ("HopperSolLoadVideoModel", "diffusion_models"), ("LoraLoaderModelOnly", "loras"),
        ):  # fmt: skip
            for key in of_kind(prompt, kind):
                path = h3.base / "models" / folder / prompt[key]["inputs"][FILES[kind]]
                if path.exists():
                    continue
                tensors = tiny_h3.h3_state_dict() if folder != "loras" else lora()
                tiny_h3.write_checkpoint(path, tensors)
                written.append(path)
    yield
    for path in written:
        path.unlink()


def lora():
    generator = torch.Generator().manual_seed(5)
    key = "diffusion_model.blocks.3.mlp.fc2"
    return {
        f"{key}.lora_A.weight": torch.randn(4, 512, generator=generator) * 0.1,
        f"{key}.lora_B.weight": torch.randn(256, 4, generator=generator) * 0.1,
    }


def small(prompt, name):
    """The workflow at a size that a CPU samples in a second, without encoders and VAEs.

    Text is synthetic, frames are previews of the latent, there is no sound; pictures are random
    latents in the conditioning.
    """
    gone = {key for key, node in prompt.items() if node["class_type"] in TOO_LARGE}
    (loader,) = of_kind(prompt, "HopperSolLoadVideoModel")
    (sol,) = of_kind(prompt, "HopperSolAttention")
    out = {}
    moved = {}  # links to the node that made conditioning and latent
    for key, node in prompt.items():
        kind, inputs = node["class_type"], dict(node["inputs"])
        if key in gone:
            continue
        if kind in ("MiniMaxH3ImageToVideo", "MiniMaxH3ReferenceToVideo"):
            text = {"model": [loader, 0], "variant": 1, "tokens": TEXT}
            out["text"] = {"class_type": "HopperSolSyntheticConditioning", "inputs": text}
            moved[key, 0] = ["text", 0]
            if name in IN_FRONT:
                inputs = {"conditioning": ["text", 0], "kind": IN_FRONT[name][0]}
                inputs |= {"height": 12, "width": 12}
                out["pictures"] = {"class_type": "ProbeH3Conditioning", "inputs": inputs}
                moved[key, 0] = ["pictures", 0]
            moved[key, 1] = ["size", 0]
            kind, key = "EmptyMiniMaxH3LatentAV", "size"
            inputs = {"width": 192, "height": 192, "length": 22}
        elif kind == "EmptyMiniMaxH3LatentAV":
            inputs = {"width": 192, "height": 192, "length": 22}
        elif kind == "HopperSolSyntheticConditioning":
            inputs["tokens"] = TEXT
        elif kind == "VAEDecode":
            kind = "HopperSolLatentPreviewFrames"
            inputs = {"latent": inputs["samples"], "model": [sol, 0], "scale": 4}
        elif kind == "CreateVideo":
            del inputs["audio"]
        elif kind == "HopperSolAttention":
            assert inputs["min_tokens"] == 8192
            inputs["min_tokens"] = 256
        elif kind == "BasicScheduler" and inputs["steps"] == 20:
            inputs["steps"] = 5
        out[key] = {"class_type": kind, "inputs": inputs}
    for node in out.values():
        for slot, value in node["inputs"].items():
            if isinstance(value, list):
                node["inputs"][slot] = moved.get(tuple(value), value)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_untouched_workflow_lacks_nothing_but_files(h3, name):
    prompt = load(name)
    rejected = sys.modules["hopper_sol_comfy_client"].PromptRejected
    with pytest.raises(rejected) as caught:
        h3.server.queue(prompt)
    complaints = caught.value.node_errors
    assert set(complaints) == {k for k, node in prompt.items() if node["class_type"] in FILES}
    for key, complaint in complaints.items():
        file = prompt[key]["inputs"][FILES[prompt[key]["class_type"]]]
        assert all(file in json.dumps(error) for error in complaint["errors"]), complaint


@pytest.mark.parametrize("name", NAMES)
def test_workflow_runs_sparse_and_in_fp8(h3, tiny_models, name):
    prompt = small(load(name), name)
    result = h3.queue(prompt)
    (report,) = of_kind(prompt, "HopperSolRunReport")
    run = result.report(report)[-1]
    steps = 8 if name == "h3_turbo" else 5
    assert run["status"] == "finished" and run["made_this_latent"]
    assert run["steps"] == steps == run["forwards"]
    before = TEXT + AUDIO + IN_FRONT.get(name, ("", 0))[1]
    assert run["tokens"] == before + VIDEO
    assert run["self_attention_calls"] == LAYERS * steps
    dense = 3 if name == "h3_turbo" else 1
    assert run["sparse_calls"] == (steps - dense) * 2  # two layers stay dense
    assert run["linear"]["converted"] == 4 * LAYERS
    assert run["linear"]["fp8_calls"] == run["linear"]["calls"] == 4 * LAYERS * steps
    assert not any("instead" in note or "bypass" in note for note in run["notes"])
    assert any(f"conditioning tokens: {before} (" in note for note in run["notes"])
    for key in of_kind(prompt, "SaveVideo"):
        (video,) = result.outputs[key]["images"]
        path = h3.base / "output" / video["subfolder"] / video["filename"]
        assert path.suffix == ".mp4" and path.stat().st_size > 1000
        assert path.name.startswith(name)


def test_turbo_lora_reaches_the_fp8_weights(h3, tiny_models):
    prompt = small(load("h3_turbo"), "h3_turbo")
    (sampler,) = of_kind(prompt, "SamplerCustomAdvanced")
    prompt["split"] = {
        "class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": [sampler, 0]},
    }  # fmt: skip
    inputs = {"samples": ["split", 0], "filename_prefix": "test"}
    prompt["save"] = {"class_type": "SaveLatent", "inputs": inputs}
    (lora_node,) = of_kind(prompt, "LoraLoaderModelOnly")
    latents = []
    for strength in (1.0, 0.0):
        prompt[lora_node]["inputs"]["strength_model"] = strength
        latents.append(h3.queue(prompt).latent())
    assert not torch.equal(*latents)
