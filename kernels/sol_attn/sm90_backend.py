"""The SM90 backend: Triton prepares and routes, or gives thresholds; the CuTe DSL kernel attends."""

from functools import partial

import torch

from . import sm90_fwd
from .config import SolAttnConfig, TokenLayout
from .sm90_rules import choose_splits
from .triton_backend import Steps as TritonSteps
from .triton_thresholds import route_thresholds
from .triton_words import route_words


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
        out, lse, counts = steps.attend(operands, chosen, with_lse=with_lse)
    if with_lse and operands.k_offset is not None:
        # The logit that every key of a row lost.
        lse = lse + torch.einsum("bthd,bhd->bht", steps.q.float(), operands.k_offset) * scale
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
        self._inside = config.route_source == "kernel"
        self.attend = partial(
            sm90_fwd.attend,
            splits=splits,
            skipped_blocks=layout.skipped_blocks,
            **self.attend.keywords,
        )
        settings = {
            "tau": config.tau,
            "estimator": config.estimator,
            "scale_log2": self.attend.keywords["scale_log2"],
            "layout": layout,
        }
        self._words = partial(route_words, **settings)
        self._thresholds = partial(route_thresholds, **settings)

    def route(self, operands, exact_mask=None):
        """Packed bits of the exact blocks, or the thresholds to decide by; None for all blocks."""
        if self._everything and exact_mask is None:
            return None
        if self._inside and exact_mask is None:
            return self._thresholds(operands.q_mean, operands.k_mean)
        return self._words(operands.q_mean, operands.k_mean, exact_mask=exact_mask)
