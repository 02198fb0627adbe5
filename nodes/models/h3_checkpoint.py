"""What a MiniMax-H3 checkpoint is, from its header; which of its weights FP8 may take."""

import re
from importlib.util import find_spec

HEAD_DIM = 128
PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.")
QKV = "blocks.0.attn.qkv_proj.weight"  # whose type is that of the Linears
CURVES = "adaln_t_table"

# ComfyUI knows the family by these two.
_MARKERS = ("video_patch_proj.weight", "audio_patch_proj.weight")
_NEEDED = (
    *_MARKERS,
    "condition_proj.weight",
    "rope.inv_freq",
    "final_layer.video_out.weight",
    "final_layer.audio_out.weight",
    QKV,
    "blocks.0.attn.q_norm.weight",
    "blocks.0.mlp.fc1.weight",
)
_COMPUTED = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
_STORED = ("adaln_proj.linear",)
_BLOCK_KEYS = tuple(f"{name}.weight" for name in (*_COMPUTED, *_STORED))


def h3_prefix(keys) -> str | None:
    """What stands before the names of a MiniMax-H3 checkpoint's tensors; None for other files."""
    return next((p for p in PREFIXES if all(p + name in keys for name in _MARKERS)), None)


def h3_facts(name: str, header, prefix: str) -> dict:
    """variant, dim, ffn_dim, num_blocks, num_heads and dtype of a MiniMax-H3 checkpoint.

    Args:
        name: of the file, for messages.
        header: has ``keys``, ``shape(key)`` and ``dtype(key)``.

    Raises:
        ValueError: tensors are missing, heads are of another size, or this ComfyUI is too old.
    """
    missing = [key for key in _NEEDED if prefix + key not in header.keys]
    if missing:
        raise ValueError(
            f"{name}: looks like MiniMax-H3 but lacks {', '.join(missing)}; the file is incomplete"
        )
    found = {int(match[1]) for key in header.keys if (match := _block(prefix, key))}
    count = max(found) + 1
    missing = [
        f"{prefix}blocks.{block}.{key}"
        for block in range(count)
        for key in _BLOCK_KEYS
        if f"{prefix}blocks.{block}.{key}" not in header.keys
    ]
    if missing:
        raise ValueError(
            f"{name}: lacks {len(missing)} tensors of its {count} blocks, such as {missing[0]}; "
            "the file is incomplete, or one of several shards"
        )
    head_dim = header.shape(prefix + "blocks.0.attn.q_norm.weight")[0]
    if head_dim != HEAD_DIM:
        raise ValueError(f"{name}: got heads of {head_dim} channels, need {HEAD_DIM}")
    if not comfyui_has_h3():
        raise ValueError(
            f"{name}: is a MiniMax-H3 model, which this ComfyUI does not have; update ComfyUI to "
            "0.29 or newer"
        )
    return {
        "variant": "with adaLN curves" if prefix + CURVES in header.keys else "audio and video",
        "dim": header.shape(prefix + _MARKERS[0])[0],
        "ffn_dim": header.shape(prefix + "blocks.0.mlp.fc1.weight")[0] // 2,
        "num_blocks": count,
        "num_heads": header.shape(prefix + QKV)[0] // (3 * HEAD_DIM),
        "dtype": header.dtype(prefix + QKV),
    }


def fp8_names(keys, prefix: str) -> tuple[list[str], list[str]]:
    """(names of weights to compute with in FP8, names of weights to keep in FP8), in block order.

    The second kind, modulation, sees a handful of rows: its weight is two fifths of a block and is
    widened again for its product. Over curve points it is FP32 and small, and stays. So does all
    that lies outside the blocks.
    """
    stored = () if prefix + CURVES in keys else _STORED
    found: tuple[list[tuple[int, str]], ...] = ([], [])
    for key in keys:
        match = _block(prefix, key)
        if match is None or not match[2].endswith(".weight"):
            continue
        name = match[2].removesuffix(".weight")
        for kind, names in enumerate((_COMPUTED, stored)):
            if name in names:
                found[kind].append((int(match[1]), key))
    computed, kept = ([key for _, key in sorted(part)] for part in found)
    return computed, kept


def comfyui_has_h3() -> bool:
    """Whether the ComfyUI that runs has the model. Outside ComfyUI nothing speaks against it."""
    return _spec("comfy.ldm") is None or _spec("comfy.ldm.minimax.model") is not None


def _spec(module: str):
    try:
        return find_spec(module)
    except (ImportError, ValueError):  # a package above it is missing, or is no real one
        return None


def _block(prefix: str, key: str) -> re.Match | None:
    """(block, name below it) of a tensor of a block."""
    return re.fullmatch(re.escape(prefix) + r"blocks\.(\d+)\.(.+)", key)
