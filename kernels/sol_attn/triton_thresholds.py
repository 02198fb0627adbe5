"""Triton kernel of what a kernel that routes inside its main loop has to be told.

A threshold for every query block, from the unrounded FP32 block means, as in ``reference.py``; and
the blocks that are exact whatever the scores say, as packed bits that all heads share.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .config import BLOCK_SIZE, HEAD_DIM, TokenLayout, num_blocks
from .reference import EVERYTHING
from .triton_route import _near, _store_words, _within, range_edges
from .triton_words import _margin, _read_queries, statistics

ROWS = 32  # query blocks of a program
NUM_WARPS = 4

_BLOCK = tl.constexpr(BLOCK_SIZE)
_DIM = tl.constexpr(HEAD_DIM)
_EVERYTHING = tl.constexpr(EVERYTHING)


class Thresholds(NamedTuple):
    """What to route by.

    Attributes:
        limits: (B, H, NT) FP32 in log2 units: a key block is exact for a query block if its score,
            the mean logit, is above. -inf where tau takes everything.
        forced: (NT, NW) int32 [query block, word]: bit c of word w is set if key block 32 w + c is
            exact for the query block whatever its score, or past NT.
    """

    limits: torch.Tensor
    forced: torch.Tensor


def route_thresholds(
    q_mean: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    tau: float,
    estimator: str,
    scale_log2: float,
    layout: TokenLayout,
) -> Thresholds:
    """Thresholds for block means (B, H, NT, 128) FP32. Arguments as in ``triton_route.route``."""
    batch, heads, blocks, _ = q_mean.shape
    words = 2 * num_blocks(blocks)
    device = q_mean.device
    limits = torch.empty(batch, heads, blocks, dtype=torch.float32, device=device)
    forced = torch.empty(blocks, words, dtype=torch.int32, device=device)
    mu, spread = statistics(q_mean, k_mean, estimator, scale_log2)
    _route_thresholds[(triton.cdiv(blocks, ROWS), batch * heads)](
        *(q_mean, mu, spread, limits, forced, tau, scale_log2, blocks),
        *range_edges(layout),
        EXACT_ESTIMATOR=estimator == "exact",
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )
    return Thresholds(limits, forced)


@triton.jit(
    do_not_specialize=[
        *("tau", "scale_log2", "NT"),
        *("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"),
        *("q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7"),
    ]
)
def _route_thresholds(
    q_mean_ptr,
    mu_ptr,
    spread_ptr,
    limits_ptr,
    forced_ptr,
    tau,
    scale_log2,
    NT,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    q0,
    q1,
    q2,
    q3,
    q4,
    q5,
    q6,
    q7,
    EXACT_ESTIMATOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Limits of ROWS query blocks; the first head's programs store the bits. Grid (., B H)."""
    flat = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _read_queries(q_mean_ptr, flat, row, NT)
    mu = tl.load(mu_ptr + flat * _DIM + tl.arange(0, _DIM))
    mean = tl.sum(q * mu[None, :], 1) * scale_log2
    limit = mean + _margin(q, spread_ptr, flat, row, tau, scale_log2, NT, EXACT_ESTIMATOR)
    limit = tl.where(tau <= _EVERYTHING, float("-inf"), limit)
    tl.store(limits_ptr + flat * NT + row, limit, mask=row < NT)
    if flat == 0:
        dense = _within(row, q0, q1, q2, q3, q4, q5, q6, q7)[:, None]
        groups = (NT + _BLOCK - 1) // _BLOCK
        for group in range(groups):
            block = group * _BLOCK + tl.arange(0, _BLOCK)
            sink = _within(block, k0, k1, k2, k3, k4, k5, k6, k7)[None, :]
            forced = _near(row, block) | sink | dense | (block >= NT)[None, :]
            at = forced_ptr + row[:, None] * (2 * groups) + 2 * group
            _store_words(at, forced, (row < NT)[:, None], ROWS)
