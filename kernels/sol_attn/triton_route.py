"""Triton kernel that decides which key blocks are exact, as packed bits and as lists.

The list has room for every block: 2 NT^2 bytes a head, 21 MB for 40 heads of 32,760 tokens (2 % of
q, k and v), of which only the exact part is touched; the bits cost NT^2 / 8. A list lets the
attention kernel fetch blocks ahead of their use, which a walk over bits does not. Block scores and thresholds come from the unrounded FP32 block means, as in ``reference.py``.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .config import BLOCK_SIZE, HEAD_DIM, TokenLayout, TokenRange, num_blocks
from .reference import SIGMA_FLOOR
from .rules import MAX_RANGES

# Query blocks per program, pipeline stages, and the shared memory that takes; a GPU that allows less
# (SM86, SM89, SM120) gets the second line.
LARGE = (64, 2, 163_840)
SMALL = (32, 1, 98_304)
CHANNELS = 32  # per program

_BLOCK = tl.constexpr(BLOCK_SIZE)
_DIM = tl.constexpr(HEAD_DIM)
_SIGMA_FLOOR = tl.constexpr(SIGMA_FLOOR)


class Route(NamedTuple):
    """Exact blocks of every query block. S splits of the keys, NW = 2 NG words of 32 blocks.

    Attributes:
        words: (B, H, NT, NW) int32; bit c of word w is set if block 32 w + c is exact. Bits past
            NT are set: there is nothing to summarise.
        blocks: (S, B, H, NT, NT) int16; the exact blocks of one split in descending order, and
            nothing defined after them. Never holds block NT - 1, which may be partial and is
            taken before the list.
        counts: (S, B, H, NT) int32 exact blocks, block NT - 1 included.
    """

    words: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor


def block_ranges(ranges: tuple[TokenRange, ...]) -> list[tuple[int, int]]:
    """Token ranges as sorted, merged, half-open ranges of the blocks they touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((a // BLOCK_SIZE, num_blocks(b)) for a, b in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def range_edges(layout: TokenLayout) -> list[int]:
    """Sink ranges and dense query ranges in blocks, as the kernels' 4 MAX_RANGES arguments."""
    return [
        edge
        for ranges in (layout.sink_kv, layout.dense_q)
        for pair in (*block_ranges(ranges), *[(0, 0)] * MAX_RANGES)[:MAX_RANGES]
        for edge in pair
    ]


def moments(k_mean: torch.Tensor, *, squares: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, H, 128) FP32 mean of the mean keys, and their centred second moment per channel."""
    batch, heads, blocks, _ = k_mean.shape
    mu = torch.empty(batch, heads, HEAD_DIM, dtype=torch.float32, device=k_mean.device)
    moment = torch.empty_like(mu) if squares else None
    _moments[(HEAD_DIM // CHANNELS, batch * heads)](
        *(k_mean, mu, moment, blocks), MOMENT=squares, WIDTH=CHANNELS
    )
    return mu, moment


def route(
    q_mean: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    tau: float,
    estimator: str,
    routing: bool,
    scale_log2: float,
    layout: TokenLayout,
    splits: int = 1,
    exact_mask: torch.Tensor | None = None,
) -> Route:
    """Decide for block means (B, H, NT, 128) FP32.

    Args:
        tau, estimator, routing: as in ``SolAttnConfig``.
        scale_log2: softmax scale times log2(e).
        layout: sinks and dense queries, at most ``MAX_RANGES`` separate ranges of blocks each.
        splits: parts of the key range, each a whole number of groups of 64 blocks.
        exact_mask: (B, H, NT, NT) bool [query, key] that replaces the decision.
    """
    batch, heads, blocks, _ = q_mean.shape
    words = 2 * num_blocks(blocks)

    def empty(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device=q_mean.device)

    result = Route(
        empty(batch, heads, blocks, words, dtype=torch.int32),
        empty(splits, batch, heads, blocks, blocks, dtype=torch.int16),
        empty(splits, batch, heads, blocks, dtype=torch.int32),
    )
    source = "scores" if routing else "all"
    if exact_mask is not None:
        source, exact_mask = "given", exact_mask.contiguous().view(torch.uint8)
    edges = range_edges(layout)
    mu = moment = None
    if source == "scores":
        mu, moment = moments(k_mean, squares=estimator == "diag")
    query_blocks, stages = _launch_shape(q_mean.device)
    grid = (triton.cdiv(blocks, query_blocks), batch * heads, splits)
    _route[grid](
        q_mean,
        k_mean,
        mu,
        moment,
        exact_mask,
        *result,
        tau,
        scale_log2,
        blocks,
        *edges,
        SOURCE=source,
        EXACT_ESTIMATOR=estimator == "exact",
        ROWS=query_blocks,
        num_warps=8,
        num_stages=stages,
    )
    return result


@functools.cache
def _launch_shape(device: torch.device) -> tuple[int, int]:
    """(query blocks of a program, pipeline stages) that fit the shared memory of ``device``."""
    if device.type != "cuda":  # interpreted
        return LARGE[:2]
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 0)
    return LARGE[:2] if room >= LARGE[2] else SMALL[:2]


@triton.jit(do_not_specialize=["NT"])
def _moments(k_mean_ptr, mu_ptr, moment_ptr, NT, MOMENT: tl.constexpr, WIDTH: tl.constexpr):
    """Mean and centred second moment of the mean keys, per channel. Grid (128 / WIDTH, B H)."""
    flat = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    block = tl.arange(0, _BLOCK)
    k_mean_ptr += flat * NT * _DIM
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, NT, _BLOCK):
        inside = (start + block < NT)[:, None]
        at = k_mean_ptr + (start + block)[:, None] * _DIM + channel[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    mu = tl.div_rn(total, NT.to(tl.float32))
    tl.store(mu_ptr + flat * _DIM + channel, mu)
    if MOMENT:
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, NT, _BLOCK):
            inside = (start + block < NT)[:, None]
            at = k_mean_ptr + (start + block)[:, None] * _DIM + channel[None, :]
            centred = tl.where(inside, tl.load(at, mask=inside, other=0.0) - mu[None, :], 0.0)
            total += tl.sum(centred * centred, 0)
        tl.store(moment_ptr + flat * _DIM + channel, tl.div_rn(total, NT.to(tl.float32)))


@triton.jit
def _centred_scores(q, k_mean_ptr, flat, group, mu, scale_log2, NT):
    """(rows, 64) block scores less their mean, in log2 units; 0 past NT."""
    block = group * _BLOCK + tl.arange(0, _BLOCK)
    inside = (block < NT)[:, None]
    at = k_mean_ptr + (flat * NT + block[:, None]) * _DIM + tl.arange(0, _DIM)[None, :]
    k = tl.where(inside, tl.load(at, mask=inside, other=0.0) - mu[None, :], 0.0)
    return tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale_log2


@triton.jit
def _near(row, block):
    """(rows, 64): a query block's own key block and its neighbours."""
    return (row[:, None] - block[None, :] <= 1) & (block[None, :] - row[:, None] <= 1)


@triton.jit
def _store_words(at, exact, live, ROWS: tl.constexpr):
    """Pack (rows, 64) and store two words a row at ``at`` (rows, 1), where ``live`` (rows, 1)."""
    bits = tl.reshape(exact.to(tl.int32), (ROWS, 2, 32))
    packed = tl.sum(bits << tl.arange(0, 32)[None, None, :], 2)
    tl.store(at + tl.arange(0, 2)[None, :], packed, mask=live)


@triton.jit
def _within(x, a0, a1, b0, b1, c0, c1, d0, d1):
    first = ((x >= a0) & (x < a1)) | ((x >= b0) & (x < b1))
    return first | ((x >= c0) & (x < c1)) | ((x >= d0) & (x < d1))


@triton.jit(
    do_not_specialize=[
        *("tau", "scale_log2", "NT"),
        *("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"),
        *("q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7"),
    ]
)
def _route(
    q_mean_ptr,
    k_mean_ptr,
    mu_ptr,
    moment_ptr,
    given_ptr,
    words_ptr,
    blocks_ptr,
    counts_ptr,
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
    """Words, lists and counts of ROWS query blocks. Grid (ceil(NT / ROWS), B H, splits)."""
    flat = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < NT
    groups = (NT + _BLOCK - 1) // _BLOCK
    channel = tl.arange(0, _DIM)
    if SOURCE == "scores":
        mu = tl.load(mu_ptr + flat * _DIM + channel)
        q_at = q_mean_ptr + (flat * NT + row[:, None]) * _DIM + channel[None, :]
        q = tl.load(q_at, mask=live[:, None], other=0.0)
        if EXACT_ESTIMATOR:
            # The full second moment is the variance of the scores themselves.
            total = tl.zeros((ROWS,), tl.float32)
            for group in range(groups):
                score = _centred_scores(q, k_mean_ptr, flat, group, mu, scale_log2, NT)
                total += tl.sum(score * score, 1)
            variance = tl.div_rn(total, NT.to(tl.float32))
        else:
            moment = tl.load(moment_ptr + flat * _DIM + channel)
            variance = tl.sum(q * q * moment[None, :], 1) * scale_log2 * scale_log2
        margin = tau * tl.sqrt_rn(variance + _SIGMA_FLOOR)  # above the mean score
    dense = _within(row, q0, q1, q2, q3, q4, q5, q6, q7)

    split = tl.program_id(2)
    groups_per_split = (groups + tl.num_programs(2) - 1) // tl.num_programs(2)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, groups)
    heads = tl.num_programs(1).to(tl.int64)
    list_ptr = blocks_ptr + ((split * heads + flat) * NT + row) * NT
    slot = tl.zeros((ROWS,), tl.int32)  # blocks listed so far
    count = tl.zeros((ROWS,), tl.int32)
    for step in range(last - first):
        group = last - 1 - step  # the list descends
        block = group * _BLOCK + tl.arange(0, _BLOCK)
        real = (block < NT)[None, :]
        if SOURCE == "all":
            exact = real & live[:, None]
        elif SOURCE == "given":
            given_at = given_ptr + (flat * NT + row[:, None]) * NT + block[None, :]
            exact = tl.load(given_at, mask=real & live[:, None], other=0) != 0
        else:
            score = _centred_scores(q, k_mean_ptr, flat, group, mu, scale_log2, NT)
            sink = _within(block, k0, k1, k2, k3, k4, k5, k6, k7)[None, :]
            exact = ((score > margin[:, None]) | _near(row, block) | sink | dense[:, None]) & real
        count += tl.sum(exact.to(tl.int32), 1)
        word = words_ptr + (flat * NT + row[:, None]) * (2 * groups) + 2 * group
        _store_words(word, exact | (block >= NT)[None, :], live[:, None], ROWS)
        listed = (exact & (block < NT - 1)[None, :]).to(tl.int32)
        in_group = tl.sum(listed, 1)
        after = in_group[:, None] - tl.cumsum(listed, 1)  # listed blocks of the group behind this
        place = list_ptr[:, None] + slot[:, None] + after
        names = tl.broadcast_to(block.to(tl.int16)[None, :], (ROWS, _BLOCK))
        tl.store(place, names, mask=(listed != 0) & live[:, None])
        slot += in_group
    tl.store(counts_ptr + (split * heads + flat) * NT + row, count, mask=live)
