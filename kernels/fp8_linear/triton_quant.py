"""Row quantisation in one pass over memory: a program keeps a row in registers between its two steps.

First the row is read, in pieces of 16 bytes a thread, and the largest magnitude is found; then the
pieces are scaled, converted and written. GELU and SwiGLU happen on the way in. Same bits as the
reference: the same FP32 products, a correctly rounded reciprocal, and the hardware's
round-to-nearest-even conversion. No clamp: a scale makes at most 448 (1 + 2^-7), and everything
below 464 rounds to 448 or less.
"""

import os

import torch
import triton
import triton.language as tl

from .config import GELU, SWIGLU
from .reference import AMAX_FLOOR, E4M3, E4M3_MAX, GRID_SLACK, QuantizedRows

_FLOOR = tl.constexpr(AMAX_FLOOR)
_INV_MAX = tl.constexpr(1.0 / E4M3_MAX)
_SLACK = tl.constexpr(GRID_SLACK)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_NONE = tl.constexpr("")
_SWIGLU = tl.constexpr(SWIGLU)
# 2^(_EXPONENT x) is exp(-x); 2^(x (_LINEAR + _CUBIC x^2)) is exp(-2 u) for GELU's
# u = (2 / pi)^(1/2) (x + 0.044715 x^3), and (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)).
_EXPONENT = tl.constexpr(-1.4426950408889634)
_LINEAR = tl.constexpr(-2.302208198144325)
_CUBIC = tl.constexpr(-2.302208198144325 * 0.044715)


@triton.jit
def load_row(x_ptr, columns, PART: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr):
    """A row as PARTS vectors of PART values, zeros behind its end. All reads before anything else,
    so that they are under way together."""
    column = tl.arange(0, PART)
    parts = ()
    for i in tl.static_range(PARTS):
        at = i * PART + column
        if EVEN or i < PARTS - 1:
            parts += (tl.load(x_ptr + at),)
        else:
            parts += (tl.load(x_ptr + at, mask=at < columns, other=0.0),)
    return parts


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """FP32 ``x`` in ``dtype``, to nearest even.

    Two values an instruction. Left to itself the compiler converts one at a time, on the unit that
    exp2 needs as well; and it merges a rounded product and a sum into one operation, which drops
    the rounding.
    """
    if dtype == tl.float32:
        return x
    elif _INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def widened(x):
    """``x`` in FP32; of BF16 in one instruction a value, where the compiler takes up to two."""
    if x.dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",  # the first result is written while the operand is still needed
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bits of FP32, or of x's 16-bit dtype: they order as the values do, infinities
    and NaN above all others."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def larger_magnitude(largest, x):
    """Elementwise maximum of ``largest`` and |x|, FP32, NaN if one is."""
    return tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_from_bits(bits, dtype: tl.constexpr):
    """FP32 of one of ``magnitude_bits`` of values of ``dtype``."""
    if dtype == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def row_magnitude(largest, dtype: tl.constexpr):
    """The largest of ``larger_magnitude`` in ``dtype``: rounding keeps order, so it is that of the
    rounded values."""
    bits = tl.max(magnitude_bits(largest), 0)
    return magnitude_from_bits(bits, tl.float32).to(dtype).to(tl.float32)


@triton.jit
def row_scale(amax, grid, inv_grid, HAS_GRID: tl.constexpr):
    """The scale of a row whose largest magnitude is ``amax``, finite."""
    scale = tl.maximum(amax, _FLOOR) * _INV_MAX
    if HAS_GRID:
        exponent = (scale * inv_grid * _SLACK).to(tl.int32, bitcast=True)
        scale = ((exponent + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) * grid
    return scale


@triton.jit
def store_row(
    parts,
    amax,
    codes_ptr,  # of this row
    scale_ptr,  # of this row
    columns,
    grid,
    inv_grid,
    HAS_GRID: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write the codes of a row and its scale; of one that is not finite 0 and NaN."""
    column = tl.arange(0, PART)
    if amax <= _FLOAT_MAX:  # not NaN either
        scale = row_scale(amax, grid, inv_grid, HAS_GRID)
        inv_scale = tl.div_rn(1.0, scale)
        for i in tl.static_range(PARTS):
            at = i * PART + column
            inside = None if EVEN or i < PARTS - 1 else at < columns
            scaled = widened(parts[i]) * inv_scale
            tl.store(codes_ptr + at, scaled.to(tl.float8e4nv), mask=inside)
        tl.store(scale_ptr, scale)
    else:
        for start in range(0, columns, PART):
            at = start + column
            zeros = tl.zeros([PART], tl.float32).to(tl.float8e4nv)
            tl.store(codes_ptr + at, zeros, mask=at < columns)
        tl.store(scale_ptr, float("nan"))


@triton.jit
def _gelu_tanh(x):
    """FP32 to FP32."""
    # A reciprocal by way of the root: one instruction of the hardware, where "/" is six.
    root = tl.rsqrt(1.0 + tl.exp2(x * (_LINEAR + _CUBIC * (x * x))))
    return x * root * root


@triton.jit
def _silu(x):
    """FP32 to FP32."""
    root = tl.rsqrt(1.0 + tl.exp2(_EXPONENT * x))
    return x * root * root


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # (M, columns), or (M, 2 columns) for SwiGLU, rows row_stride elements apart
    codes_ptr,  # (M, columns) E4M3, contiguous
    scale_ptr,  # (M,) FP32
    columns,
    row_stride,
    grid,  # FP32, and its reciprocal; read if HAS_GRID
    inv_grid,
    HAS_GRID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PART: tl.constexpr,  # power of two: 16 bytes of x for every thread
    PARTS: tl.constexpr,  # PART PARTS is at least columns
    EVEN: tl.constexpr,  # ... and equal to it
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * row_stride
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    parts = load_row(x_row, columns, PART, PARTS, EVEN)
    if ACTIVATION == _NONE:
        # Bits of the values as they are read, which stay as narrow as they came.
        largest = tl.zeros([PART], tl.int32)
        for i in tl.static_range(PARTS):
            largest = tl.maximum(largest, magnitude_bits(parts[i]))
        amax = magnitude_from_bits(tl.max(largest, 0), dtype)
        outs = parts
    else:
        if ACTIVATION == _SWIGLU:
            ups = load_row(x_row + columns, columns, PART, PARTS, EVEN)
        largest = tl.zeros([PART], tl.float32)
        outs = ()
        for i in tl.static_range(PARTS):
            # An activation is rounded where the model rounds it.
            if ACTIVATION == _SWIGLU:
                out = widened(rounded(_silu(widened(parts[i])), dtype)) * widened(ups[i])
            else:
                out = _gelu_tanh(widened(parts[i]))
            largest = larger_magnitude(largest, out)
            outs += (rounded(out, dtype),)
        amax = row_magnitude(largest, dtype)
    store_row(
        outs,
        amax,
        codes_ptr + row * columns,
        scale_ptr + row,
        columns,
        grid,
        inv_grid,
        HAS_GRID,
        PART,
        PARTS,
        EVEN,
    )


def quantize_rowwise_triton(x: torch.Tensor, grid: float | None = None) -> QuantizedRows:
    """As the reference, bit for bit. ``x`` (M, K) with M at least 1 and stride(-1) == 1."""
    return _launch(x, x.shape[1], "", grid)


def quantize_activation_triton(x: torch.Tensor, activation: str) -> QuantizedRows:
    """As ``quantize_activation_reference``, but FP32 steps before a rounding may differ.

    ``x`` (M, K), (M, 2 K) for SwiGLU, with M at least 1 and stride(-1) == 1.
    """
    columns = x.shape[1] // 2 if activation == SWIGLU else x.shape[1]
    return _launch(x, columns, activation, None)


def _launch(x, columns, activation, grid):
    rows = x.shape[0]
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    part, parts, warps = launch_shape(columns, x.element_size(), activation)
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever x is on
        _quantize_rows_kernel[(rows,)](
            x,
            codes,
            scale,
            columns,
            x.stride(0),
            1.0 if grid is None else grid,
            1.0 if grid is None else 1.0 / grid,
            HAS_GRID=grid is not None,
            ACTIVATION=activation,
            PART=part,
            PARTS=parts,
            EVEN=part * parts == columns,
            num_warps=warps,
        )
    return QuantizedRows(codes, scale)


# Bytes of a row -> warps that share it. Few warps mean a cheap maximum and many rows in flight, until
# a thread has too much of its row to keep. Measured (README.md); between 2 and 8 it matters little,
# but an activation wants registers of its own.
_WARPS = {
    "": ((4096, 2), (16384, 4), (32768, 8)),
    GELU: ((4096, 2), (20480, 4), (32768, 8)),
    SWIGLU: ((4096, 2), (32768, 4)),
}
_MOST_WARPS = 16


def launch_shape(columns: int, itemsize: int, activation: str = "") -> tuple[int, int, int]:
    """(PART, PARTS, warps) for rows of ``columns`` values; nothing depends on the number of rows."""
    size = columns * itemsize
    warps = next((warps for most, warps in _WARPS[activation] if size <= most), _MOST_WARPS)
    return split(columns, itemsize, warps)


def split(columns: int, itemsize: int, warps: int) -> tuple[int, int, int]:
    """(PART, PARTS, warps): a row in pieces of 16 bytes for every thread."""
    part = 32 * warps * (16 // itemsize)
    return part, -(-columns // part), warps
