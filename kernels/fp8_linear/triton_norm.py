"""LayerNorm or RMSNorm, a modulation and row quantisation in one pass over memory.

A program keeps its row in registers: read, reduced to mean and variance, normalised and modulated,
reduced to its largest magnitude, written as codes. Weight, bias, scale and shift are vectors that
all rows share, or many of them; they come from the caches.
"""

import torch
import triton
import triton.language as tl

from .config import LAYER_NORM, NormSettings
from .reference import E4M3, QuantizedRows
from .triton_quant import (
    larger_magnitude,
    load_row,
    rounded,
    row_magnitude,
    split,
    store_row,
    widened,
)


@triton.jit(do_not_specialize=["rows_each"])  # it follows from the number of rows
def _quantize_norm_kernel(
    x_ptr,  # (M, columns), rows row_stride elements apart
    weight_ptr,  # (columns,); read if HAS_WEIGHT, and so on
    bias_ptr,
    mod_scale_ptr,  # (R, columns), rows mod_scale_stride elements apart
    mod_shift_ptr,
    mod_row_ptr,  # (M,) rows of the two above
    codes_ptr,  # (M, columns) E4M3, contiguous
    scale_ptr,  # (M,) FP32
    columns,
    row_stride,
    mod_scale_stride,
    mod_shift_stride,
    rows_each,  # without mod_row: rows of x for each row of the modulation
    inv_columns,
    eps,
    CENTERED: tl.constexpr,  # LayerNorm
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MODULATION: tl.constexpr,
    HAS_MOD_ROW: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    SCALE_HAS_ONE: tl.constexpr,
    PART: tl.constexpr,  # power of two: 16 bytes of x for every thread
    PARTS: tl.constexpr,  # PART PARTS is at least columns
    EVEN: tl.constexpr,  # ... and equal to it
):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, PART)
    parts = load_row(x_ptr + row * row_stride, columns, PART, PARTS, EVEN)
    total = tl.zeros([PART], tl.float32)
    for i in tl.static_range(PARTS):
        total += widened(parts[i])
    mean = tl.sum(total, 0) * inv_columns if CENTERED else 0.0
    squares = tl.zeros([PART], tl.float32)
    for i in tl.static_range(PARTS):
        centered = widened(parts[i]) - mean
        if CENTERED and not (EVEN or i < PARTS - 1):
            centered = tl.where(i * PART + column < columns, centered, 0.0)
        squares += centered * centered
    inv_size = tl.rsqrt(tl.sum(squares, 0) * inv_columns + eps)

    if HAS_MODULATION:
        if HAS_MOD_ROW:
            mod_row = tl.load(mod_row_ptr + row).to(tl.int64)
        else:
            mod_row = row // rows_each
        mod_scale_ptr += mod_row * mod_scale_stride
        mod_shift_ptr += mod_row * mod_shift_stride
    outs = ()
    largest = tl.zeros([PART], tl.float32)
    for i in tl.static_range(PARTS):
        at = i * PART + column
        inside = None if EVEN or i < PARTS - 1 else at < columns
        other = None if EVEN or i < PARTS - 1 else 0.0
        y = (widened(parts[i]) - mean) * inv_size
        if HAS_WEIGHT:
            y *= widened(tl.load(weight_ptr + at, mask=inside, other=other))
        if HAS_BIAS:
            y += widened(tl.load(bias_ptr + at, mask=inside, other=other))
        if HAS_MODULATION:
            factor = widened(tl.load(mod_scale_ptr + at, mask=inside, other=other))
            if not SCALE_HAS_ONE:
                factor = widened(rounded(1.0 + factor, dtype))
            shift = widened(tl.load(mod_shift_ptr + at, mask=inside, other=other))
            y = widened(rounded(y, dtype)) * factor
            if ROUND_PRODUCT:
                y = widened(rounded(y, dtype))
            y += shift
        if not (EVEN or i < PARTS - 1):
            y = tl.where(inside, y, 0.0)
        largest = larger_magnitude(largest, y)
        outs += (rounded(y, dtype),)
    store_row(
        outs,
        row_magnitude(largest, dtype),
        codes_ptr + row * columns,
        scale_ptr + row,
        columns,
        1.0,
        1.0,
        False,
        PART,
        PARTS,
        EVEN,
    )


def quantize_norm_triton(
    x: torch.Tensor,
    settings: NormSettings,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mod_row: torch.Tensor | None,
) -> QuantizedRows:
    """As ``quantize_norm_reference``, but FP32 steps before a rounding may differ.

    Arguments as there; ``x`` (M, K) with M at least 1, stride(-1) == 1 for all.
    """
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    row_scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    part, parts, warps = norm_launch_shape(columns, x.element_size())
    modulated = scale is not None
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever x is on
        _quantize_norm_kernel[(rows,)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            scale if modulated else x,
            shift if modulated else x,
            x if mod_row is None else mod_row,
            codes,
            row_scales,
            columns,
            x.stride(0),
            scale.stride(0) if modulated else 0,
            shift.stride(0) if modulated else 0,
            rows // scale.shape[0] if modulated and mod_row is None else 1,
            1.0 / columns,
            settings.eps,
            CENTERED=settings.kind == LAYER_NORM,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_MODULATION=modulated,
            HAS_MOD_ROW=mod_row is not None,
            ROUND_PRODUCT=settings.round_product,
            SCALE_HAS_ONE=settings.scale_has_one,
            PART=part,
            PARTS=parts,
            EVEN=part * parts == columns,
            num_warps=warps,
        )
    return QuantizedRows(codes, row_scales)


# As in triton_quant.py. A maximum, a mean and a variance follow one another, each for all warps of a
# row: one warp where it holds the row.
_WARPS = ((3072, 1), (12288, 4), (32768, 8))
_MOST_WARPS = 16


def norm_launch_shape(columns: int, itemsize: int) -> tuple[int, int, int]:
    """(PART, PARTS, warps) for rows of ``columns`` values."""
    size = columns * itemsize
    warps = next((warps for most, warps in _WARPS if size <= most), _MOST_WARPS)
    return split(columns, itemsize, warps)
