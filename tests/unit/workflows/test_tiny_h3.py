"""workflows/tiny_h3.py: names, shapes and values of the random checkpoint."""

import pytest
import torch
from safetensors import safe_open

FP32 = (
    "video_patch_proj", "audio_patch_proj", "time_embedder", "rope", "final_layer.video_out",
    "final_layer.audio_out",
)  # fmt: skip


def test_h3_state_dict_shapes(tiny_h3):
    tensors = tiny_h3.h3_state_dict(
        hidden=192, heads=3, blocks=2, refiner_blocks=1, ffn=320, text_dim=48, time_dim=24
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {name: shape for name, shape in shapes.items() if "blocks." not in name} == {
        "video_patch_proj.weight": (192, 96),
        "video_patch_proj.bias": (192,),
        "audio_patch_proj.weight": (192, 32),
        "audio_patch_proj.bias": (192,),
        "condition_proj.weight": (192, 48),
        "condition_proj.bias": (192,),
        "time_embedder.proj_in.weight": (192, 256),
        "time_embedder.proj_in.bias": (192,),
        "time_embedder.proj_out.weight": (24, 192),
        "time_embedder.proj_out.bias": (24,),
        "rope.inv_freq": (16,),
        "token_refiner.final_norm.weight": (192,),
        "final_layer.norm.weight": (192,),
        "final_layer.adaln_proj.linear.weight": (384, 24),
        "final_layer.adaln_proj.linear.bias": (384,),
        "final_layer.video_out.weight": (96, 192),
        "final_layer.video_out.bias": (96,),
        "final_layer.audio_out.weight": (32, 192),
        "final_layer.audio_out.bias": (32,),
    }
    block = {
        "attn.qkv_proj.weight": (1152, 192),
        "attn.out_proj.weight": (192, 384),
        "attn.q_norm.weight": (128,),
        "attn.k_norm.weight": (128,),
        "mlp.fc1.weight": (640, 192),
        "mlp.fc2.weight": (192, 320),
        "norm1.weight": (192,),
        "norm2.weight": (192,),
    }
    for name, shape in block.items():
        assert shapes[f"blocks.1.{name}"] == shapes[f"token_refiner.blocks.0.{name}"] == shape
    assert shapes["blocks.1.adaln_proj.linear.weight"] == (18 * 192, 24)
    assert shapes["blocks.1.adaln_proj.linear.bias"] == (18 * 192,)
    assert len(tensors) == 19 + 8 + 2 * (8 + 2)
    assert all(v.isfinite().all() and v.is_contiguous() for v in tensors.values())


def test_h3_state_dict_keeps_the_fp32_islands(tiny_h3):
    tensors = tiny_h3.h3_state_dict(blocks=1)
    for name, tensor in tensors.items():
        assert (tensor.dtype == torch.float32) == name.startswith(FP32), name
    assert {v.dtype for v in tensors.values()} == {torch.float32, torch.bfloat16}


def test_h3_state_dict_curves(tiny_h3):
    """A table and narrow FP32 modulation in place of the time embedder."""
    tensors = tiny_h3.h3_state_dict(blocks=1, curves=True)
    assert tensors["adaln_t_table"].shape[1] == 8
    assert not any(name.startswith("time_embedder") for name in tensors)
    for name in ("blocks.0.adaln_proj.linear.weight", "final_layer.adaln_proj.linear.bias"):
        assert tensors[name].dtype == torch.float32
    assert tensors["blocks.0.adaln_proj.linear.weight"].shape[1] == 8


def test_h3_state_dict_linears_keep_the_variance(tiny_h3):
    weight = tiny_h3.h3_state_dict(hidden=1024, blocks=1, dtype=torch.float32)
    weight = weight["blocks.0.attn.qkv_proj.weight"]
    out = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0)) @ weight.T
    assert out.std().item() == pytest.approx(1.0, abs=0.05)


def test_h3_state_dict_seed_and_blocks(tiny_h3):
    first = tiny_h3.h3_state_dict(blocks=1, seed=1)
    assert all(torch.equal(v, tiny_h3.h3_state_dict(blocks=3, seed=1)[k]) for k, v in first.items())
    other = tiny_h3.h3_state_dict(blocks=1, seed=2)
    assert not any(torch.equal(v, other[k]) for k, v in first.items() if k != "rope.inv_freq")


@pytest.mark.parametrize("name", ["hidden", "heads", "blocks", "ffn", "text_dim"])
def test_h3_state_dict_bad_size(tiny_h3, name):
    with pytest.raises(ValueError, match=f"{name}: got 0, need at least 1"):
        tiny_h3.h3_state_dict(**{name: 0})


def test_main(tiny_h3, tmp_path, capsys):
    path = tmp_path / "tiny.safetensors"
    sizes = ["--hidden=128", "--heads=1", "--blocks=1", "--ffn=64", "--text-dim=16", "--prefix=p."]
    assert tiny_h3.main([str(path), *sizes, "--seed=3"]) == 0
    assert f"{path}: 37 tensors" in capsys.readouterr().out
    with safe_open(path, "pt") as file:
        assert file.get_slice("p.blocks.0.mlp.fc1.weight").get_shape() == [128, 128]


def test_main_bad_arguments(tiny_h3, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        tiny_h3.main(["t.safetensors", "--blocks", "0"])
    assert exit_info.value.code == 2
    assert "blocks: got 0, need at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
