"""PyTorch's own row-wise FP8 GEMM, and row quantisation in a bounded amount of memory."""

import torch

from .config import use_fast_accum
from .reference import E4M3, QuantizedRows, quantize_rowwise_reference

# FP32 values of this many elements exist at a time: 256 MiB each.
_CHUNK = 2**26


def quantize_rowwise_torch(x: torch.Tensor, grid: float | None = None) -> QuantizedRows:
    """As the reference, bit for bit, a group of rows at a time. ``x`` (M, K)."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = quantize_rowwise_reference(x[start : start + step], grid)
        codes[start : start + step] = part.codes
        scale[start : start + step] = part.scale
    return QuantizedRows(codes, scale)


def fp8_linear_scaled_mm(
    x: QuantizedRows,
    weight8: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(M, N) BF16. Operands as ``fp8_linear_reference``, ``x`` (M, K) with M at least 1."""
    return torch._scaled_mm(
        x.codes,
        weight8.contiguous().t(),  # the GEMM wants the second operand column-major
        scale_a=x.scale,
        scale_b=weight_scale.reshape(1, -1).contiguous(),
        bias=None if bias is None else bias.to(torch.bfloat16).contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum(x.codes.shape[1]),
    )
