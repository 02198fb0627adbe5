"""The public op ``sol_attention``: checks, choice of a backend, and the torch custom op.

The custom op is what ``torch.compile`` sees: tensors and plain numbers in, tensors out. It is
named explicitly because ComfyUI imports this pack under a module name that is a file path.
"""

import functools

import torch

from .. import registry
from ..arch import device_facts
from .config import (
    HEAD_DIM,
    SolAttnCall,
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    num_blocks,
)

OP = "sol_attention"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sol_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    config: SolAttnConfig,
    layout: TokenLayout | None = None,
    scale: float | None = None,
    order: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    stats: SolAttnStats | None = None,
):
    """Self-attention in which unimportant key blocks are replaced by their summaries.

    out[r] = softmax over exact tokens and L_j-weighted block means (README.md, eq. 4-6).

    Args:
        q, k, v: (B, T, H, 128) bfloat16, float16 or float32, equal shapes, any strides with
            stride(-1) == 1. T need not be a multiple of the 64-token block.
        config: algorithm settings.
        layout: exact-KV sinks, dense queries, video span; None for none.
        scale: multiplies q k^T before the softmax, above 0; 128 ** -0.5 if None.
        order: (T,) int64, a permutation: block i holds the tokens order[64 i : 64 i + 64], and the
            ranges of ``layout`` count positions in it. The output stays in the order of the input.
            None for the order of the input.
        backend: "auto" or a name from ``list_backends()``.
        return_lse: also return the log-sum-exp.
        stats: filled with what ran, if given.

    Returns:
        (B, T, H, 128) in q's dtype, contiguous; with ``return_lse`` also (B, H, T) FP32, natural log.

    Raises:
        ValueError, TypeError: an argument no backend could take.
        BackendUnavailable: the named backend, or every backend, declines; says why.

    The backward pass is not defined. Under torch.compile, make ``config`` outside the compiled
    function.

    Accuracy: the reference backend computes FP32 inputs in FP32 and everything else in FP32 with
        the output rounded to the input's dtype.
    Source: arXiv 2607.24027.
    """
    layout = TokenLayout() if layout is None else layout
    scale = HEAD_DIM**-0.5 if scale is None else float(scale)
    if not 0.0 < scale < float("inf"):  # kernels fold it into an exponent
        raise ValueError(f"scale: got {scale}, need a finite number above 0")
    out, lse, exact_blocks = _sol_attention_fwd(
        q,
        k,
        v,
        scale,
        float(config.tau),
        config.variant,
        _flat(layout.sink_kv),
        _flat(layout.dense_q),
        list(layout.video or ()),
        list(layout.grid or ()),
        backend,
        return_lse,
        order,
        layout.skip_q,
    )
    if stats is not None:
        call = describe_call(q, config, layout)
        chosen, declined = registry.select(OP, call, backend)
        fp8 = config.filled(chosen.defaults(call)).precision == "fp8"
        native = q.dtype in chosen.native_dtypes and not fp8  # FP8 is rounded from BF16
        computed = q.dtype if native else torch.bfloat16
        stats.backend = chosen.name
        stats.precision = "fp8" if fp8 else str(computed).removeprefix("torch.")
        stats.exact_blocks = exact_blocks
        stats.num_kv_blocks = num_blocks(q.shape[1])
        stats.cast_from = None if native or q.dtype == torch.bfloat16 else q.dtype
        stats.declined = declined
    return (out, lse) if return_lse else out


def list_backends() -> tuple[str, ...]:
    """Backends of ``sol_attention``, preferred first."""
    return registry.list_backends(OP)


def why_not(call: SolAttnCall, backend: str = "auto") -> str | None:
    """Why ``backend`` would decline ``call``; None if it would run. Touches no device.

    For "auto": the reasons of all backends, if every one of them declines.
    """
    return registry.why_not(OP, call, backend)


def choose_backend(
    call: SolAttnCall, backend: str = "auto", exclude: frozenset[str] = frozenset()
) -> tuple[str, dict[str, str]]:
    """Name of the backend that would compute ``call``, and why preferred ones declined.

    Raises BackendUnavailable (all reasons) if none would; ``exclude`` names backends to pass over.
    """
    return registry.choose(OP, call, backend, exclude)


def describe_call(q: torch.Tensor, config: SolAttnConfig, layout: TokenLayout) -> SolAttnCall:
    """The facts of a call that backends decide on."""
    return SolAttnCall(tuple(q.shape), q.dtype, device_facts(q.device), config, layout)


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout | None = None
) -> None:
    """Raise ValueError or TypeError for what no backend could accept."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got {x.dim()} dimensions, need 4: (batch, tokens, heads, 128)"
            )
        if x.shape != q.shape:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, need q's {tuple(q.shape)} (self-attention only)"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, need bfloat16, float16 or float32")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: got {x.dtype} on {x.device}, need q's {q.dtype} on {q.device}"
            )
        if x.shape[-1] == HEAD_DIM and x.stride(-1) != 1:
            raise ValueError(f"{name}: last dimension has stride {x.stride(-1)}, need 1")
    if q.shape[-1] != HEAD_DIM:
        raise ValueError(f"q: got head_dim {q.shape[-1]}, need {HEAD_DIM}")
    if 0 in q.shape:
        raise ValueError(f"q: got shape {tuple(q.shape)}, need at least one of everything")
    if layout is not None:
        layout.check_tokens(q.shape[1])


def check_order(order: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError for an order that does not fit q. That it is a permutation is not checked."""
    if order is None:
        return
    found = f"{order.dtype} {tuple(order.shape)} on {order.device}"
    if order.dtype != torch.int64 or order.shape != q.shape[1:2] or order.device != q.device:
        raise ValueError(f"order: got {found}, need torch.int64 ({q.shape[1]},) on {q.device}")
    if not order.is_contiguous():
        raise ValueError("order: got a strided view, need a contiguous tensor")


def _flat(ranges) -> list[int]:
    return [edge for token_range in ranges for edge in token_range]


def _pairs(flat) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


@functools.lru_cache(maxsize=64)
def _config(variant: str, tau: float) -> SolAttnConfig:
    return SolAttnConfig.from_variant(variant, tau)


# Checks and the choice of a backend happen inside the op, so that a compiled caller traces
# nothing but the op itself.
def _forward(
    q, k, v, scale, tau, variant, sink_kv, dense_q, video, grid, backend, with_lse, order, skip_q=0
):
    config = _config(variant, tau)
    layout = TokenLayout(
        sink_kv=_pairs(sink_kv),
        dense_q=_pairs(dense_q),
        video=tuple(video) or None,
        grid=tuple(grid) or None,
        skip_q=skip_q,
    )
    check_inputs(q, k, v, layout)
    check_order(order, q)
    call = describe_call(q, config, layout)
    chosen, _ = registry.select(OP, call, backend)
    implementation = registry.loaded(chosen)
    config = config.filled(chosen.defaults(call))
    out, lse, exact_blocks = implementation(
        q, k, v, config=config, layout=layout, scale=scale, with_lse=with_lse, order=order
    )
    return out, lse if with_lse else q.new_empty(0, dtype=torch.float32), exact_blocks


_sol_attention_fwd = torch.library.custom_op(
    "hopper_sol::sol_attention",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scale, float tau, str variant, int[] sink_kv, "
    "int[] dense_q, int[] video, int[] grid, str backend, bool with_lse, Tensor? order, "
    "int skip_q=0) "
    "-> (Tensor out, Tensor lse, Tensor exact_blocks)",
)


@_sol_attention_fwd.register_fake
def _fake(
    q, k, v, scale, tau, variant, sink_kv, dense_q, video, grid, backend, with_lse, order, skip_q=0
):
    batch, tokens, heads, _ = q.shape
    blocks = num_blocks(tokens)
    lse_shape = (batch, heads, tokens) if with_lse else (0,)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_empty(lse_shape, dtype=torch.float32),
        q.new_empty(batch, heads, blocks, dtype=torch.int32),
    )
