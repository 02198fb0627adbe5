"""Triton attention over exact blocks and block summaries: BF16 on SM80+, FP8 on SM89+.

One program owns one query block of one head (and one split of the keys). It takes all summaries
first, group by group, then the exact blocks in descending order, in one online softmax; with FP8
that order and its roundings are those of ``emulation.py``.
"""

import functools

import torch
import triton
import triton.language as tl

from .config import BLOCK_SIZE, HEAD_DIM, num_blocks
from .prepare import Prepared
from .triton_route import Route

NUM_WARPS = 4
STAGES = 3  # blocks of K and V in flight
# Shared memory of a program with all stages; a GPU that allows less (SM86, SM89) gets 2 stages.
SHARED_BYTES = {"bf16": 116_000, "fp8": 62_000}
# FP8 gets three programs a multiprocessor by it; BF16, with shared memory for two, is as fast with it
# as without. What spills, spills outside the loop, but for one value of BF16 with an order.
MAX_REGISTERS = 168

_BLOCK = tl.constexpr(BLOCK_SIZE)
_DIM = tl.constexpr(HEAD_DIM)
_PROBABILITY_BITS = tl.constexpr(8)  # FP8 probabilities are cast at 2^8
_LN2 = tl.constexpr(0.6931471805599453)


def attend(
    operands: Prepared,
    chosen: Route,
    *,
    scale_log2: float,
    with_lse: bool,
    order: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out (B, T, H, 128) BF16 contiguous, and lse (B, H, T) FP32 natural log if asked for.

    Row i of the operands goes to row order[i] of the results. The LSE does not hold the logit of
    ``operands.k_offset``.
    """
    batch, heads, blocks, _ = operands.q_mean.shape
    tokens = operands.tokens
    splits = chosen.counts.shape[0]
    fp8 = operands.precision == "fp8"
    device = operands.q.device
    parts = torch.empty(splits, batch, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    with_lse = with_lse or splits > 1
    lse = None
    if with_lse:
        lse = torch.empty(splits, batch, heads, tokens, dtype=torch.float32, device=device)
    # FP8 operands are contiguous: the kernel knows their strides.
    strides = (0,) * 9
    if not fp8:
        q, k, v = operands.q, operands.k, operands.v
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    out_offset = operands.out_offset if splits == 1 else None
    _attend[(blocks, batch * heads, splits)](
        operands.q,
        operands.k,
        operands.v,
        operands.mean_k,
        operands.mean_v,
        operands.q_scale,
        operands.k_scale,
        operands.mean_k_scale,
        operands.v_scale,
        out_offset,
        order,
        *chosen,
        parts,
        lse,
        *strides,
        scale_log2,
        tokens,
        blocks,
        heads,
        FP8=fp8,
        RESIDUAL=operands.k_residual,
        OUT_OFFSET=out_offset is not None,
        ORDERED=order is not None,
        LSE=with_lse,
        STAGES=_stages(operands.precision, device),
        num_warps=NUM_WARPS,
        # The score of the mean key takes registers inside the loop.
        maxnreg=None if operands.k_residual else MAX_REGISTERS,
    )
    if splits == 1:
        return parts[0], None if lse is None else lse[0]
    return merge(parts, lse, operands.out_offset)


def merge(
    parts: torch.Tensor, lse: torch.Tensor, out_offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits of the keys to one result.

    Args:
        parts: (S, B, T, H, 128) BF16; lse: (S, B, H, T) FP32, natural log.
        out_offset: (B, H, 128) FP32 to add to every row, or None.

    Returns:
        out (B, T, H, 128) BF16, lse (B, H, T) FP32.
    """
    splits, batch, tokens, heads, _ = parts.shape
    out = torch.empty_like(parts[0])
    total = torch.empty_like(lse[0])
    _merge[(num_blocks(tokens), batch * heads)](
        *(parts, lse, out_offset, out, total, tokens, heads),
        SPLITS=splits,
        OUT_OFFSET=out_offset is not None,
    )
    return out, total


@functools.cache
def _stages(precision: str, device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return STAGES
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 0)
    return STAGES if room >= SHARED_BYTES[precision] else STAGES - 1


@triton.jit
def _update(row_max, row_sum, acc, scores, factor, v, FP8: tl.constexpr):
    """One step of the online softmax.

    scores: (64, N) FP32, -inf where masked; factor > 0 turns them into log2 units; v: (N, 128).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # no column yet: no -inf - -inf
    rescale = tl.exp2(row_max - base)
    if FP8:
        p = tl.exp2(scores * factor - (base - _PROBABILITY_BITS)[:, None])
        # A product of its own, added in FP32: a tensor core adds FP8 products with fewer bits.
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
    else:
        p = tl.exp2(scores * factor - base[:, None])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    return new_max, row_sum * rescale + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["scale_log2", "T", "NT"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    mean_k_ptr,
    mean_v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    mean_k_scale_ptr,
    v_scale_ptr,
    out_offset_ptr,
    order_ptr,
    words_ptr,
    blocks_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    scale_log2,
    T,
    NT,
    H,
    FP8: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OUT_OFFSET: tl.constexpr,
    ORDERED: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of one query block. Grid (NT, B H, splits)."""
    query_block = tl.program_id(0)
    flat = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.num_programs(1).to(tl.int64)  # B H
    column = tl.arange(0, _BLOCK)
    channel = tl.arange(0, _DIM)
    token = query_block * _BLOCK + column
    groups = (NT + _BLOCK - 1) // _BLOCK

    # Base pointers of this head; offsets inside a head are int64 where they grow with T.
    if FP8:
        head_rows = flat * NT * _BLOCK
        stride_qt = _DIM
        stride_kt = _DIM
        q_ptr += head_rows * _DIM
        k_ptr += head_rows * _DIM
        v_ptr += head_rows * _DIM
        q = tl.load(q_ptr + token.to(tl.int64)[:, None] * _DIM + channel[None, :])
        scale_log2 = scale_log2 * tl.load(q_scale_ptr + flat * NT + query_block)
    else:
        batch = flat // H
        head = flat % H
        q_ptr += batch * stride_qb + head * stride_qh
        k_ptr += batch * stride_kb + head * stride_kh
        v_ptr += batch * stride_vb + head * stride_vh
        at = q_ptr + token.to(tl.int64)[:, None] * stride_qt + channel[None, :]
        q = tl.load(at, mask=(token < T)[:, None], other=0.0)

    row_max = tl.full((_BLOCK,), float("-inf"), tl.float32)
    row_sum = tl.zeros((_BLOCK,), tl.float32)
    acc = tl.zeros((_BLOCK, _DIM), tl.float32)

    # Summaries.
    words_ptr += (flat * NT + query_block) * (2 * groups)
    mean_k_ptr += flat * groups * _BLOCK * _DIM
    mean_v_ptr += flat * groups * _BLOCK * _DIM
    tail = T - (NT - 1) * _BLOCK
    groups_per_split = (groups + tl.num_programs(2) - 1) // tl.num_programs(2)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, groups)
    for group in range(first, last):
        low = tl.load(words_ptr + 2 * group)
        high = tl.load(words_ptr + 2 * group + 1)
        if (low & high) != -1:
            block = group * _BLOCK + column
            mean_k = tl.load(mean_k_ptr + block[:, None] * _DIM + channel[None, :])
            logits = tl.dot(q, tl.trans(mean_k))
            if FP8:
                factor = scale_log2 * tl.load(mean_k_scale_ptr + flat * groups + group)
                mean_v = tl.trans(
                    tl.load(mean_v_ptr + channel[:, None] * (groups * _BLOCK) + block[None, :])
                )
            else:
                factor = scale_log2
                mean_v = tl.load(mean_v_ptr + block[:, None] * _DIM + channel[None, :])
            weight = tl.where(block == NT - 1, tl.log2(tail.to(tl.float32)), 6.0)  # log2 length
            word = tl.where(column < 32, low, high)
            summary = ((word >> (column & 31)) & 1) == 0
            logits = tl.where(summary[None, :], logits * factor + weight[None, :], float("-inf"))
            row_max, row_sum, acc = _update(row_max, row_sum, acc, logits, 1.0, mean_v, FP8)

    # The last block, which may be partial, stands in front of the descending list.
    count = tl.load(counts_ptr + (split * heads + flat) * NT + query_block)
    last_word = tl.load(words_ptr + (NT - 1) // 32)
    owns_tail = (first < groups) & (last == groups)
    has_tail = ((last_word >> ((NT - 1) & 31)) & 1) & owns_tail.to(tl.int32)
    if has_tail != 0:
        row = (NT - 1) * _BLOCK + column
        inside = row < T
        at = k_ptr + row.to(tl.int64)[:, None] * stride_kt + channel[None, :]
        scores = tl.dot(q, tl.trans(tl.load(at, mask=inside[:, None], other=0.0)))
        factor = scale_log2
        if FP8:
            factor *= tl.load(k_scale_ptr + flat * NT + NT - 1)
            v = tl.trans(
                tl.load(v_ptr + channel.to(tl.int64)[:, None] * NT * _BLOCK + row[None, :])
            )
        else:
            at = v_ptr + row.to(tl.int64)[:, None] * stride_vt + channel[None, :]
            v = tl.load(at, mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        if RESIDUAL:
            mean = _mean_score(q, mean_k_ptr, mean_k_scale_ptr + flat * groups, NT - 1)
            scores = scores * factor + (mean * scale_log2)[:, None]
            factor = 1.0
        row_max, row_sum, acc = _update(row_max, row_sum, acc, scores, factor, v, FP8)

    # The rest of the exact blocks. Offsets inside a block are int32 and the same for all of them.
    k_at = column[:, None] * stride_kt + channel[None, :]
    if FP8:
        v_at = channel[:, None] * (NT * _BLOCK) + column[None, :]
        stride_vt = 1
    else:
        v_at = column[:, None] * stride_vt + channel[None, :]
    blocks_ptr += ((split * heads + flat) * NT + query_block) * NT
    for place in tl.range(0, count - has_tail, num_stages=STAGES):
        block = tl.load(blocks_ptr + place).to(tl.int32)
        start = block.to(tl.int64) * _BLOCK
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + start * stride_kt + k_at)))
        v = tl.load(v_ptr + start * stride_vt + v_at)
        factor = scale_log2
        if FP8:
            factor *= tl.load(k_scale_ptr + flat * NT + block)
            v = tl.trans(v)
        if RESIDUAL:
            mean = _mean_score(q, mean_k_ptr, mean_k_scale_ptr + flat * groups, block)
            scores = scores * factor + (mean * scale_log2)[:, None]
            factor = 1.0
        row_max, row_sum, acc = _update(row_max, row_sum, acc, scores, factor, v, FP8)

    # A split without any column has a row sum of 0: its output is 0 and its LSE -inf.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if FP8:
        out *= tl.load(v_scale_ptr + flat * _DIM + channel)[None, :]
    if OUT_OFFSET:
        out += tl.load(out_offset_ptr + flat * _DIM + channel)[None, :]
    inside = token < T
    if ORDERED:
        token = tl.load(order_ptr + token, mask=inside, other=0)
    batch = flat // H
    head = flat % H
    out_row = ((split * (heads // H) + batch) * T + token) * H + head
    at = out_ptr + out_row[:, None] * _DIM + channel[None, :]
    tl.store(at, out.to(tl.bfloat16), mask=inside[:, None])
    if LSE:
        lse = row_max + tl.log2(row_sum)
        if FP8:
            lse -= _PROBABILITY_BITS
        tl.store(lse_ptr + (split * heads + flat) * T + token, lse * _LN2, mask=inside)


@triton.jit
def _mean_score(q, mean_k_ptr, mean_k_scale_ptr, block):
    """(64,) product of every query row with the rounded mean key of ``block``."""
    mean = tl.load(mean_k_ptr + block * _DIM + tl.arange(0, _DIM)).to(tl.float32)
    scale = tl.load(mean_k_scale_ptr + block // _BLOCK)
    return tl.sum(q.to(tl.float32) * mean[None, :], 1) * scale


@triton.jit(do_not_specialize=["T"])
def _merge(
    parts_ptr,
    part_lse_ptr,
    out_offset_ptr,
    out_ptr,
    lse_ptr,
    T,
    H,
    SPLITS: tl.constexpr,
    OUT_OFFSET: tl.constexpr,
):
    """Sum of the splits' outputs weighted by their share of the softmax. Grid (NT, B H)."""
    flat = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1).to(tl.int64)
    token = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = token < T
    channel = tl.arange(0, _DIM)
    peak = tl.full((_BLOCK,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        at = part_lse_ptr + (split * heads + flat) * T + token
        peak = tl.maximum(peak, tl.load(at, mask=inside, other=0.0))
    total = tl.zeros((_BLOCK,), tl.float32)
    acc = tl.zeros((_BLOCK, _DIM), tl.float32)
    out_row = ((flat // H) * T + token) * H + flat % H
    rows = heads * T  # B T H rows a split
    for split in tl.static_range(SPLITS):
        at = part_lse_ptr + (split * heads + flat) * T + token
        weight = tl.exp(tl.load(at, mask=inside, other=0.0) - peak)
        at = parts_ptr + (split * rows + out_row)[:, None] * _DIM + channel[None, :]
        part = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
        acc += weight[:, None] * part
        total += weight
    acc = acc / total[:, None]
    if OUT_OFFSET:
        acc += tl.load(out_offset_ptr + flat * _DIM + channel)[None, :]
    at = out_ptr + out_row[:, None] * _DIM + channel[None, :]
    tl.store(at, acc.to(tl.bfloat16), mask=inside[:, None])
    tl.store(lse_ptr + flat * T + token, peak + tl.log(total), mask=inside)
