"""What a checkpoint file is, told from its header; every file here is written by the test."""

import re

import pytest
import torch
from safetensors.torch import save_file

from hopper_sol.nodes.models.checkpoint import CheckpointFacts, inspect_checkpoint

DIM, FFN = 128, 192
BLOCK_KEYS = (
    *(f"self_attn.{n}.weight" for n in "qkvo"),
    *(f"cross_attn.{n}.weight" for n in "qkvo"),
    "ffn.0.weight",
    "ffn.2.weight",
    "modulation",
)


def wan(*, prefix="", blocks=2, dim=DIM, in_channels=16, out_channels=16, dtype=torch.bfloat16):
    """Tensors of a Wan checkpoint, as few and as small as its header allows."""
    tensors = {
        "patch_embedding.weight": torch.zeros(dim, in_channels, 1, 2, 2),
        "head.head.weight": torch.zeros(4 * out_channels, dim),
        "head.modulation": torch.zeros(1, 2, dim),
    }
    for index in range(blocks):
        tensors[f"blocks.{index}.self_attn.q.weight"] = torch.zeros(dim, dim)
        tensors[f"blocks.{index}.ffn.0.weight"] = torch.zeros(FFN, dim)
        for key in BLOCK_KEYS:
            tensors.setdefault(f"blocks.{index}.{key}", torch.zeros(1))
    return {prefix + key: tensor.to(dtype) for key, tensor in tensors.items()}


@pytest.fixture
def write(tmp_path):
    def write(tensors, name="model.safetensors", metadata=None):
        path = tmp_path / name
        save_file(tensors, path, metadata)
        return str(path)

    return write


def refused(path):
    """The message of the refusal."""
    with pytest.raises(ValueError) as error:
        inspect_checkpoint(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.float32, "F32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_inspect_plain_weights(dtype, name, write):
    path = write(wan(dtype=dtype))
    facts = inspect_checkpoint(path)
    with open(path, "rb") as file:
        size = len(file.read())
    assert facts == CheckpointFacts(
        family="Wan",
        variant="2.1 T2V",
        dim=DIM,
        ffn_dim=FFN,
        num_blocks=2,
        num_heads=1,
        dtype=name,
        size_bytes=size,
    )


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "model.model.", "net.", "model."])
def test_inspect_prefixed_keys(prefix, write):
    facts = inspect_checkpoint(write(wan(prefix=prefix, blocks=3, dim=256)))
    assert (facts.num_blocks, facts.dim, facts.num_heads) == (3, 256, 2)


def test_inspect_counts_blocks_by_their_number(write):
    """Ten and more: '10' sorts before '2'."""
    assert inspect_checkpoint(write(wan(blocks=12))).num_blocks == 12


@pytest.mark.parametrize("key", BLOCK_KEYS)
def test_inspect_refuses_a_block_without(key, write):
    tensors = wan(prefix="net.", blocks=3)
    del tensors[f"net.blocks.1.{key}"]
    said = refused(write(tensors))
    assert said.startswith(
        f"model.safetensors: lacks 1 tensors of its 3 blocks, such as net.blocks.1.{key}"
    )
    assert "shards" in said


def test_inspect_refuses_a_gap(write):
    """One of several shards may hold blocks 0 and 2."""
    tensors = {k: v for k, v in wan(blocks=3).items() if not k.startswith("blocks.1.")}
    assert f"lacks {len(BLOCK_KEYS)} tensors of its 3 blocks" in refused(write(tensors))


def test_inspect_refuses_another_patch_embedding(write):
    said = refused(write({**wan(), "patch_embedding.weight": torch.zeros(8)}))
    assert "model.safetensors: patch_embedding is not a 3-D convolution" in said


def test_inspect_ignores_blocks_that_are_no_numbers(write):
    tensors = {**wan(), "blocks.extra.weight": torch.zeros(1)}
    assert inspect_checkpoint(write(tensors)).num_blocks == 2


def test_inspect_ignores_other_models_in_the_file(write):
    other = {"vae.decoder.conv_in.weight": torch.zeros(1), "blocks.7.x": torch.zeros(1)}
    facts = inspect_checkpoint(write({**wan(prefix="model.diffusion_model."), **other}))
    assert facts.num_blocks == 2


@pytest.mark.parametrize(
    ("shapes", "extra", "variant"),
    [
        ({}, None, "2.1 T2V"),
        ({"in_channels": 36}, None, "2.2 I2V"),
        ({"in_channels": 48, "out_channels": 48}, None, "2.2 5B"),
        ({"in_channels": 32}, None, "T2V-like"),
        ({"in_channels": 36}, "img_emb.proj.0.bias", "2.1 I2V"),
        ({}, "vace_patch_embedding.weight", "VACE"),
        ({}, "control_adapter.conv.weight", "Fun-Camera"),
        ({}, "casual_audio_encoder.encoder.final_linear.weight", "S2V"),
        ({}, "audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
        ({"in_channels": 36}, "face_adapter.fuser_blocks.0.k_norm.weight", "Animate"),
        ({"in_channels": 20}, "patch_embedding_mask.weight", "SCAIL-2"),
        ({"in_channels": 20}, "patch_embedding_pose.weight", "SCAIL"),
        ({"in_channels": 36}, "patch_embedding_global.weight", "WanDancer"),
        ({"in_channels": 48}, "ref_conv.weight", "Fun-Control"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_inspect_variants(shapes, extra, variant, prefix, write):
    tensors = wan(prefix=prefix, **shapes)
    if extra:
        tensors[prefix + extra] = torch.zeros(1)
    assert inspect_checkpoint(write(tensors)).variant == variant


@pytest.mark.parametrize(
    ("marker", "variant"),
    [("patch_embedding_pose.weight", "SCAIL"), ("ref_conv.weight", "Fun-Control")],
)
def test_inspect_variant_that_also_sees_pictures(marker, variant, write):
    """Several image-to-video variants have the image branch of Wan 2.1 too."""
    tensors = {**wan(), marker: torch.zeros(1), "img_emb.proj.0.bias": torch.zeros(1)}
    assert inspect_checkpoint(write(tensors)).variant == variant


def test_inspect_sft_suffix_in_any_case(write):
    assert inspect_checkpoint(write(wan(), "MODEL.SFT")).family == "Wan"


def test_describe_is_one_line():
    facts = CheckpointFacts("Wan", "2.1 T2V", 1536, 8960, 30, 12, "BF16", 2_838_276_232)
    assert facts.describe() == ("Wan 2.1 T2V: 30 blocks, 12 heads x 128, ffn 8960, BF16, 2.64 GiB")


# -- refused: quantised; what is taken is in test_stored_formats.py ----------------------------

Q = "blocks.0.self_attn.q."


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({Q + "weight_scale": torch.zeros(1)}, "scaled"),
        ({Q + "input_scale": torch.zeros(1)}, "scaled"),
        ({Q + "scale_weight": torch.zeros(1)}, "scaled BF16"),
        ({Q + "weight": torch.zeros(DIM, DIM, dtype=torch.int8)}, "I8"),
        ({Q + "weight": torch.zeros(DIM, DIM, dtype=torch.uint8)}, "U8"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_inspect_refuses_quantised(change, found, prefix, write):
    tensors = wan(prefix=prefix, dtype=torch.bfloat16)
    tensors.update({prefix + key: tensor for key, tensor in change.items()})
    message = refused(write(tensors, "wan_scaled.safetensors"))
    assert message.startswith(f"wan_scaled.safetensors: got a {found} quantised checkpoint")
    assert "need plain weights (BF16, FP16, FP32) or FP8" in message
    assert "Load Diffusion Model" in message


def test_inspect_takes_other_metadata(write):
    assert inspect_checkpoint(write(wan(), metadata={"format": "pt"})).dim == DIM


# -- refused: broken files ---------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -4096])
def test_inspect_refuses_truncated(keep, write):
    """Nothing at all, half a length, no header, half a header, and data that just stops."""
    path = write(wan(), "cut.safetensors")
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(data[:keep])
    message = refused(path)
    assert message.startswith("cut.safetensors: not a complete safetensors file (")
    assert "may be truncated" in message
    assert "download it again" in message


@pytest.mark.parametrize(
    "content",
    [b"<!DOCTYPE html>\n<title>404</title>", b"version https://git-lfs.github.com/spec/v1\n" * 9],
    ids=["html", "lfs-pointer"],
)
def test_inspect_refuses_text(content, tmp_path):
    path = tmp_path / "page.safetensors"
    path.write_bytes(content)
    message = refused(str(path))
    assert message.startswith("page.safetensors: not a complete safetensors file")
    assert "download it again" in message


def test_inspect_refuses_what_is_no_file(tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("folder.safetensors", "missing.safetensors"):
        assert refused(str(tmp_path / name)).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "found"),
    [("model.pt", ".pt"), ("model.ckpt", ".ckpt"), ("model.gguf", ".gguf"), ("model", "nameless"),
     ("model.safetensors.part", ".part")],
)  # fmt: skip
def test_inspect_refuses_other_suffixes_unopened(name, found, tmp_path):
    """A pickle could run code; it is not even opened."""
    message = refused(str(tmp_path / "does" / "not" / "exist" / name))
    assert message == f"{name}: got a {found} file, need .safetensors"


# -- refused: other models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "is a LoRA"),
        ("lora_unet_blocks_0_self_attn_q.lora_down.weight", "is a LoRA"),
        ("blocks.0.self_attn.q.lora_up.weight", "is a LoRA"),
        ("decoder.conv_in.weight", "is a VAE"),
        ("decoder.conv1.weight", "is a VAE"),
        ("encoder.shared.weight", "is a text encoder"),
        ("video_patch_proj.weight", "is part of a MiniMax-H3 model"),
        (
            "down_blocks.0.weight",
            "is no Wan or MiniMax-H3 model (1 tensors, such as 'down_blocks.0.weight')",
        ),
    ],
)
def test_inspect_says_what_another_file_is(key, what, write):
    message = refused(write({key: torch.zeros(2, 2)}, "other.safetensors"))
    assert message == (
        f"other.safetensors: {what}; this node loads Wan 2.1 and 2.2 and MiniMax-H3 diffusion models"
    )


def test_inspect_refuses_an_empty_file(write):
    message = refused(write({}, "empty.safetensors"))
    assert message.startswith("empty.safetensors: holds no tensors; this node loads")


@pytest.mark.parametrize(
    "missing",
    ["patch_embedding.weight", "blocks.0.ffn.0.weight", "blocks.0.self_attn.q.weight",
     "head.head.weight"],
)  # fmt: skip
def test_inspect_refuses_missing_keys(missing, write):
    tensors = wan(prefix="net.")
    del tensors["net." + missing]
    message = refused(write(tensors, "part.safetensors"))
    assert (
        message == f"part.safetensors: looks like Wan but lacks {missing}; the file is incomplete"
    )


def test_inspect_names_all_missing_keys(write):
    tensors = {"head.modulation": torch.zeros(1, 2, DIM)}
    message = refused(write(tensors))
    assert "patch_embedding.weight" in message and "head.head.weight" in message


def test_inspect_refuses_odd_width(write):
    message = refused(write(wan(dim=200), "thin.safetensors"))
    assert message == "thin.safetensors: got width 200, need a multiple of head_dim 128"


def test_every_refusal_names_the_file_without_its_folder(write, tmp_path):
    """Messages reach API clients; the folder is none of their business."""
    for tensors in ({}, wan(dim=200), {"lora_A.weight": torch.zeros(1)}):
        message = refused(write(tensors, "a file.safetensors"))
        assert re.match(r"a file\.safetensors: ", message)
        assert str(tmp_path) not in message
