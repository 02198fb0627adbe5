"""The SM90 backend: Triton prepares and routes, the CuTe DSL kernel attends."""

from functools import partial

import torch

from . import sm90_fwd
from .config import SolAttnConfig, TokenLayout, num_blocks
from .sm90_rules import choose_splits
from .triton_backend import Steps as TritonSteps


def sol_attention_fwd_sm90(
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

    Arguments as ``sol_attention_fwd_triton``.
    """
    with torch.cuda.device_of(q):
        steps = Steps(q, k, v, config=config, layout=layout, scale=scale, order=order)
        operands = steps.prepare()
        chosen = steps.route(operands, exact_mask=exact_mask)
        out, lse = steps.attend(operands, chosen, with_lse=with_lse)
    if with_lse and operands.k_offset is not None:
        # The logit that every key of a row lost.
        lse = lse + torch.einsum("bthd,bhd->bht", steps.q.float(), operands.k_offset) * scale
    if chosen is None:
        batch, tokens, heads, _ = q.shape
        blocks = num_blocks(tokens)
        counts = torch.full(
            (batch, heads, blocks), blocks, dtype=torch.int32, device=q.device
        )
    else:
        counts = chosen.counts[0]
    return out.to(q.dtype), lse, counts


class Steps(TritonSteps):
    """The three steps of one call, which a benchmark times apart."""

    v_order = "k32"

    def __init__(self, q, k, v, *, config: SolAttnConfig, layout: TokenLayout, scale, order=None):
        super().__init__(q, k, v, config=config, layout=layout, scale=scale, order=order)
        splits = config.kv_splits
        if splits == "auto":
            splits = choose_splits(q.shape, q.device)
        self._everything = not config.routing
        self.attend = partial(
            sm90_fwd.attend, splits=splits, **self.attend.keywords
        )

    def route(self, operands, exact_mask=None):
        """Which blocks are exact; None for all of them."""
        if self._everything and exact_mask is None:
            return None
        return super().route(operands, exact_mask=exact_mask)
