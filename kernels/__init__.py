"""Attention and Linear kernels for video diffusion on Hopper. A library: never imports ComfyUI."""

from .arch import DeviceFacts, device_facts
from .errors import BackendUnavailable, UnknownBackend
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
    "SolAttnCall",
    "SolAttnConfig",
    "SolAttnStats",
    "TokenLayout",
    "UnknownBackend",
    "choose_backend",
    "describe_call",
    "device_facts",
    "inverse",
    "list_backends",
    "morton_order",
    "sol_attention",
    "span_order",
    "why_not",
]
