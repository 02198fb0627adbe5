"""Row quantisation in one pass: a program reads a row, finds its scale and writes its codes.

Same bits as the reference: the same FP32 products, a correctly rounded reciprocal, and the
hardware's round-to-nearest-even conversion after a clamp.
"""

import torch
import triton
import triton.language as tl

from .reference import AMAX_FLOOR, E4M3, E4M3_MAX, GRID_SLACK, QuantizedRows

_FLOOR = tl.constexpr(AMAX_FLOOR)
_MAX = tl.constexpr(E4M3_MAX)
_INV_MAX = tl.constexpr(1.0 / E4M3_MAX)
_SLACK = tl.constexpr(GRID_SLACK)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # (M, columns), rows row_stride elements apart
    codes_ptr,  # (M, columns) E4M3, contiguous
    scale_ptr,  # (M,) FP32
    columns,
    row_stride,
    grid,  # FP32, and its reciprocal; read if HAS_GRID
    inv_grid,
    HAS_GRID: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least columns
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    size = tl.abs(x)
    # A maximum may pass over NaN, so finiteness is counted apart; NaN fails every comparison.
    finite = tl.sum((size <= _FLOAT_MAX).to(tl.int32), 0) == BLOCK
    scale = tl.maximum(tl.max(size, 0), _FLOOR) * _INV_MAX
    if HAS_GRID:
        bits = (scale * inv_grid * _SLACK).to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = power * grid
    scaled = tl.where(finite, x, 0.0) * tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(scaled, -_MAX), _MAX)
    tl.store(codes_ptr + row * columns + column, scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")))


def quantize_rowwise_triton(x: torch.Tensor, grid: float | None = None) -> QuantizedRows:
    """As the reference, bit for bit. ``x`` (M, K) with M at least 1 and stride(-1) == 1."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block, warps = launch_shape(columns)
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
            BLOCK=block,
            num_warps=warps,
        )
    return QuantizedRows(codes, scale)


def launch_shape(columns: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of ``columns`` values; nothing depends on the number of rows."""
    block = max(16, triton.next_power_of_2(columns))
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16
