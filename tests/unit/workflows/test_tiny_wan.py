"""workflows/tiny_wan.py: names, shapes and values of the random checkpoint."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def test_wan_state_dict_shapes(tiny_wan):
    tensors = tiny_wan.wan_state_dict(dim=256, blocks=2, ffn=512)

    assert {k: tuple(v.shape) for k, v in tensors.items() if not k.startswith("blocks.")} == {
        "patch_embedding.weight": (256, 16, 1, 2, 2),
        "patch_embedding.bias": (256,),
        "text_embedding.0.weight": (256, 4096),
        "text_embedding.0.bias": (256,),
        "text_embedding.2.weight": (256, 256),
        "text_embedding.2.bias": (256,),
        "time_embedding.0.weight": (256, 256),
        "time_embedding.0.bias": (256,),
        "time_embedding.2.weight": (256, 256),
        "time_embedding.2.bias": (256,),
        "time_projection.1.weight": (1536, 256),
        "time_projection.1.bias": (1536,),
        "head.modulation": (1, 2, 256),
        "head.head.weight": (64, 256),
        "head.head.bias": (64,),
    }
    block = {k.removeprefix("blocks.1."): tuple(v.shape) for k, v in tensors.items()}
    for attention in ("self_attn", "cross_attn"):
        for projection in "qkvo":
            assert block[f"{attention}.{projection}.weight"] == (256, 256)
            assert block[f"{attention}.{projection}.bias"] == (256,)
        assert block[f"{attention}.norm_q.weight"] == (256,)
        assert block[f"{attention}.norm_k.weight"] == (256,)
    assert block["modulation"] == (1, 6, 256)
    assert block["norm3.weight"] == block["norm3.bias"] == (256,)
    assert block["ffn.0.weight"] == (512, 256)
    assert block["ffn.2.weight"] == (256, 512)

    assert {v.dtype for v in tensors.values()} == {torch.bfloat16}
    assert all(v.isfinite().all() and v.is_contiguous() for v in tensors.values())
    # 15 outside the blocks; 8 linears, 4 norms, modulation, norm3 and 2 ffn linears in each.
    assert len(tensors) == 15 + 2 * (16 + 4 + 1 + 2 + 4)


def test_wan_state_dict_linears_keep_the_variance(tiny_wan):
    weight = tiny_wan.wan_state_dict(blocks=1, dtype=torch.float32)["text_embedding.0.weight"]
    out = torch.randn(32, 4096, generator=torch.Generator().manual_seed(0)) @ weight.T
    assert out.std().item() == pytest.approx(1.0, abs=0.05)


def test_wan_state_dict_seed(tiny_wan):
    first = tiny_wan.wan_state_dict(dim=128, blocks=1, seed=1)
    again = tiny_wan.wan_state_dict(dim=128, blocks=1, seed=1)
    other = tiny_wan.wan_state_dict(dim=128, blocks=1, seed=2)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(torch.equal(first[k], other[k]) for k in first)


def test_wan_state_dict_more_blocks_leave_the_rest(tiny_wan):
    small = tiny_wan.wan_state_dict(dim=128, blocks=1)
    large = tiny_wan.wan_state_dict(dim=128, blocks=3)
    assert all(torch.equal(small[k], large[k]) for k in small)


def test_wan_state_dict_prefix(tiny_wan):
    plain = tiny_wan.wan_state_dict(dim=128, blocks=1)
    prefixed = tiny_wan.wan_state_dict(dim=128, blocks=1, prefix="model.diffusion_model.")
    assert list(prefixed) == [f"model.diffusion_model.{k}" for k in plain]
    assert all(torch.equal(plain[k], prefixed[f"model.diffusion_model.{k}"]) for k in plain)


@pytest.mark.parametrize("image_embedding", [False, True], ids=["wan2.2", "wan2.1"])
def test_wan_state_dict_image_to_video(tiny_wan, image_embedding):
    tensors = tiny_wan.wan_state_dict(dim=128, blocks=2, in_dim=36, image_embedding=image_embedding)
    assert tensors["patch_embedding.weight"].shape == (128, 36, 1, 2, 2)
    assert tensors["head.head.weight"].shape == (64, 128)
    # By this name ComfyUI tells the two apart.
    assert ("img_emb.proj.0.bias" in tensors) == image_embedding
    if image_embedding:
        assert tensors["img_emb.proj.1.weight"].shape == (1280, 1280)
        assert tensors["img_emb.proj.3.weight"].shape == (128, 1280)
        assert tensors["blocks.1.cross_attn.k_img.weight"].shape == (128, 128)
        assert tensors["blocks.1.cross_attn.norm_k_img.weight"].shape == (128,)


@pytest.mark.parametrize("dim", [0, -128, 200])
def test_wan_state_dict_bad_dim(tiny_wan, dim):
    with pytest.raises(ValueError, match=f"dim: got {dim}, need a multiple of 128"):
        tiny_wan.wan_state_dict(dim=dim)


def test_wan_state_dict_no_blocks(tiny_wan):
    with pytest.raises(ValueError, match="blocks: got 0, need at least 1"):
        tiny_wan.wan_state_dict(blocks=0)


def test_write_checkpoint(tiny_wan, tmp_path):
    tensors = tiny_wan.wan_state_dict(dim=128, blocks=1)
    path = tiny_wan.write_checkpoint(tmp_path / "new" / "tiny.safetensors", tensors)
    assert [p.name for p in path.parent.iterdir()] == ["tiny.safetensors"]
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[k], tensors[k]) for k in tensors)


def test_write_checkpoint_keeps_the_old_file_on_failure(tiny_wan, tmp_path, monkeypatch):
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(b"old")

    def fail(tensors, part, metadata):
        part.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tiny_wan, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_wan.write_checkpoint(path, {})
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.safetensors"]


def test_main(tiny_wan, tmp_path, capsys):
    path = tmp_path / "tiny.safetensors"
    sizes = ["--dim=128", "--blocks=1", "--ffn=256", "--in-dim=36"]
    assert tiny_wan.main([str(path), *sizes, "--fp32", "--prefix=p.", "--seed=3"]) == 0
    assert f"{path}: 42 tensors" in capsys.readouterr().out
    with safe_open(path, "pt") as file:
        assert file.get_slice("p.patch_embedding.weight").get_shape() == [128, 36, 1, 2, 2]
        assert file.get_tensor("p.blocks.0.ffn.0.weight").dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.bin"], "out: got 't.bin', need a name that ends in .safetensors"),
        (["t.safetensors", "--dim", "100"], "dim: got 100, need a multiple of 128"),
    ],
)
def test_main_bad_arguments(tiny_wan, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        tiny_wan.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
