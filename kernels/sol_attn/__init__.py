"""Sol-Attn: training-free block-sparse attention with block summaries (README.md)."""

import logging

import torch

from ..registry import Backend, register
from ..requirements import Requirements
from . import reference_backend, rules, sm90_rules, triton_rules
from .config import BLOCK_SIZE, HEAD_DIM, SolAttnCall, SolAttnConfig, SolAttnStats, TokenLayout
from .op import (
    OP,
    check_inputs,
    choose_backend,
    describe_call,
    list_backends,
    sol_attention,
    why_not,
)
from .token_order import inverse, morton_order, span_order

log = logging.getLogger("hopper_sol")


def _load_reference():
    from .reference_backend import sol_attention_fwd_reference

    return sol_attention_fwd_reference


def _load_triton():
    log.info(
        "Sol-Attn: Triton compiles its kernels at first use, some 10 s, and keeps them on disk"
    )
    from .triton_backend import sol_attention_fwd_triton

    return sol_attention_fwd_triton


def _load_sm90():
    from .sm90_backend import sol_attention_fwd_sm90

    return sol_attention_fwd_sm90


# Order is preference: a faster backend is registered above a slower one.
register(
    OP,
    Backend(
        "sm90",
        load=_load_sm90,
        requirements=Requirements(
            device_types=frozenset({"cuda"}),
            arch_major=9,
            head_dims=frozenset({HEAD_DIM}),
            modules=("triton", "nvidia_cutlass_dsl", "tvm_ffi"),
            systems=frozenset({"Linux"}),
        ),
        rules=(sm90_rules.unsupported_option,),
        auto_rules=(rules.slower_than_dense,),
        defaults=sm90_rules.defaults,
    ),
)
register(
    OP,
    Backend(
        "triton",
        load=_load_triton,
        requirements=Requirements(
            device_types=frozenset({"cuda"}),
            min_capability=(8, 0),
            head_dims=frozenset({HEAD_DIM}),
            modules=("triton",),
        ),
        rules=(triton_rules.unsupported_option,),
        auto_rules=(rules.slower_than_dense,),
        defaults=triton_rules.defaults,
    ),
)
register(
    OP,
    Backend(
        "reference",
        load=_load_reference,
        rules=(reference_backend.unsupported_option,),
        auto_rules=(reference_backend.slower_than_dense,),
        defaults=lambda call: (("precision", "bf16"),),
        native_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    ),
)

__all__ = [
    "BLOCK_SIZE",
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
