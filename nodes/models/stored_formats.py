"""In which form a checkpoint keeps its weights, told from its header and its few bytes of settings.

Plain floats, or FP8 in one of three forms: bare ("raw"), with scales as ComfyUI of 2025 stores them
("scaled": ``layer.scale_weight``), or as ComfyUI since 0.3.76 does ("comfy_quant":
``layer.weight_scale`` and a JSON text, in ``layer.comfy_quant`` or in the file's metadata).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

PLAIN = "plain"
RAW_FP8 = "raw FP8"
SCALED_FP8 = "scaled FP8"
COMFY_QUANT_FP8 = "comfy_quant FP8"

PLAIN_DTYPES = {"BF16", "F16", "F32"}
FP8_DTYPES = {"F8_E4M3", "F8_E5M2"}
# comfy_quant formats: one scale a layer, and this pack's own with one a row.
ROWS_FORMAT = "float8_e4m3fn_rows"
FP8_FORMATS = {"float8_e4m3fn", "float8_e5m2", ROWS_FORMAT}
SETTINGS = "_quantization_metadata"

# Linears of Wan's transformer blocks; what lies outside "blocks" is no such Linear.
_WAN_LINEAR = re.compile(
    r"blocks\.\d+\.(self_attn\.[qkvo]|cross_attn\.([qkvo]|[kv]_img)|ffn\.[02])\.weight"
)


@dataclass(frozen=True)
class FP8Layers:
    """Layers, named below the diffusion model, that FP8 may take.

    Attributes:
        compute: Linears of the blocks that run in FP8.
        store: further ones that are only worth keeping in FP8.
    """

    compute: frozenset[str] = frozenset()
    store: frozenset[str] = frozenset()


def wan_layers(keys, prefix: str) -> FP8Layers:
    """Of the Wan model below ``prefix`` in a file with ``keys``."""
    names = (key[len(prefix) :] for key in keys if key.startswith(prefix))
    return FP8Layers(
        frozenset(name.removesuffix(".weight") for name in names if _WAN_LINEAR.fullmatch(name))
    )


@dataclass(frozen=True)
class StoredFormat:
    """How the weights of a file are stored.

    Attributes:
        name: one of the names above.
        scales: layer, below the prefix -> key of its scale in the file.
        extras: keys that describe weights and are no weights themselves, scales included.
        rows: some weights have a scale for every row.
    """

    name: str
    scales: Mapping[str, str]
    extras: frozenset[str]
    rows: bool = False


def stored_format(header, prefix: str, layers: FP8Layers) -> StoredFormat:
    """The form of the weights below ``prefix``.

    Args:
        header: keys, metadata, ``shape(key)``, ``dtype(key)`` and ``text(key)`` of a file.
        layers: those whose form counts where nothing has scales.

    Raises:
        ValueError: any other form; the message is what was found, as "int8_tensorwise".
    """
    names = {key[len(prefix) :]: key for key in header.keys if key.startswith(prefix)}
    settings = _settings(header, names, prefix)
    if settings:
        return _comfy_quant(header, names, settings)
    if "scaled_fp8" in names or any(name.endswith(".scale_weight") for name in names):
        return _scaled(header, names)
    if any(name.endswith((".weight_scale", ".input_scale")) for name in names):
        raise ValueError("scaled")
    dtypes = {header.dtype(names[f"{layer}.weight"]) for layer in layers.compute}
    strange = sorted(dtypes - PLAIN_DTYPES - FP8_DTYPES)
    if strange:
        raise ValueError(", ".join(strange))
    return StoredFormat(RAW_FP8 if dtypes & FP8_DTYPES else PLAIN, {}, frozenset())


def _settings(header, names: Mapping[str, str], prefix: str) -> dict[str, dict]:
    """layer -> its comfy_quant settings."""
    found = {}
    if SETTINGS in header.metadata:
        try:
            layers = json.loads(header.metadata[SETTINGS]).get("layers", {})
            found = {name.removeprefix(prefix): dict(conf) for name, conf in layers.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"comfy_quant (unreadable: {error})") from error
        if not found:
            raise ValueError("comfy_quant (it names no layer)")
    for name, key in names.items():
        if name.endswith(".comfy_quant"):
            try:
                found[name.removesuffix(".comfy_quant")] = dict(json.loads(header.text(key)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"comfy_quant (unreadable: {error})") from error
    return found


def _comfy_quant(header, names, settings) -> StoredFormat:
    formats = {str(conf.get("format")) for conf in settings.values()}
    if formats - FP8_FORMATS:
        raise ValueError("comfy_quant " + ", ".join(sorted(formats - FP8_FORMATS)))
    if any(name.endswith(".pre_quant_scale") for name in names):
        raise ValueError("comfy_quant (with smoothing factors)")
    scales = {}
    for layer in settings:
        if f"{layer}.weight" in names:
            _check_weight(header, names, layer)
            if f"{layer}.weight_scale" in names:
                scales[layer] = _checked_scale(header, names, layer, "weight_scale")
    endings = (".comfy_quant", ".weight_scale", ".input_scale")
    extras = {key for name, key in names.items() if name.endswith(endings)}
    rows = any(math.prod(header.shape(key)) > 1 for key in scales.values())
    return StoredFormat(COMFY_QUANT_FP8, scales, frozenset(extras), rows or ROWS_FORMAT in formats)


def _scaled(header, names) -> StoredFormat:
    scales = {}
    for name in names:
        layer, dot, end = name.rpartition(".")
        if dot and end == "scale_weight":
            _check_weight(header, names, layer)
            scales[layer] = _checked_scale(header, names, layer, "scale_weight")
    extras = {
        key
        for name, key in names.items()
        if name == "scaled_fp8" or name.endswith((".scale_weight", ".scale_input"))
    }
    rows = any(math.prod(header.shape(key)) > 1 for key in scales.values())
    return StoredFormat(SCALED_FP8, scales, frozenset(extras), rows)


def _check_weight(header, names, layer: str) -> None:
    key = names.get(f"{layer}.weight")
    dtype = None if key is None else header.dtype(key)
    if dtype not in FP8_DTYPES:
        raise ValueError(f"scaled {dtype or 'weightless'}")


def _checked_scale(header, names, layer: str, end: str) -> str:
    """The key of a scale with one value, or one for each row."""
    key, rows = names[f"{layer}.{end}"], header.shape(names[f"{layer}.weight"])[0]
    shape = header.shape(key)
    if shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        raise ValueError(f"block-wise scaled (scales {shape} for {rows} rows)")
    return key
