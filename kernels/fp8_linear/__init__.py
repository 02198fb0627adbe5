"""FP8 Linear: W8A8 in E4M3 with a scale for each row of both operands (README.md)."""

import torch

from ..registry import Backend, register
from ..requirements import Requirements
from .config import (
    ALIGNMENT,
    FP8LinearCall,
    FP8LinearStats,
    QuantizeCall,
    needs_fp8_tensor_cores,
    slower_than_linear,
    unaligned,
)
from .op import (
    OP,
    QUANTIZE_OP,
    choose_linear_backend,
    describe_linear,
    fp8_linear,
    list_linear_backends,
    quantize_rowwise,
    why_not_linear,
)
from .reference import QuantizedRows

# A row is one program and has to fit into its registers.
TRITON_MAX_K = 32768
_TRITON = Requirements(device_types=frozenset({"cuda"}), min_capability=(8, 9), modules=("triton",))
_ANY_FLOAT = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn})


def _load_scaled_mm():
    from .scaled_mm import fp8_linear_scaled_mm

    return fp8_linear_scaled_mm


def _load_reference():
    from .reference import fp8_linear_reference

    return fp8_linear_reference


def _load_quantize_triton():
    from .triton_quant import quantize_rowwise_triton

    return quantize_rowwise_triton


def _load_quantize_torch():
    from .scaled_mm import quantize_rowwise_torch

    return quantize_rowwise_torch


def _load_quantize_reference():
    from .reference import quantize_rowwise_reference

    return quantize_rowwise_reference


def _too_wide(call: FP8LinearCall | QuantizeCall) -> str | None:
    k = call.k if isinstance(call, FP8LinearCall) else call.columns
    return f"needs K up to {TRITON_MAX_K}, got {k}" if k > TRITON_MAX_K else None


# Order is preference. A backend of fp8_linear quantises with the one of the same name.
for _backend in (
    Backend("triton", _load_scaled_mm, _TRITON, (unaligned, _too_wide), native_dtypes=_ANY_FLOAT),
    Backend(
        "torch",
        _load_scaled_mm,
        Requirements(device_types=frozenset({"cpu", "cuda"})),
        (needs_fp8_tensor_cores, unaligned),
        native_dtypes=_ANY_FLOAT,
    ),
    Backend(
        "reference", _load_reference, auto_rules=(slower_than_linear,), native_dtypes=_ANY_FLOAT
    ),
):
    register(OP, _backend)
for _backend in (
    Backend("triton", _load_quantize_triton, _TRITON, (_too_wide,), native_dtypes=_ANY_FLOAT),
    Backend("torch", _load_quantize_torch, native_dtypes=_ANY_FLOAT),
    Backend("reference", _load_quantize_reference, native_dtypes=_ANY_FLOAT),
):
    register(QUANTIZE_OP, _backend)

__all__ = [
    "ALIGNMENT",
    "FP8LinearCall",
    "FP8LinearStats",
    "QuantizeCall",
    "QuantizedRows",
    "choose_linear_backend",
    "describe_linear",
    "fp8_linear",
    "list_linear_backends",
    "quantize_rowwise",
    "why_not_linear",
]
