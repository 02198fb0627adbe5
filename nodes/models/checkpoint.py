"""What a checkpoint file is, read from its safetensors header alone: no weights are loaded."""

import os
from dataclasses import dataclass, field

from safetensors import SafetensorError, safe_open

from .h3_checkpoint import fp8_names, h3_facts, h3_prefix
from .memory_plan import MemoryEstimate, estimate
from .stored_formats import PLAIN, FP8Layers, StoredFormat, stored_format, wan_layers

PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.")
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
class CheckpointWeights:
    """What loading needs to know of a file beside what model it is.

    Attributes:
        prefix: stands before the names of the diffusion model's tensors.
        format: how they are stored.
        layers: what may be FP8.
        memory: what they take on the device.
    """

    prefix: str
    format: StoredFormat
    layers: FP8Layers
    memory: MemoryEstimate


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint of a family we know.

    Attributes:
        family: "Wan" or "MiniMax-H3".
        variant: "2.1 T2V", "2.1 I2V", "2.2 5B", "2.2 I2V", "VACE", ...; "audio and video", ...
        dim, ffn_dim, num_blocks, num_heads: of the transformer.
        dtype: safetensors name of the type of its Linear weights, "BF16", "F8_E4M3", ...
        size_bytes: of the file.
        weights: how it is stored and what of it may be FP8.
    """

    family: str
    variant: str
    dim: int
    ffn_dim: int
    num_blocks: int
    num_heads: int
    dtype: str
    size_bytes: int
    weights: CheckpointWeights | None = field(default=None, compare=False, repr=False)

    def describe(self) -> str:
        """One line for logs."""
        stored = PLAIN if self.weights is None else self.weights.format.name
        dtype = self.dtype if stored == PLAIN else f"{self.dtype} ({stored})"
        return (
            f"{self.family} {self.variant}: {self.num_blocks} blocks, {self.num_heads} heads x "
            f"{HEAD_DIM}, ffn {self.ffn_dim}, {dtype}, {self.size_bytes / 2**30:.2f} GiB"
        )


def inspect_checkpoint(path: str) -> CheckpointFacts:
    """Facts of the Wan or MiniMax-H3 checkpoint at ``path``.

    Raises:
        ValueError: not a readable safetensors file, another model, one that this ComfyUI does not
            have, or a format that is not plain. The message says what was found and what to do.
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

    def text(self, key: str) -> str:
        """The text that a tensor of bytes holds."""
        return bytes(self._file.get_tensor(key).flatten().tolist()).decode()


def _inspect(name: str, header: _Header, size_bytes: int) -> CheckpointFacts:
    h3 = h3_prefix(header.keys)
    if h3 is not None:
        facts = h3_facts(name, header, h3)
        computed, stored = (
            frozenset(key[len(h3) :].removesuffix(".weight") for key in keys)
            for keys in fp8_names(header.keys, h3)
        )
        weights = _weights(name, header, h3, FP8Layers(computed, stored))
        return CheckpointFacts("MiniMax-H3", size_bytes=size_bytes, weights=weights, **facts)
    prefix = next((p for p in PREFIXES if p + "head.modulation" in header.keys), None)
    if prefix is None:
        raise ValueError(
            f"{name}: {_what_it_is(header)}; this node loads Wan 2.1 and 2.2 and MiniMax-H3 "
            "diffusion models"
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

    dim = header.shape(prefix + "blocks.0.self_attn.q.weight")[0]
    if dim % HEAD_DIM:
        raise ValueError(f"{name}: got width {dim}, need a multiple of head_dim {HEAD_DIM}")
    if len(header.shape(prefix + "patch_embedding.weight")) != 5:
        raise ValueError(
            f"{name}: patch_embedding is not a 3-D convolution; this is not a Wan file"
        )
    num_blocks = _complete_blocks(name, header, prefix)
    weights = _weights(name, header, prefix, wan_layers(header.keys, prefix))
    return CheckpointFacts(
        family="Wan",
        variant=_wan_variant(header, prefix),
        dim=dim,
        ffn_dim=header.shape(prefix + "blocks.0.ffn.0.weight")[0],
        num_blocks=num_blocks,
        num_heads=dim // HEAD_DIM,
        dtype=header.dtype(prefix + "blocks.0.self_attn.q.weight"),
        size_bytes=size_bytes,
        weights=weights,
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


def _weights(name: str, header: _Header, prefix: str, layers: FP8Layers) -> CheckpointWeights:
    try:
        form = stored_format(header, prefix, layers)
    except ValueError as found:
        raise ValueError(
            f"{name}: got a {found} quantised checkpoint, need plain weights (BF16, FP16, FP32) or "
            "FP8, without scales or with one for a layer or row; load this file with ComfyUI's own "
            "Load Diffusion Model node"
        ) from None
    return CheckpointWeights(prefix, form, layers, estimate(header, prefix, layers, form.extras))


def _what_it_is(header: _Header) -> str:
    if not header.keys:
        return "holds no tensors"
    for marker, what in (
        ("video_patch_proj.weight", "is part of a MiniMax-H3 model"),
        ("lora_A.weight", "is a LoRA"),
        ("lora_down.weight", "is a LoRA"),
        ("lora_up.weight", "is a LoRA"),
        ("decoder.conv_in.weight", "is a VAE"),
        ("decoder.conv1.weight", "is a VAE"),
        ("shared.weight", "is a text encoder"),
    ):
        if any(key.endswith(marker) for key in header.keys):
            return what
    return (
        f"is no Wan or MiniMax-H3 model ({len(header.keys)} tensors, such as {min(header.keys)!r})"
    )
