"""FP8 Linear: W8A8 in E4M3 with a scale for each row of both operands (README.md)."""

import importlib

import torch

from ..registry import Backend, register
from ..requirements import Requirements
from .config import (
    ALIGNMENT,
    FP8LinearCall,
    FP8LinearStats,
    NormSettings,
    QuantizeCall,
    needs_fp8_tensor_cores,
    slower_than_linear,
    unaligned,
)
from .fused_op import ACTIVATION_OP, NORM_OP, quantize_gelu, quantize_norm, quantize_swiglu
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


def _load(module: str, name: str):
    """A loader for ``name`` of ``module`` of this package."""
    return lambda: getattr(importlib.import_module(f".{module}", __name__), name)


def _too_wide(call: FP8LinearCall | QuantizeCall) -> str | None:
    k = call.k if isinstance(call, FP8LinearCall) else call.columns
    return f"needs K up to {TRITON_MAX_K}, got {k}" if k > TRITON_MAX_K else None


# Order is preference. A backend of fp8_linear quantises with the one of the same name.
for _backend in (
    Backend(
        "triton",
        _load("scaled_mm", "fp8_linear_scaled_mm"),
        _TRITON,
        (unaligned, _too_wide),
        native_dtypes=_ANY_FLOAT,
    ),
    Backend(
        "torch",
        _load("scaled_mm", "fp8_linear_scaled_mm"),
        Requirements(device_types=frozenset({"cpu", "cuda"})),
        (needs_fp8_tensor_cores, unaligned),
        native_dtypes=_ANY_FLOAT,
    ),
    Backend(
        "reference",
        _load("reference", "fp8_linear_reference"),
        auto_rules=(slower_than_linear,),
        native_dtypes=_ANY_FLOAT,
    ),
):
    register(OP, _backend)
# What quantises has a module for each backend, and a function for each op in it.
for _op, _modules in (
    (QUANTIZE_OP, ("triton_quant", "torch_quant", "reference")),
    (ACTIVATION_OP, ("triton_quant", "torch_quant", "fused_reference")),
    (NORM_OP, ("triton_norm", "torch_quant", "fused_reference")),
):
    _triton, _torch, _reference = (
        _load(module, f"{_op}_{name}")
        for module, name in zip(_modules, ("triton", "torch", "reference"), strict=True)
    )
    register(_op, Backend("triton", _triton, _TRITON, (_too_wide,), native_dtypes=_ANY_FLOAT))
    register(_op, Backend("torch", _torch, native_dtypes=_ANY_FLOAT))
    register(_op, Backend("reference", _reference, native_dtypes=_ANY_FLOAT))

__all__ = [
    "ALIGNMENT",
    "FP8LinearCall",
    "FP8LinearStats",
    "NormSettings",
    "QuantizeCall",
    "QuantizedRows",
    "choose_linear_backend",
    "describe_linear",
    "fp8_linear",
    "list_linear_backends",
    "quantize_gelu",
    "quantize_norm",
    "quantize_rowwise",
    "quantize_swiglu",
    "why_not_linear",
]
