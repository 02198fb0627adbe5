"""The specification of FP8 Linear: row-wise E4M3 operands, one FP32 sum, one rounding to BF16.

    amax_r  = max |x_r|
    scale_r = max(amax_r, AMAX_FLOOR) FP32(1 / 448)
    code_rc = E4M3(clamp(x_rc FP32(1 / scale_r), -448, 448))
    out_rn  = BF16((sum_c code_rc weight8_nc) scale_r weight_scale_n + BF16(bias_n))

Products with a constant and with a reciprocal, never quotients: BF16 inputs often land exactly
between two E4M3 codes, and a quotient that one device computes through a reciprocal would put them
on the other side there.
"""

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# A row of zeros still gets a usable scale. Far below anything a model holds, so that rows of small
# values keep their relative accuracy.
AMAX_FLOOR = 1e-12
# Dequantised BF16 values lie up to 2^-9 beside their grid; without this a row whose largest code is
# 448 could be taken for the next power of two and its smallest codes would be rounded.
GRID_SLACK = 1.0 - 2.0**-7


class QuantizedRows(NamedTuple):
    """Row-wise quantised values: x ~ codes scale.

    codes: (..., K) float8_e4m3fn, contiguous. scale: (..., 1) FP32, contiguous.
    """

    codes: torch.Tensor
    scale: torch.Tensor


def quantize_rowwise_reference(x: torch.Tensor, grid: float | None = None) -> QuantizedRows:
    """E4M3 codes of ``x`` with one scale for each row, computed in FP32.

    A row that holds NaN or an infinity gets scale NaN and codes 0: it stays non-finite as a whole
    and touches no other row.

    Args:
        x: (..., K) bfloat16, float16 or float32, any strides; K at least 1.
        grid: scale of E4M3 numbers that ``x`` already consists of, above 0. Scales are then grid
            times the least power of two that suffices, and such values keep their codes.
    """
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=AMAX_FLOOR) * (1.0 / E4M3_MAX)
    if grid is not None:
        scale = _next_power_of_two(scale * (1.0 / grid) * GRID_SLACK) * grid
    finite = amax.isfinite()
    codes = torch.where(finite, x * (1.0 / scale), 0.0).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return QuantizedRows(codes.contiguous(), scale.masked_fill(~finite, torch.nan))


def fp8_linear_reference(
    x: QuantizedRows,
    weight8: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(..., N) BF16 of the dequantised operands, summed in FP32.

    Args:
        x: activations, codes (..., K).
        weight8: (N, K) float8_e4m3fn.
        weight_scale: FP32, N elements.
        bias: (N,) or None; rounded to BF16.
    """
    out = torch.nn.functional.linear(x.codes.float(), weight8.float())
    out = out * x.scale * weight_scale.reshape(-1)
    if bias is not None:
        out = out + bias.to(torch.bfloat16).float()
    return out.to(torch.bfloat16)


def _next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two not below ``x``, for positive normal FP32."""
    # Any mantissa bit carries into the exponent; then the mantissa is cleared.
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
