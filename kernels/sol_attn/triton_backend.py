"""The Triton backend: preparation, routing and attention, three steps on one stream."""

import math
from collections.abc import Callable
from functools import partial

import torch

from .config import SolAttnConfig, TokenLayout
from .triton_fwd import attend
from .triton_prepare import prepare
from .triton_route import route


def sol_attention_fwd_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    config: SolAttnConfig,
    layout: TokenLayout,
    scale: float,
    with_lse: bool = True,
    order: torch.Tensor | None = None,
    exact_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(out (B, T, H, 128), lse (B, H, T) FP32 or None, exact blocks per query block (B, H, NT)).

    FP32 and FP16 inputs are cast to BF16. ``order`` (T,) int64 names the token at each position;
    layout, exact blocks and mask count positions, outputs are per token. ``exact_mask``
    (B, H, NT, NT) bool [query, key] replaces the routing, for parity under one mask.
    """
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device_of(q):
        steps = Steps(q, k, v, config=config, layout=layout, scale=scale, order=order)
        operands = steps.prepare()
        chosen = steps.route(operands, exact_mask=exact_mask)
        out, lse = steps.attend(operands, chosen, with_lse=with_lse)
    if with_lse and operands.k_offset is not None:
        # The logit that every key of a row lost.
        lse = lse + torch.einsum("bthd,bhd->bht", steps.q.float(), operands.k_offset) * scale
    counts = chosen.counts.sum(0, dtype=torch.int32)
    counts[..., : layout.skipped_blocks] = 0
    return out.to(q.dtype), lse, counts


class Steps:
    """The three steps of one call, which a benchmark times apart."""

    v_order = "natural"

    def __init__(
        self, q, k, v, *, config: SolAttnConfig, layout: TokenLayout, scale: float, order=None
    ):
        self.q, self.k, self.v = (_with_small_strides(x.to(torch.bfloat16)) for x in (q, k, v))
        scale_log2 = scale * math.log2(math.e)
        self.prepare: Callable = partial(
            prepare,
            self.q,
            self.k,
            self.v,
            precision=config.precision,
            k_smoothing=config.k_smoothing,
            v_smoothing=config.v_smoothing,
            v_bias_correction=config.corrects_v_bias,
            order=order,
            v_order=self.v_order,
        )
        self._route = partial(
            route,
            tau=config.tau,
            estimator=config.estimator,
            routing=config.routing,
            scale_log2=scale_log2,
            layout=layout,
            splits=1 if config.kv_splits == "auto" else config.kv_splits,
        )
        self.attend: Callable = partial(attend, scale_log2=scale_log2, order=order)

    def route(self, operands, exact_mask=None):
        return self._route(operands.q_mean, operands.k_mean, exact_mask=exact_mask)


def _with_small_strides(x: torch.Tensor) -> torch.Tensor:
    # Offsets inside a block are int32: 64 tokens must lie within 2^31 elements.
    return x if x.stride(1) < 2**24 else x.contiguous()
