"""Attention and Linear kernels for video diffusion on Hopper. A library: never imports ComfyUI."""

from .arch import DeviceFacts, device_facts
from .errors import BackendUnavailable, UnknownBackend
from .fp8_linear import (
    FP8LinearCall,
    FP8LinearStats,
    QuantizedRows,
    choose_linear_backend,
    describe_linear,
    fp8_linear,
    list_linear_backends,
    quantize_rowwise,
    why_not_linear,
)
from .sol_attn import (
    HEAD_DIM,
    SolAttnCall,
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    choose_backend,
    describe_call,
    inverse,
    list_backends,
    morton_order,
    sol_attention,
    span_order,
    why_not,
)

__all__ = [
    "HEAD_DIM",
    "BackendUnavailable",
    "DeviceFacts",
    "FP8LinearCall",
    "FP8LinearStats",
    "QuantizedRows",
    "SolAttnCall",
    "SolAttnConfig",
    "SolAttnStats",
    "TokenLayout",
    "UnknownBackend",
    "choose_backend",
    "choose_linear_backend",
    "describe_call",
    "describe_linear",
    "device_facts",
    "fp8_linear",
    "inverse",
    "list_backends",
    "list_linear_backends",
    "morton_order",
    "quantize_rowwise",
    "sol_attention",
    "span_order",
    "why_not",
    "why_not_linear",
]
