"""Triton kernels that make ``Prepared`` operands: block means, E4M3 codes, scales.

Every kernel reads Q, K and V where they are, through their strides. Sums are FP32 and have one
order, so results are equal bit for bit from run to run. Passes over memory: Q once, K once (twice
with "block" smoothing), V once for "bf16" and twice for "fp8". Smoothing by the mean reads a sample
of K and V before.
"""

import os

import torch
import triton
import triton.language as tl

from .config import BLOCK_SIZE, HEAD_DIM, num_blocks
from .emulation import AMAX_FLOOR, E4M3, E4M3_MAX, sample_stride
from .prepare import Prepared

CHANNELS = 8  # per program of the sequence statistics: one 32-byte sector of every block
SAMPLED_CHANNELS = 32  # per program that reads the sample
SAMPLED_AT_ONCE = 4  # blocks in flight there: one at a time, latency takes three times as long
# Sums over the 64 tokens of a block cross few warps: with 4 the reading kernels take 1.2x as long,
# with 8 1.9x. Rounding V holds all of a block in registers: one warp, unless there is more to hold.
READING_WARPS = 2
ROUNDING_WARPS = 1
CENTRING_WARPS = 2

_BLOCK = tl.constexpr(BLOCK_SIZE)
_DIM = tl.constexpr(HEAD_DIM)
_AT_ONCE = tl.constexpr(SAMPLED_AT_ONCE)
_FLOOR = tl.constexpr(AMAX_FLOOR)
_PER_MAX = tl.constexpr(1.0 / E4M3_MAX)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# Four FP32 values to the bytes of an int32 ($0), the sum of what the bytes say ($1), and how much more
# that is than the sum of the values ($2).
_PACK_AND_SUM = tl.constexpr("""
{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 ab, cd;
    .reg .f32 fa, fb, fc, fd;
    cvt.rn.satfinite.e4m3x2.f32 low, $4, $3;
    cvt.rn.satfinite.e4m3x2.f32 high, $6, $5;
    mov.b32 $0, {low, high};
    cvt.rn.f16x2.e4m3x2 ab, low;
    cvt.rn.f16x2.e4m3x2 cd, high;
    mov.b32 {a, b}, ab;
    mov.b32 {c, d}, cd;
    cvt.f32.f16 fa, a;
    cvt.f32.f16 fb, b;
    cvt.f32.f16 fc, c;
    cvt.f32.f16 fd, d;
    add.f32 fa, fa, fb;
    add.f32 fc, fc, fd;
    add.f32 fa, fa, fc;
    add.f32 fb, $3, $4;
    add.f32 fd, $5, $6;
    add.f32 fb, fb, fd;
    sub.f32 $2, fa, fb;
    mov.f32 $1, fa;
}
""")


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    k_smoothing: str = "none",
    v_smoothing: str = "none",
    v_bias_correction: bool = False,
    order: torch.Tensor | None = None,
    v_order: str = "natural",
) -> Prepared:
    """``Prepared`` of q, k, v (B, T, H, 128) BF16 on one CUDA device; as ``prepare_reference``.

    ``order`` (T,) int64: block i holds the tokens order[64 i : 64 i + 64]. Rows are 256 bytes, so
    fetching them in another order costs nothing; "bf16" then writes copies of q, k and v.
    """
    batch, tokens, heads, dim = q.shape
    blocks = num_blocks(tokens)
    padded_blocks = num_blocks(blocks) * BLOCK_SIZE
    fp8 = precision == "fp8"
    grid = (batch * heads, blocks)  # heads first: their rows lie side by side in memory
    each = (*grid, 3)  # Q, K and V in programs of their own

    def empty(*shape, dtype=torch.float32):
        return torch.empty(batch, heads, *shape, dtype=dtype, device=q.device)

    def zeros(*shape, dtype):
        return torch.zeros(batch, heads, *shape, dtype=dtype, device=q.device)

    q_mean, k_mean = empty(blocks, dim), empty(blocks, dim)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    if not fp8:
        mean_k = zeros(padded_blocks, dim, dtype=torch.bfloat16)
        mean_v = zeros(padded_blocks, dim, dtype=torch.bfloat16)
        copies = (None,) * 3
        if order is not None:
            copies = tuple(empty(tokens, dim, dtype=torch.bfloat16) for _ in range(3))
        _summarise_bf16[each](
            *(q, k, v, order, *copies, q_mean, k_mean, mean_k, mean_v),
            *strides,
            *(tokens, blocks, heads),
            ORDERED=order is not None,
            num_warps=READING_WARPS,
        )
        if order is not None:
            q, k, v = (copy.transpose(1, 2) for copy in copies)
        return Prepared(tokens, q, k, v, q_mean, k_mean, mean_k, mean_v)

    round_k = k_smoothing != "block"
    padded_tokens = blocks * BLOCK_SIZE
    q8 = empty(padded_tokens, dim, dtype=E4M3)
    k8 = empty(padded_tokens, dim, dtype=E4M3)
    v8 = empty(dim, padded_tokens, dtype=E4M3)
    q_scale, k_scale = empty(blocks), empty(blocks)
    k_offset = empty(dim) if k_smoothing == "mean" else None
    v_offset = empty(dim) if v_smoothing == "mean" else None
    sampled = [(x, mean) for x, mean in ((k, k_offset), (v, v_offset)) if mean is not None]
    if sampled:
        (a, mean_a), (b, mean_b) = sampled[0], sampled[-1]
        _sampled_means[(batch * heads, dim // SAMPLED_CHANNELS, len(sampled))](
            *(a, b, order, mean_a, mean_b, *a.stride()[:3], *b.stride()[:3]),
            *(tokens, blocks, heads, sample_stride(blocks)),
            ORDERED=order is not None,
            WIDTH=SAMPLED_CHANNELS,
        )
    # Values of V as they are fit into BF16.
    v_reach = empty(blocks, dim, dtype=torch.bfloat16 if v_offset is None else torch.float32)
    _summarise_fp8[each](
        *(q, k, v, order, k_offset, v_offset, q8, k8, q_scale, k_scale, q_mean, k_mean, v_reach),
        *strides,
        *(tokens, blocks, heads),
        ORDERED=order is not None,
        ROUND_K=round_k,
        K_OFFSET=k_offset is not None,
        V_OFFSET=v_offset is not None,
        num_warps=READING_WARPS,
    )
    v_scale = empty(dim)
    _value_scales[(dim // CHANNELS, batch * heads)](v_reach, v_scale, blocks, WIDTH=CHANNELS)
    mean_k8 = empty(padded_blocks, dim, dtype=E4M3)
    mean_k_scale = empty(padded_blocks // BLOCK_SIZE)
    _round_mean_keys[(batch * heads, padded_blocks // BLOCK_SIZE)](
        *(k_mean, mean_k8, mean_k_scale, blocks)
    )
    if not round_k:
        _round_residual_keys[grid](
            *(k, order, mean_k8, mean_k_scale, k8, k_scale, *k.stride()[:3]),
            *(tokens, blocks, heads),
            ORDERED=order is not None,
        )
    mean_v8 = zeros(dim, padded_blocks, dtype=E4M3)
    moved = empty(blocks, dim) if v_bias_correction else None
    _round_values[grid](
        *(
            v,
            order,
            v_offset,
            v_scale,
            v8.view(torch.int32),
            mean_v8,
            moved,
            *v.stride()[:3],
            tokens,
            blocks,
            heads,
        ),
        ORDERED=order is not None,
        V_OFFSET=v_offset is not None,
        MOVED=moved is not None,
        K32=v_order == "k32",
        num_warps=ROUNDING_WARPS if v_offset is None else CENTRING_WARPS,
    )
    out_offset = v_offset
    if moved is not None:
        out_offset = empty(dim)
        _corrected_offset[(dim // CHANNELS, batch * heads)](
            *(moved, v_offset, v_scale, out_offset, tokens, blocks), WIDTH=CHANNELS
        )
    return Prepared(
        *(tokens, q8, k8, v8, q_mean, k_mean, mean_k8, mean_v8),
        *(q_scale, k_scale, mean_k_scale, v_scale, k_offset, out_offset),
        k_residual=k_smoothing == "block",
        v_order=v_order,
    )


@triton.jit
def _token_of_slot(slot):
    """``prepare.TOKEN_OF_SLOT`` in every 32."""
    return (slot & ~14) + ((slot & 2) << 2) + ((slot & 12) >> 1)


@triton.jit
def _slot_of_token(token):
    return (token & ~14) + ((token & 8) >> 2) + ((token & 6) << 1)


@triton.jit
def _read_block(x_ptr, order_ptr, stride_b, stride_t, stride_h, T, H, ORDERED: tl.constexpr):
    """(64, 128) FP32 tokens of this program's block, zeros past T. Offsets are int64."""
    block = tl.program_id(1).to(tl.int64)
    flat = tl.program_id(0).to(tl.int64)
    place = block * _BLOCK + tl.arange(0, _BLOCK)
    token = place
    if ORDERED:
        token = tl.load(order_ptr + place, mask=place < T, other=0)
    at = x_ptr + (flat // H) * stride_b + (flat % H) * stride_h + token[:, None] * stride_t
    inside = (place < T)[:, None]
    return tl.load(at + tl.arange(0, _DIM)[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _length(T):
    """Real tokens of this program's block."""
    return tl.minimum(T - tl.program_id(1) * _BLOCK, _BLOCK).to(tl.float32)


@triton.jit
def _block_mean(x, T):
    return tl.div_rn(tl.sum(x, 0), _length(T))


@triton.jit
def _block_row(NT):
    """Index of this program's block among those of all heads, int64."""
    return tl.program_id(0).to(tl.int64) * NT + tl.program_id(1)


@triton.jit
def _scale(amax):
    return tl.maximum(amax, _FLOOR) * _PER_MAX


@triton.jit
def _to_e4m3(x, scale):
    return (x * tl.div_rn(1.0, scale)).to(tl.float8e4nv)  # the conversion saturates


@triton.jit
def _store_rounded_block(x, code_ptr, scale_ptr, NT):
    """E4M3 codes and the one scale of this program's (64, 128) block; zeros stay zeros."""
    scale = _scale(tl.max(tl.abs(x)))
    row = _block_row(NT) * _BLOCK + tl.arange(0, _BLOCK)
    at = code_ptr + row[:, None] * _DIM + tl.arange(0, _DIM)[None, :]
    tl.store(at, _to_e4m3(x, scale))
    tl.store(scale_ptr + _block_row(NT), scale)


@triton.jit(do_not_specialize=["T", "NT"])
def _summarise_bf16(
    q_ptr,
    k_ptr,
    v_ptr,
    order_ptr,
    q_copy_ptr,
    k_copy_ptr,
    v_copy_ptr,
    q_mean_ptr,
    k_mean_ptr,
    mean_k_ptr,
    mean_v_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    T,
    NT,
    H,
    ORDERED: tl.constexpr,
):
    """Block means of Q, K, V, and copies in the new order if there is one. Grid (B H, NT, 3)."""
    channel = tl.arange(0, _DIM)
    at = _block_row(NT) * _DIM + channel
    groups = (NT + _BLOCK - 1) // _BLOCK
    summary = tl.program_id(0).to(tl.int64) * groups * _BLOCK + tl.program_id(1)
    summary_at = summary * _DIM + channel
    which = tl.program_id(2)
    if which == 0:
        q = _read_block(q_ptr, order_ptr, stride_qb, stride_qt, stride_qh, T, H, ORDERED)
        tl.store(q_mean_ptr + at, _block_mean(q, T))
        if ORDERED:
            _store_copy(q, q_copy_ptr, T)
    elif which == 1:
        k = _read_block(k_ptr, order_ptr, stride_kb, stride_kt, stride_kh, T, H, ORDERED)
        k_mean = _block_mean(k, T)
        tl.store(k_mean_ptr + at, k_mean)
        tl.store(mean_k_ptr + summary_at, k_mean.to(tl.bfloat16))
        if ORDERED:
            _store_copy(k, k_copy_ptr, T)
    else:
        v = _read_block(v_ptr, order_ptr, stride_vb, stride_vt, stride_vh, T, H, ORDERED)
        tl.store(mean_v_ptr + summary_at, _block_mean(v, T).to(tl.bfloat16))
        if ORDERED:
            _store_copy(v, v_copy_ptr, T)


@triton.jit
def _store_copy(x, copy_ptr, T):
    """Write this program's (64, 128) block to (B H, T, 128) BF16; the values come from BF16."""
    place = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    row = tl.program_id(0).to(tl.int64) * T + place
    at = copy_ptr + row[:, None] * _DIM + tl.arange(0, _DIM)[None, :]
    tl.store(at, x.to(tl.bfloat16), mask=(place < T)[:, None])


@triton.jit(do_not_specialize=["T", "NT", "STRIDE"])
def _sampled_means(
    a_ptr,
    b_ptr,
    order_ptr,
    mean_a_ptr,
    mean_b_ptr,
    stride_ab,
    stride_at,
    stride_ah,
    stride_bb,
    stride_bt,
    stride_bh,
    T,
    NT,
    H,
    STRIDE,
    ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """FP32 means over the tokens of blocks 0, STRIDE, 2 STRIDE, ... of one or two tensors.

    Grid (B H, 128 / WIDTH, tensors).
    """
    if tl.program_id(2) == 0:
        _store_sampled_mean(
            a_ptr,
            mean_a_ptr,
            stride_ab,
            stride_at,
            stride_ah,
            order_ptr,
            T,
            NT,
            H,
            STRIDE,
            ORDERED,
            WIDTH,
        )
    else:
        _store_sampled_mean(
            b_ptr,
            mean_b_ptr,
            stride_bb,
            stride_bt,
            stride_bh,
            order_ptr,
            T,
            NT,
            H,
            STRIDE,
            ORDERED,
            WIDTH,
        )


@triton.jit
def _store_sampled_mean(
    x_ptr,
    mean_ptr,
    stride_b,
    stride_t,
    stride_h,
    order_ptr,
    T,
    NT,
    H,
    STRIDE,
    ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head_ptr = x_ptr + (flat // H) * stride_b + (flat % H) * stride_h
    row = tl.arange(0, _AT_ONCE * _BLOCK)
    place_in_first = (row // _BLOCK * STRIDE * _BLOCK + row % _BLOCK).to(tl.int64)
    total = tl.zeros((_AT_ONCE * _BLOCK, WIDTH), tl.float32)
    real = tl.zeros((_AT_ONCE * _BLOCK,), tl.float32)
    for first in range(0, NT, STRIDE * _AT_ONCE):
        place = place_in_first + first * _BLOCK
        token = place
        if ORDERED:
            token = tl.load(order_ptr + place, mask=place < T, other=0)
        at = head_ptr + token[:, None] * stride_t + channel[None, :]
        total += tl.load(at, mask=(place < T)[:, None], other=0.0).to(tl.float32)
        real += (place < T).to(tl.float32)
    mean = tl.div_rn(tl.sum(total, 0), tl.sum(real, 0))
    tl.store(mean_ptr + flat * _DIM + channel, mean)


@triton.jit(do_not_specialize=["T", "NT"])
def _summarise_fp8(
    q_ptr,
    k_ptr,
    v_ptr,
    order_ptr,
    k_offset_ptr,
    v_offset_ptr,
    q8_ptr,
    k8_ptr,
    q_scale_ptr,
    k_scale_ptr,
    q_mean_ptr,
    k_mean_ptr,
    v_reach_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    T,
    NT,
    H,
    ORDERED: tl.constexpr,
    ROUND_K: tl.constexpr,
    K_OFFSET: tl.constexpr,
    V_OFFSET: tl.constexpr,
):
    """Codes and block means of Q and K, and V's largest magnitude in every block. Grid (B H, NT, 3).

    Offsets are subtracted first. K is not rounded if its block means are to be subtracted, too.
    """
    at = _block_row(NT) * _DIM + tl.arange(0, _DIM)
    which = tl.program_id(2)
    if which == 0:
        q = _read_block(q_ptr, order_ptr, stride_qb, stride_qt, stride_qh, T, H, ORDERED)
        tl.store(q_mean_ptr + at, _block_mean(q, T))
        _store_rounded_block(q, q8_ptr, q_scale_ptr, NT)
    elif which == 1:
        k = _read_block(k_ptr, order_ptr, stride_kb, stride_kt, stride_kh, T, H, ORDERED)
        if K_OFFSET:
            k = _less_offset(k, k_offset_ptr, T)
        tl.store(k_mean_ptr + at, _block_mean(k, T))
        if ROUND_K:
            _store_rounded_block(k, k8_ptr, k_scale_ptr, NT)
    else:
        v = _read_block(v_ptr, order_ptr, stride_vb, stride_vt, stride_vh, T, H, ORDERED)
        if V_OFFSET:
            v = _less_offset(v, v_offset_ptr, T)
        tl.store(v_reach_ptr + at, tl.max(tl.abs(v), 0))


@triton.jit
def _less_offset(x, offset_ptr, T):
    """This program's (64, 128) block less its head's offset; rows past T stay zeros."""
    flat = tl.program_id(0).to(tl.int64)
    offset = tl.load(offset_ptr + flat * _DIM + tl.arange(0, _DIM))
    inside = (tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK) < T)[:, None]
    return tl.where(inside, x - offset[None, :], 0.0)


@triton.jit
def _read_means(x_ptr, flat, group, NT):
    """(64, 128) FP32 block means of one group of a head, zeros past NT."""
    block = group * _BLOCK + tl.arange(0, _BLOCK)
    inside = (block < NT)[:, None]
    at = x_ptr + (flat * NT + block[:, None]) * _DIM + tl.arange(0, _DIM)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _read_columns(x_ptr, start, channel, NT, other):
    """(64, width) FP32 values of 64 blocks of one head, ``other`` past NT."""
    block = start + tl.arange(0, _BLOCK)
    at = x_ptr + block[:, None] * _DIM + channel[None, :]
    return tl.load(at, mask=(block < NT)[:, None], other=other).to(tl.float32)


@triton.jit(do_not_specialize=["NT"])
def _value_scales(v_reach_ptr, v_scale_ptr, NT, WIDTH: tl.constexpr):
    """V's scales, from its largest magnitudes in every block. Grid (128 / WIDTH, B H)."""
    flat = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    reach = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, NT, _BLOCK):
        columns = _read_columns(v_reach_ptr + flat * NT * _DIM, start, channel, NT, 0.0)
        reach = tl.maximum(reach, tl.max(columns, 0))
    tl.store(v_scale_ptr + flat * _DIM + channel, _scale(reach))


@triton.jit(do_not_specialize=["T", "NT"])
def _corrected_offset(moved_ptr, v_offset_ptr, v_scale_ptr, out_ptr, T, NT, WIDTH: tl.constexpr):
    """Offset of V less what rounding added to V's mean. Grid (128 / WIDTH, B H)."""
    flat = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = flat * _DIM + channel
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, NT, _BLOCK):
        columns = _read_columns(moved_ptr + flat * NT * _DIM, start, channel, NT, 0.0)
        total += tl.sum(columns, 0)
    moved = tl.div_rn(total, T.to(tl.float32)) * tl.load(v_scale_ptr + at)
    tl.store(out_ptr + at, tl.load(v_offset_ptr + at) - moved)


@triton.jit(do_not_specialize=["NT"])
def _round_mean_keys(k_mean_ptr, mean_k8_ptr, mean_k_scale_ptr, NT):
    """Codes of 64 mean keys with one scale. Grid (B H, NG)."""
    flat = tl.program_id(0).to(tl.int64)
    mean = _read_means(k_mean_ptr, flat, tl.program_id(1), NT)
    _store_rounded_block(mean, mean_k8_ptr, mean_k_scale_ptr, tl.num_programs(1))


@triton.jit(do_not_specialize=["T", "NT"])
def _round_residual_keys(
    k_ptr,
    order_ptr,
    mean_k8_ptr,
    mean_k_scale_ptr,
    k8_ptr,
    k_scale_ptr,
    stride_b,
    stride_t,
    stride_h,
    T,
    NT,
    H,
    ORDERED: tl.constexpr,
):
    """Codes of K less the rounded mean of each block. Grid (B H, NT)."""
    flat = tl.program_id(0).to(tl.int64)
    groups = (NT + _BLOCK - 1) // _BLOCK
    row = flat * groups * _BLOCK + tl.program_id(1)
    scale = tl.load(mean_k_scale_ptr + flat * groups + tl.program_id(1) // _BLOCK)
    mean = tl.load(mean_k8_ptr + row * _DIM + tl.arange(0, _DIM)).to(tl.float32) * scale
    k = _read_block(k_ptr, order_ptr, stride_b, stride_t, stride_h, T, H, ORDERED)
    inside = (tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK) < T)[:, None]
    k = tl.where(inside, k - mean[None, :], 0.0)
    _store_rounded_block(k, k8_ptr, k_scale_ptr, NT)


@triton.jit
def _scaled_rows(
    v_ptr,
    order_ptr,
    stride_t,
    offset,
    block,
    slot,
    inv_scale,
    T,
    ORDERED: tl.constexpr,
    V_OFFSET: tl.constexpr,
    K32: tl.constexpr,
):
    """(16, 128) FP32 rows of the slots ``slot`` of a block, less the offset, times inv_scale."""
    place = block.to(tl.int64) * _BLOCK + (_token_of_slot(slot) if K32 else slot)
    token = place
    if ORDERED:
        token = tl.load(order_ptr + place, mask=place < T, other=0)
    at = v_ptr + token[:, None] * stride_t + tl.arange(0, _DIM)[None, :]
    v = tl.load(at, mask=(place < T)[:, None], other=0.0).to(tl.float32)
    if V_OFFSET:
        v = tl.where((place < T)[:, None], v - offset[None, :], 0.0)
    return v * inv_scale


@triton.jit
def _pack_and_sum(a, b, c, d):
    """E4M3 codes of four tensors as the bytes of an int32 tensor, first lowest; their FP32 sum; and how
    much more that is than the sum of the tensors."""
    if _INTERPRETED:
        exact = (a + b) + (c + d)
        a, b, c, d = (
            a.to(tl.float8e4nv),
            b.to(tl.float8e4nv),
            c.to(tl.float8e4nv),
            d.to(tl.float8e4nv),
        )
        total = (a.to(tl.float32) + b.to(tl.float32)) + (c.to(tl.float32) + d.to(tl.float32))
        packed = _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)
        return packed, total, total - exact
    else:
        return tl.inline_asm_elementwise(
            _PACK_AND_SUM,
            "=&r,=&f,=&f,f,f,f,f",
            [a, b, c, d],
            dtype=(tl.int32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _byte(code):
    return code.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["T", "NT"])
def _round_values(
    v_ptr,
    order_ptr,
    v_offset_ptr,
    v_scale_ptr,
    v8_ptr,
    mean_v8_ptr,
    moved_ptr,
    stride_b,
    stride_t,
    stride_h,
    T,
    NT,
    H,
    ORDERED: tl.constexpr,
    V_OFFSET: tl.constexpr,
    MOVED: tl.constexpr,
    K32: tl.constexpr,
):
    """Codes of V, tokens contiguous, and codes of its block means. Grid (B H, NT).

    Four tokens of a channel make an int32 before anything moves between threads: turning 32-bit
    words around is much faster than turning bytes.
    """
    flat = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    channel = tl.arange(0, _DIM)
    word = tl.arange(0, _BLOCK // 4)
    head_ptr = v_ptr + (flat // H) * stride_b + (flat % H) * stride_h
    scale = tl.load(v_scale_ptr + flat * _DIM + channel)
    offset = scale
    if V_OFFSET:
        offset = tl.load(v_offset_ptr + flat * _DIM + channel)
    inv_scale = tl.div_rn(1.0, scale)[None, :]
    a = _scaled_rows(
        head_ptr, order_ptr, stride_t, offset, block, 4 * word, inv_scale, T, ORDERED, V_OFFSET, K32
    )
    b = _scaled_rows(
        head_ptr,
        order_ptr,
        stride_t,
        offset,
        block,
        4 * word + 1,
        inv_scale,
        T,
        ORDERED,
        V_OFFSET,
        K32,
    )
    c = _scaled_rows(
        head_ptr,
        order_ptr,
        stride_t,
        offset,
        block,
        4 * word + 2,
        inv_scale,
        T,
        ORDERED,
        V_OFFSET,
        K32,
    )
    d = _scaled_rows(
        head_ptr,
        order_ptr,
        stride_t,
        offset,
        block,
        4 * word + 3,
        inv_scale,
        T,
        ORDERED,
        V_OFFSET,
        K32,
    )
    packed, total, moved = _pack_and_sum(a, b, c, d)
    row = flat * _DIM + channel
    at = v8_ptr + row[:, None] * (NT * (_BLOCK // 4)) + block * (_BLOCK // 4) + word[None, :]
    tl.store(at, tl.trans(packed))
    if MOVED:
        tl.store(moved_ptr + _block_row(NT) * _DIM + channel, tl.sum(moved, 0))
    total = tl.sum(total, 0)
    groups = (NT + _BLOCK - 1) // _BLOCK
    mean = tl.div_rn(total, _length(T)).to(tl.float8e4nv)
    column = _slot_of_token(block) if K32 else block
    tl.store(mean_v8_ptr + row * (groups * _BLOCK) + column, mean)
