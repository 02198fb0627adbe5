"""In which form a Linear keeps its weight, and whether FP8 Linear may take it over.

Decided for each layer from the module itself: one file may mix formats, and other packs bring
modules of their own.
"""

from dataclasses import dataclass

import torch

from ...kernels import FP8LinearCall, device_facts, why_not_linear

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
NO_LINEAR = "no module of this name"
RAW_FP8 = "raw float8"
# No trained weight comes near it; codes that are stored with a scale reach up to 448.
_SCALED_FROM = 128.0


@dataclass(frozen=True)
class WeightFormat:
    """How a layer's weight is stored.

    Attributes:
        name: in words, for reports.
        skip: why the layer is left alone, or None.
        grid: scale of the E4M3 numbers that the weight consists of when it reaches us; None for
            weights that were never FP8.
        scaled: the weight is stored with a scale that this ComfyUI knows.
    """

    name: str
    skip: str | None = None
    grid: float | None = None
    scaled: bool = False


def weight_format(module) -> WeightFormat:
    """The format of a Linear-like ``module``; reads a stored scale at most."""
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if _is_gguf(module, weight):
        return WeightFormat("GGUF", "GGUF weights are unpacked by their own Linear")
    if not hasattr(module, "weight_function"):
        return WeightFormat(kind, f"a {kind} of another pack, not one of ComfyUI's Linears")
    layout = getattr(module, "layout_type", None)
    if layout is not None or hasattr(weight, "_qdata"):
        return _comfy_quant(module, weight, layout)
    # Newer ComfyUI creates weights when they are first needed.
    dtype = getattr(weight, "dtype", None) or getattr(module, "weight_comfy_model_dtype", None)
    if dtype in (E4M3, E5M2):
        return _fp8(module, dtype)
    if dtype is not None and dtype not in PLAIN:
        return WeightFormat(_words(dtype), f"weights of {_words(dtype)} are not supported")
    return WeightFormat("plain" if dtype is None else _words(dtype))


def why_not_shape(module) -> str | None:
    """Why the sizes of ``module`` rule an FP8 GEMM out, or None; the same on every device."""
    n, k = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if n is None or k is None:
        return "its size is unknown"
    cpu = device_facts(torch.device("cpu"))
    return why_not_linear(FP8LinearCall(1, n, k, torch.bfloat16, cpu), "torch")


def stored_scales_were_ignored(modules) -> bool:
    """Whether weights look like FP8 codes whose scales this ComfyUI did not read.

    ComfyUI before 0.3.76 loads a comfy_quant checkpoint without complaint, drops the scales and
    computes with the bare codes, kept in FP8 or widened.

    Args:
        modules: Linears without a scale of their own; at most the first three are read.
    """
    if reads_comfy_quant():
        return False
    weights = [m.weight.detach() for m in modules[:3] if not m.weight.is_meta]
    return bool(weights) and all(float(w.float().abs().max()) >= _SCALED_FROM for w in weights)


def reads_comfy_quant() -> bool:
    """Whether this ComfyUI uses the scales of comfy_quant files (0.3.76 and newer)."""
    try:
        from comfy.ops import mixed_precision_ops  # noqa: F401
    except ImportError:
        return False
    return True


def _is_gguf(module, weight) -> bool:
    names = (type(module).__name__, type(module).__module__, type(weight).__name__)
    words = " ".join(names).lower()
    return "ggml" in words or "gguf" in words or hasattr(weight, "tensor_type")


def _comfy_quant(module, weight, layout) -> WeightFormat:
    """A weight in one of ComfyUI's own quantised layouts."""
    layout = layout or getattr(weight, "_layout_cls", None)
    name = getattr(module, "quant_format", None)
    name = name or getattr(layout, "__name__", None) or str(layout)
    words = f"comfy_quant {name}"
    if name != "float8_e4m3fn":
        # Unpacking them for us would cost more than it brings; some are stored rotated.
        return WeightFormat(words, f"{words} has a Linear of its own in ComfyUI")
    if getattr(module, "pre_quant_scale", None) is not None:
        return WeightFormat(words, f"{words} with smoothing factors is not supported")
    scale = getattr(getattr(weight, "_params", None), "scale", None)
    single = isinstance(scale, torch.Tensor) and scale.numel() == 1 and not scale.is_meta
    grid = float(scale) if single else None
    usable = grid is not None and 0.0 < grid < float("inf")
    return WeightFormat(words, grid=grid if usable else None, scaled=True)


def _fp8(module, dtype) -> WeightFormat:
    """FP8 numbers without a scale, or with one that ComfyUI of 2025 keeps beside them."""
    scaled = getattr(module, "scale_weight", None) is not None
    words = f"{'scaled' if scaled else 'raw'} {_words(dtype)}"
    if _has_own_matmul(module):
        return WeightFormat(
            words, f"{words} with ComfyUI's own FP8 matmul; load it without 'fast' to use ours"
        )
    # What reaches us are the bare numbers: the scale is applied to the activations, or later.
    return WeightFormat(words, grid=1.0, scaled=scaled)


def _has_own_matmul(module) -> bool:
    """Whether this ComfyUI runs the layer in FP8 whatever functions are on its weight."""
    function = getattr(type(module), "forward_comfy_cast_weights", None)
    code = getattr(function, "__code__", None)
    if code is None or "fp8_linear" not in code.co_names or "weight_function" in code.co_names:
        return False
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    switch = cells.get("fp8_matrix_mult")
    return True if switch is None else bool(switch.cell_contents)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
