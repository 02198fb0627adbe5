"""Row quantisation, fused or not, by PyTorch alone and in a bounded amount of memory.

As the references, bit for bit, a group of rows at a time.
"""

from collections.abc import Callable

import torch

from .config import SWIGLU, NormSettings
from .fused_reference import (
    modulation_rows,
    quantize_activation_reference,
    quantize_norm_reference,
)
from .reference import E4M3, QuantizedRows, quantize_rowwise_reference

# FP32 values of this many elements exist at a time: 256 MiB each.
_CHUNK = 2**26


def quantize_rowwise_torch(x: torch.Tensor, grid: float | None = None) -> QuantizedRows:
    """``x`` (M, K)."""
    return _by_groups(x, x.shape[1], lambda rows: quantize_rowwise_reference(x[rows], grid))


def quantize_activation_torch(x: torch.Tensor, activation: str) -> QuantizedRows:
    """``x`` (M, K), (M, 2 K) for SwiGLU."""
    columns = x.shape[1] // 2 if activation == SWIGLU else x.shape[1]
    return _by_groups(x, columns, lambda rows: quantize_activation_reference(x[rows], activation))


def quantize_norm_torch(
    x: torch.Tensor,
    settings: NormSettings,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mod_row: torch.Tensor | None,
) -> QuantizedRows:
    """Arguments as ``norm_reference``."""
    index = None if scale is None else modulation_rows(x.shape[0], scale, mod_row)

    def group(rows: slice) -> QuantizedRows:
        part = None if index is None else index[rows]
        return quantize_norm_reference(x[rows], settings, weight, bias, scale, shift, part)

    return _by_groups(x, x.shape[1], group)


def _by_groups(
    x: torch.Tensor, columns: int, group: Callable[[slice], QuantizedRows]
) -> QuantizedRows:
    """(M, columns) codes and their scales from ``group`` of every few rows of ``x`` (M, ...)."""
    rows = x.shape[0]
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    step = max(1, _CHUNK // x.shape[1])
    for start in range(0, rows, step):
        part = group(slice(start, start + step))
        codes[start : start + step] = part.codes
        scale[start : start + step] = part.scale
    return QuantizedRows(codes, scale)
