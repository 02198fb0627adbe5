"""Sol-Attn: training-free block-sparse attention with block summaries (README.md)."""

import torch

from ..registry import Backend, register
from .config import HEAD_DIM, SolAttnCall, SolAttnConfig, SolAttnStats, TokenLayout
from .op import (
    OP,
    check_inputs,
    choose_backend,
    describe_call,
    list_backends,
    sol_attention,
    why_not,
)
from .reference_backend import slower_than_dense, unsupported_option
from .token_order import inverse, morton_order, span_order


def _load_reference():
    from .reference_backend import sol_attention_fwd_reference

    return sol_attention_fwd_reference


# Order is preference: a faster backend is registered above a slower one.
register(
    OP,
    Backend(
        "reference",
        load=_load_reference,
        rules=(unsupported_option,),
        auto_rules=(slower_than_dense,),
        defaults=(("precision", "bf16"),),
        native_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    ),
)

__all__ = [
    "HEAD_DIM",
    "SolAttnCall",
    "SolAttnConfig",
    "SolAttnStats",
    "TokenLayout",
    "check_inputs",
    "choose_backend",
    "describe_call",
    "inverse",
    "list_backends",
    "morton_order",
    "sol_attention",
    "span_order",
    "why_not",
]
