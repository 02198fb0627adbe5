"""MiniMax-H3 checkpoints, told from their headers; every file here is written by the test."""

import pytest
import torch
from safetensors.torch import save_file

from hopper_sol.nodes.models import checkpoint, h3_checkpoint
from hopper_sol.nodes.models.checkpoint import CheckpointFacts, inspect_checkpoint
from hopper_sol.nodes.models.h3_checkpoint import comfyui_has_h3, fp8_names, h3_prefix

BLOCK = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2", "adaln_proj.linear")


def h3(*, prefix="", blocks=2, curves=False, dtype=torch.bfloat16, head_dim=128):
    """Tensors of a checkpoint, as few and as small as its header allows."""
    tensors = {
        "video_patch_proj.weight": torch.zeros(192, 96),
        "audio_patch_proj.weight": torch.zeros(192, 32),
        "condition_proj.weight": torch.zeros(192, 8),
        "rope.inv_freq": torch.zeros(16),
        "final_layer.video_out.weight": torch.zeros(96, 192),
        "final_layer.audio_out.weight": torch.zeros(32, 192),
        "token_refiner.blocks.0.attn.qkv_proj.weight": torch.zeros(1),
    }
    if curves:
        tensors["adaln_t_table"] = torch.zeros(5, 8)
    for index in range(blocks):
        for name in BLOCK:
            tensors[f"blocks.{index}.{name}.weight"] = torch.zeros(1, 1)
        tensors[f"blocks.{index}.adaln_proj.linear.bias"] = torch.zeros(1)
        tensors[f"blocks.{index}.attn.qkv_proj.weight"] = torch.zeros(3 * 2 * 128, 1)
        tensors[f"blocks.{index}.attn.q_norm.weight"] = torch.zeros(head_dim)
        tensors[f"blocks.{index}.mlp.fc1.weight"] = torch.zeros(2 * 320, 1)
    return {prefix + key: tensor.to(dtype) for key, tensor in tensors.items()}


@pytest.fixture
def write(tmp_path):
    def write(tensors, name="h3.safetensors", metadata=None):
        path = tmp_path / name
        save_file(tensors, path, metadata)
        return str(path)

    return write


def refused(path):
    with pytest.raises(ValueError) as error:
        inspect_checkpoint(path)
    return str(error.value)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "model.model.", "net.", "model."])
def test_inspect(write, tmp_path, prefix):
    path = write(h3(prefix=prefix, blocks=12))
    assert inspect_checkpoint(path) == CheckpointFacts(
        family="MiniMax-H3",
        variant="audio and video",
        dim=192,
        ffn_dim=320,
        num_blocks=12,
        num_heads=2,
        dtype="BF16",
        size_bytes=(tmp_path / "h3.safetensors").stat().st_size,
    )


def test_inspect_curves(write):
    facts = inspect_checkpoint(write(h3(curves=True)))
    assert facts.variant == "with adaLN curves"
    assert facts.describe().startswith("MiniMax-H3 with adaLN curves: 2 blocks, 2 heads x 128")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("rope.inv_freq", "looks like MiniMax-H3 but lacks rope.inv_freq; the file is incomplete"),
        ("final_layer.audio_out.weight", "lacks final_layer.audio_out.weight"),
        (
            "blocks.1.mlp.fc2.weight",
            "lacks 1 tensors of its 2 blocks, such as blocks.1.mlp.fc2.weight; the file is incomplete",
        ),
        ("blocks.0.adaln_proj.linear.weight", "such as blocks.0.adaln_proj.linear.weight"),
    ],
)
def test_inspect_incomplete(write, lost, message):
    tensors = h3()
    del tensors[lost]
    assert message in refused(write(tensors))


def test_inspect_half_of_it(write):
    message = refused(write({"video_patch_proj.weight": torch.zeros(1, 1)}))
    assert message.startswith("h3.safetensors: is part of a MiniMax-H3 model; this node loads")


def test_inspect_other_heads(write):
    assert refused(write(h3(head_dim=64))) == ("h3.safetensors: got heads of 64 channels, need 128")


def test_inspect_in_a_comfyui_without_the_model(write, monkeypatch):
    monkeypatch.setattr(h3_checkpoint, "comfyui_has_h3", lambda: False)
    assert refused(write(h3())) == (
        "h3.safetensors: is a MiniMax-H3 model, which this ComfyUI does not have; update ComfyUI to "
        "0.29 or newer"
    )


def test_nothing_speaks_against_it_outside_comfyui():
    assert comfyui_has_h3()


@pytest.mark.parametrize(("found", "has"), [({"comfy.ldm"}, False), (set(), True)])
def test_comfyui_has_h3_looks_for_the_model(monkeypatch, found, has):
    spec = lambda name: "spec" if name in found else None
    monkeypatch.setattr(h3_checkpoint, "find_spec", spec)
    assert comfyui_has_h3() is has
    found.add("comfy.ldm.minimax.model")
    assert comfyui_has_h3()


def test_comfyui_has_h3_survives_a_missing_package(monkeypatch):
    def spec(name):
        if name == "comfy.ldm":
            return "spec"
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(h3_checkpoint, "find_spec", spec)
    assert not comfyui_has_h3()


def test_prefix_needs_both_streams():
    assert h3_prefix({"net.video_patch_proj.weight", "net.audio_patch_proj.weight"}) == "net."
    assert h3_prefix({"video_patch_proj.weight", "net.audio_patch_proj.weight"}) is None
    assert set(h3_checkpoint.PREFIXES) == set(checkpoint.PREFIXES)


@pytest.mark.parametrize("prefix", ["", "net."])
def test_fp8_names(prefix):
    """In block order, ten after nine; nothing outside the blocks, no bias, no norm."""
    computed, stored = fp8_names(h3(prefix=prefix, blocks=11).keys(), prefix)
    names = sorted(BLOCK[:4])
    assert computed == [
        f"{prefix}blocks.{block}.{name}.weight" for block in range(11) for name in names
    ]
    assert stored == [f"{prefix}blocks.{block}.adaln_proj.linear.weight" for block in range(11)]


def test_fp8_names_leave_curves_alone():
    computed, stored = fp8_names(h3(curves=True).keys(), "")
    assert len(computed) == 8 and stored == []
