"""What a checkpoint file is, read from its safetensors header alone: no weights are loaded."""

import os
from dataclasses import dataclass

from safetensors import SafetensorError, safe_open

PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.")
PLAIN_DTYPES = {"BF16", "F16", "F32"}
RAW_FP8_DTYPES = {"F8_E4M3", "F8_E5M2"}
HEAD_DIM = 128

# What every block of every Wan variant has.
_BLOCK_KEYS = (
    "modulation",
    *(f"{a}.{n}.weight" for a in ("self_attn", "cross_attn") for n in "qkvo"),
    "ffn.0.weight",
    "ffn.2.weight",
)

# (key that only this variant has, its name); the first that is present decides.
_WAN_MARKERS = (
    ("vace_patch_embedding.weight", "VACE"),
    ("control_adapter.conv.weight", "Fun-Camera"),
    ("casual_audio_encoder.encoder.final_linear.weight", "S2V"),
    ("audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
    ("face_adapter.fuser_blocks.0.k_norm.weight", "Animate"),
    ("patch_embedding_mask.weight", "SCAIL-2"),
    ("patch_embedding_pose.weight", "SCAIL"),
    ("patch_embedding_global.weight", "WanDancer"),
    ("ref_conv.weight", "Fun-Control"),
    ("img_emb.proj.0.bias", "I2V"),
)


@dataclass(frozen=True)
class CheckpointFacts:
    """A Wan checkpoint.

    Attributes:
        family: "Wan".
        variant: "2.1 T2V", "2.1 I2V", "2.2 5B", "2.2 I2V", "VACE", ...
        dim, ffn_dim, num_blocks, num_heads: of the transformer.
        dtype: safetensors name of the type of its Linear weights, "BF16", "F8_E4M3", ...
        size_bytes: of the file.
    """

    family: str
    variant: str
    dim: int
    ffn_dim: int
    num_blocks: int
    num_heads: int
    dtype: str
    size_bytes: int

    def describe(self) -> str:
        """One line for logs."""
        return (
            f"{self.family} {self.variant}: {self.num_blocks} blocks, {self.num_heads} heads x "
            f"{HEAD_DIM}, ffn {self.ffn_dim}, {self.dtype}, {self.size_bytes / 2**30:.2f} GiB"
        )


def inspect_checkpoint(path: str) -> CheckpointFacts:
    """Facts of the Wan checkpoint at ``path``.

    Raises:
        ValueError: not a readable safetensors file, not Wan, or a format that is not plain. The
            message says what was found and what to do.
    """
    name = os.path.basename(path)
    if not name.lower().endswith((".safetensors", ".sft")):
        raise ValueError(
            f"{name}: got a {os.path.splitext(name)[1] or 'nameless'} file, need .safetensors"
        )
    try:
        with safe_open(path, framework="pt") as file:
            shapes = _Header(file)
            return _inspect(name, shapes, os.path.getsize(path))
    except SafetensorError as error:
        raise ValueError(
            f"{name}: not a complete safetensors file ({error}); it may be truncated: "
            "compare its size with the source and download it again"
        ) from error
    except OSError as error:
        raise ValueError(f"{name}: can't be read ({error}); check that it is there") from error


class _Header:
    """Keys, shapes and dtypes of an open safetensors file."""

    def __init__(self, file):
        self._file = file
        self.keys = frozenset(file.keys())
        self.metadata = file.metadata() or {}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        return self._file.get_slice(key).get_dtype()


def _inspect(name: str, header: _Header, size_bytes: int) -> CheckpointFacts:
    prefix = next((p for p in PREFIXES if p + "head.modulation" in header.keys), None)
    if prefix is None:
        raise ValueError(
            f"{name}: {_what_it_is(header)}; this node loads Wan 2.1 and 2.2 diffusion models"
        )
    needed = (
        "patch_embedding.weight",
        "blocks.0.ffn.0.weight",
        "blocks.0.self_attn.q.weight",
        "head.head.weight",
    )
    missing = [key for key in needed if prefix + key not in header.keys]
    if missing:
        raise ValueError(
            f"{name}: looks like Wan but lacks {', '.join(missing)}; the file is incomplete"
        )

    _refuse_quantised(name, header, prefix)
    dim = header.shape(prefix + "blocks.0.self_attn.q.weight")[0]
    if dim % HEAD_DIM:
        raise ValueError(f"{name}: got width {dim}, need a multiple of head_dim {HEAD_DIM}")
    if len(header.shape(prefix + "patch_embedding.weight")) != 5:
        raise ValueError(
            f"{name}: patch_embedding is not a 3-D convolution; this is not a Wan file"
        )
    num_blocks = _complete_blocks(name, header, prefix)
    return CheckpointFacts(
        family="Wan",
        variant=_wan_variant(header, prefix),
        dim=dim,
        ffn_dim=header.shape(prefix + "blocks.0.ffn.0.weight")[0],
        num_blocks=num_blocks,
        num_heads=dim // HEAD_DIM,
        dtype=header.dtype(prefix + "blocks.0.self_attn.q.weight"),
        size_bytes=size_bytes,
    )


def _complete_blocks(name: str, header: _Header, prefix: str) -> int:
    """Number of transformer blocks; raises if the file, such as one of several shards, lacks some."""
    start = prefix + "blocks."
    found = {key[len(start) :].split(".")[0] for key in header.keys if key.startswith(start)}
    count = max((int(block) for block in found if block.isdigit()), default=0) + 1
    missing = [
        f"{start}{block}.{key}"
        for block in range(count)
        for key in _BLOCK_KEYS
        if f"{start}{block}.{key}" not in header.keys
    ]
    if missing:
        raise ValueError(
            f"{name}: lacks {len(missing)} tensors of its {count} blocks, such as {missing[0]}; "
            "the file is incomplete, or one of several shards"
        )
    return count


def _wan_variant(header: _Header, prefix: str) -> str:
    for marker, variant in _WAN_MARKERS:
        if prefix + marker in header.keys:
            return variant if variant != "I2V" else "2.1 I2V"
    out_channels = header.shape(prefix + "head.head.weight")[0] // 4
    in_channels = header.shape(prefix + "patch_embedding.weight")[1]
    if out_channels == 48:
        return "2.2 5B"
    return "2.2 I2V" if in_channels == 36 else "2.1 T2V" if in_channels == 16 else "T2V-like"


def _refuse_quantised(name: str, header: _Header, prefix: str) -> None:
    found = None
    if "_quantization_metadata" in header.metadata or any(
        k.endswith(".comfy_quant") for k in header.keys
    ):
        found = "comfy_quant"
    elif prefix + "scaled_fp8" in header.keys or any(
        k.endswith(".scale_weight") for k in header.keys
    ):
        found = "scaled FP8"
    elif any(k.endswith((".weight_scale", ".input_scale")) for k in header.keys):
        found = "scaled"
    dtype = header.dtype(prefix + "blocks.0.self_attn.q.weight")
    if found is None and dtype not in PLAIN_DTYPES | RAW_FP8_DTYPES:
        found = dtype
    if found:
        raise ValueError(
            f"{name}: got a {found} quantised checkpoint, need plain weights (BF16, FP16, FP32 or "
            "unscaled FP8); load this file with ComfyUI's own Load Diffusion Model node"
        )


def _what_it_is(header: _Header) -> str:
    if not header.keys:
        return "holds no tensors"
    for marker, what in (
        ("video_patch_proj.weight", "is a MiniMax-H3 model, which is not in this version"),
        ("lora_A.weight", "is a LoRA"),
        ("lora_down.weight", "is a LoRA"),
        ("lora_up.weight", "is a LoRA"),
        ("decoder.conv_in.weight", "is a VAE"),
        ("decoder.conv1.weight", "is a VAE"),
        ("shared.weight", "is a text encoder"),
    ):
        if any(key.endswith(marker) for key in header.keys):
            return what
    return f"is not a Wan model ({len(header.keys)} tensors, such as {min(header.keys)!r})"
