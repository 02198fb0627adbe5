"""The shipped workflows on a real server: as they are, and with tiny models in place of real ones."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows" / "api"
NAMES = ("wan21_t2v", "wan21_i2v", "wan22_a14b_t2v", "wan_benchmark")
LAYERS = 4

# Nodes that name a file, and the input that does.
FILES = {
    "CLIPLoader": "clip_name",
    "CLIPVisionLoader": "clip_name",
    "HopperSolLoadVideoModel": "file",
    "LoadImage": "image",
    "VAELoader": "vae_name",
}
# What only files of several GiB could fill; the runs below go without.
TOO_LARGE = ("CLIPLoader", "CLIPVisionLoader", "CLIPVisionEncode", "VAELoader", "LoadImage")


def load(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text())


def of_kind(prompt, kind):
    """Ids of the nodes of one class, in the order of the file."""
    return [key for key, node in prompt.items() if node["class_type"] == kind]


@pytest.fixture
def tiny_models(comfy):
    """Tiny checkpoints under the names in the workflows, for one test."""
    tiny_wan = sys.modules["tiny_wan"]
    folder = comfy.base / "models" / "diffusion_models"
    written = []
    for name in NAMES:
        prompt = load(name)
        for key in of_kind(prompt, "HopperSolLoadVideoModel"):
            path = folder / prompt[key]["inputs"]["file"]
            image = {"in_dim": 36, "image_embedding": True} if "i2v" in path.name else {}
            if not path.exists():
                tensors = tiny_wan.wan_state_dict(seed=len(written), **image)
                tiny_wan.write_checkpoint(path, tensors)
                written.append(path)
    yield
    for path in written:
        path.unlink()


def small(prompt, node):
    """The workflow at a size that a CPU samples in a second, without encoders and VAE.

    Text is synthetic, frames are previews of the latent. A start image's own part (its latent) is
    left out, its part in the conditioning is random.
    """
    gone = {key for key, value in prompt.items() if value["class_type"] in TOO_LARGE}
    loader = of_kind(prompt, "HopperSolLoadVideoModel")[0]
    sol = of_kind(prompt, "HopperSolAttention")[-1]
    out = {}
    for key, value in prompt.items():
        kind, inputs = value["class_type"], dict(value["inputs"])
        if key in gone:
            continue
        if kind == "CLIPTextEncode":
            kind = "HopperSolSyntheticConditioning"
            inputs = {"model": [loader, 0], "variant": len(out), "tokens": 64}
        elif kind == "VAEDecode":
            kind = "HopperSolLatentPreviewFrames"
            inputs = {"latent": inputs["samples"], "model": [sol, 0], "scale": 4}
        elif kind == "HopperSolAttention":
            assert inputs["min_tokens"] == 8192
            inputs["min_tokens"] = 256
        elif kind == "WanImageToVideo":
            for name in ("positive", "negative"):
                image = {"kind": "clip vision", "frames": 257, "height": 1, "width": 1}
                out[f"{key} {name}"] = {
                    "class_type": "ProbeConditioning",
                    "inputs": {"conditioning": inputs[name], **image},
                }
                inputs[name] = [f"{key} {name}", 0]
            out["vae"] = node("ProbeAny", value="not asked", number=False)
            inputs["vae"] = ["vae", 0]
            del inputs["start_image"], inputs["clip_vision_output"]
        if "length" in inputs:
            inputs.update(width=192, height=192, length=9)
        if "steps" in inputs:
            scale = 4 / inputs["steps"]
            inputs["steps"] = 4
            for name in ("start_at_step", "end_at_step"):
                if inputs.get(name, 10000) < 10000:
                    inputs[name] = round(inputs[name] * scale)
        out[key] = {"class_type": kind, "inputs": inputs}
    return out


@pytest.mark.parametrize("name", NAMES)
def test_untouched_workflow_lacks_nothing_but_files(comfy, name):
    prompt = load(name)
    rejected = sys.modules["hopper_sol_comfy_client"].PromptRejected
    with pytest.raises(rejected) as caught:
        comfy.server.queue(prompt)
    complaints = caught.value.node_errors
    wanted = {key for key, node in prompt.items() if node["class_type"] in FILES}
    assert set(complaints) == wanted
    for key, complaint in complaints.items():
        kind = prompt[key]["class_type"]
        file = prompt[key]["inputs"][FILES[kind]]
        assert all(file in json.dumps(error) for error in complaint["errors"]), complaint


@pytest.mark.parametrize("name", NAMES)
def test_workflow_runs_sparse_and_in_fp8(comfy, node, tiny_models, name):
    prompt = small(load(name), node)
    result = comfy.queue(prompt)
    reports = of_kind(prompt, "HopperSolRunReport")
    assert len(reports) == (2 if "a14b" in name else 1)
    for key in reports:
        run = result.report(key)[-1]
        assert run["status"] == "finished" and run["made_this_latent"]
        assert run["tokens"] == 432 and run["self_attention_calls"] == LAYERS * run["forwards"]
        assert run["sparse_calls"] > 0 and run["linear"]["fp8_calls"] > 0
        assert run["linear"]["fp8_calls"] == run["linear"]["calls"]
        assert not any("instead" in note or "bypass" in note for note in run["notes"])
    for key in of_kind(prompt, "SaveVideo"):
        (video,) = result.outputs[key]["images"]
        path = comfy.base / "output" / video["subfolder"] / video["filename"]
        assert path.suffix == ".mp4" and path.stat().st_size > 1000
        assert path.name.startswith(name)


def test_each_expert_has_its_own_run(comfy, node, tiny_models):
    """High noise: half of the steps, the first dense. Low noise: the rest, all of them sparse."""
    prompt = small(load("wan22_a14b_t2v"), node)
    result = comfy.queue(prompt)
    runs = [run for key in of_kind(prompt, "HopperSolRunReport") for run in result.report(key)]
    assert [run["steps"] for run in runs] == [2, 2]
    kinds = [["dense" if row[1] == 1.0 else "sparse" for row in run["map"]] for run in runs]
    assert kinds == [["dense", "sparse"], ["sparse", "sparse"]]
    assert [run["dense_calls"].get("dense step", 0) > 0 for run in runs] == [True, False]
