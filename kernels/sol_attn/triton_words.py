"""Triton kernel that decides which key blocks are exact, as packed bits only.

NT^2 / 8 bytes a head: 1.3 MB for 40 heads of 32,760 tokens. Scores and thresholds come from the
unrounded FP32 block means, as in ``reference.py``. One program decides 64 key blocks for some query
blocks, so that all of them run at once; lists, which the Triton attention wants, would make it
serial.
"""

import torch
import triton
import triton.language as tl

from .config import BLOCK_SIZE, HEAD_DIM, TokenLayout, num_blocks
from .reference import SIGMA_FLOOR
from .triton_route import (
    _centred_scores,
    _near,
    _store_words,
    _within,
    moments,
    range_edges,
)

# Query blocks of a program. 64 rows and 4 warps take 1.2x as long, 32 rows 2x.
ROWS = 128
NUM_WARPS = 8
# The variance loops over key blocks, several of them in flight: more rows don't fit.
VARIANCE_ROWS = 64
VARIANCE_WARPS = 4

_BLOCK = tl.constexpr(BLOCK_SIZE)
_DIM = tl.constexpr(HEAD_DIM)
_SIGMA_FLOOR = tl.constexpr(SIGMA_FLOOR)


def route_words(
    q_mean: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    tau: float,
    estimator: str,
    scale_log2: float,
    layout: TokenLayout,
    exact_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B, H, NT, NW) int32: bit c of word w is set if key block 32 w + c is exact, or past NT.

    Args:
        q_mean, k_mean: (B, H, NT, 128) FP32 block means.
        tau, estimator, scale_log2, layout, exact_mask: as in ``triton_route.route``.
    """
    batch, heads, blocks, _ = q_mean.shape
    groups = num_blocks(blocks)
    device = q_mean.device
    words = torch.empty(batch, heads, blocks, 2 * groups, dtype=torch.int32, device=device)
    edges = range_edges(layout)
    rows = triton.cdiv(blocks, ROWS)
    mu = spread = None
    if exact_mask is not None:
        exact_mask = exact_mask.contiguous().view(torch.uint8)
    else:
        mu, spread = statistics(q_mean, k_mean, estimator, scale_log2)
    _route_words[(rows, groups, batch * heads)](
        *(q_mean, k_mean, mu, spread, exact_mask, words, tau, scale_log2, blocks),
        *edges,
        SOURCE="scores" if exact_mask is None else "given",
        EXACT_ESTIMATOR=estimator == "exact",
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )
    return words


def statistics(
    q_mean: torch.Tensor, k_mean: torch.Tensor, estimator: str, scale_log2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, 128) FP32 mean of the mean keys, and their spread: "diag" (B, H, 128) their centred
    second moment, "exact" (B, H, NT) the variance of every query block's scores."""
    mu, spread = moments(k_mean, squares=estimator == "diag")
    if estimator == "exact":
        batch, heads, blocks, _ = q_mean.shape
        spread = torch.empty(batch, heads, blocks, dtype=torch.float32, device=q_mean.device)
        _score_variance[(triton.cdiv(blocks, VARIANCE_ROWS), batch * heads)](
            *(q_mean, k_mean, mu, spread, scale_log2, blocks),
            ROWS=VARIANCE_ROWS,
            num_warps=VARIANCE_WARPS,
        )
    return mu, spread


@triton.jit
def _read_queries(q_mean_ptr, flat, row, NT):
    at = q_mean_ptr + (flat * NT + row[:, None]) * _DIM + tl.arange(0, _DIM)[None, :]
    return tl.load(at, mask=(row < NT)[:, None], other=0.0)


@triton.jit
def _margin(q, spread_ptr, flat, row, tau, scale_log2, NT, EXACT_ESTIMATOR: tl.constexpr):
    """(rows,) how far above the mean score of its row an exact block's has to be."""
    if EXACT_ESTIMATOR:
        variance = tl.load(spread_ptr + flat * NT + row, mask=row < NT, other=0.0)
    else:
        moment = tl.load(spread_ptr + flat * _DIM + tl.arange(0, _DIM))
        variance = tl.sum(q * q * moment[None, :], 1) * scale_log2 * scale_log2
    return tau * tl.sqrt_rn(variance + _SIGMA_FLOOR)


@triton.jit(do_not_specialize=["scale_log2", "NT"])
def _score_variance(
    q_mean_ptr, k_mean_ptr, mu_ptr, variance_ptr, scale_log2, NT, ROWS: tl.constexpr
):
    """Variance of the block scores of ROWS query blocks. Grid (ceil(NT / ROWS), B H).

    The full second moment of the mean keys gives just this.
    """
    flat = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _read_queries(q_mean_ptr, flat, row, NT)
    mu = tl.load(mu_ptr + flat * _DIM + tl.arange(0, _DIM))
    total = tl.zeros((ROWS,), tl.float32)
    for group in range((NT + _BLOCK - 1) // _BLOCK):
        score = _centred_scores(q, k_mean_ptr, flat, group, mu, scale_log2, NT)
        total += tl.sum(score * score, 1)
    tl.store(variance_ptr + flat * NT + row, tl.div_rn(total, NT.to(tl.float32)), mask=row < NT)


@triton.jit(
    do_not_specialize=[
        *("tau", "scale_log2", "NT"),
        *("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"),
        *("q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7"),
    ]
)
def _route_words(
    q_mean_ptr,
    k_mean_ptr,
    mu_ptr,
    spread_ptr,
    given_ptr,
    words_ptr,
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
    SOURCE: tl.constexpr,
    EXACT_ESTIMATOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Two words of ROWS query blocks. Grid (ceil(NT / ROWS), NG, B H)."""
    flat = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = group * _BLOCK + tl.arange(0, _BLOCK)
    live = (row < NT)[:, None]
    real = (block < NT)[None, :]
    if SOURCE == "given":
        at = given_ptr + (flat * NT + row[:, None]) * NT + block[None, :]
        exact = tl.load(at, mask=real & live, other=0) != 0
    else:
        mu = tl.load(mu_ptr + flat * _DIM + tl.arange(0, _DIM))
        q = _read_queries(q_mean_ptr, flat, row, NT)
        margin = _margin(q, spread_ptr, flat, row, tau, scale_log2, NT, EXACT_ESTIMATOR)
        score = _centred_scores(q, k_mean_ptr, flat, group, mu, scale_log2, NT)
        sink = _within(block, k0, k1, k2, k3, k4, k5, k6, k7)[None, :]
        dense = _within(row, q0, q1, q2, q3, q4, q5, q6, q7)[:, None]
        exact = (score > margin[:, None]) | _near(row, block) | sink | dense
    at = words_ptr + (flat * NT + row[:, None]) * (2 * groups) + 2 * group
    _store_words(at, exact | (block >= NT)[None, :], live, ROWS)
