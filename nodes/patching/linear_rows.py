"""Weights as E4M3 codes with one FP32 scale for each row, made and undone a few rows at a time.

Rows do not depend on each other, so the pieces give the same bits as the whole, and no step holds
more than a small part of a weight in FP32.
"""

import logging

import torch

from ...kernels import QuantizedRows, quantize_rowwise

log = logging.getLogger("hopper_sol")
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FP8 = (E4M3, torch.float8_e5m2)
# Elements that exist in FP32 at a time: 1 MiB a copy on the host, where they come on top of the
# weights; 64 MiB on a GPU, where a piece is a kernel launch.
_PIECE = {"cpu": 2**18, "cuda": 2**24}


def row_weight(
    weight: torch.Tensor, scale: torch.Tensor | None = None, device: torch.device | None = None
) -> QuantizedRows:
    """``weight`` (N, K) as codes (N, K) and scale (N, 1) on the device it lies on.

    E4M3 numbers keep their codes, whatever their scale; anything else is quantised by
    ``quantize_rowwise``.

    Args:
        weight: a float of any kind.
        scale: FP32 that the numbers of ``weight`` are multiples of: one for all, or one a row.
        device: where to compute; the weight's own if None.
    """
    rows, home = weight.shape[0], weight.device
    if weight.dtype == E4M3:
        each = row_scale(scale, rows).to(home)
        return QuantizedRows(weight.clone(memory_format=torch.contiguous_format), each)
    each = None if scale is None else row_scale(scale, rows)
    codes = torch.empty(weight.shape, dtype=E4M3, device=home)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=home)
    device = home if device is None else device
    for part in pieces(weight, device):
        values = weight[part].to(device)
        if values.dtype in FP8:
            values = values.float()
        if each is not None:
            values = values.float() * each[part].to(device)
        quantized = quantize_rowwise(values)
        codes[part] = quantized.codes.to(home)
        scales[part] = quantized.scale.to(home)
    return QuantizedRows(codes, scales)


def row_scale(scale: torch.Tensor | None, rows: int) -> torch.Tensor:
    """(rows, 1) FP32 of a stored scale: 1 for none, one for all, or one a row.

    Raises ValueError for scales of another granularity.
    """
    if scale is None:
        return torch.ones(rows, 1)
    if scale.numel() not in (1, rows):
        raise ValueError(
            f"weight_scale: got {tuple(scale.shape)} for {rows} rows, need one scale or one a row"
        )
    scale = scale.detach().to(torch.float32).reshape(-1, 1)
    return scale.expand(rows, 1).clone()


def plain_weight(weight: torch.Tensor, scale: torch.Tensor | None, dtype) -> torch.Tensor:
    """(N, K) in ``dtype``: the numbers that ``weight`` stands for under a stored ``scale``."""
    if scale is None:
        return weight.to(dtype)
    each = row_scale(scale, weight.shape[0]).to(weight.device)
    return dequantize_rows(weight, each, dtype)


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype) -> torch.Tensor:
    """(N, K) in ``dtype`` of codes (N, K) and scale (N, 1); multiplied in FP32, rounded once."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for part in pieces(codes, codes.device):
        out[part] = codes[part].float() * scale[part]
    return out


def stochastic_rows(weight: torch.Tensor, seed: int) -> QuantizedRows:
    """``weight`` (N, K) as rows whose codes are rounded up or down by chance, right on average.

    For a LoRA on top of numbers that are E4M3 already: a change by less than half a step is lost
    to the last bit by rounding to the nearest, and kept on average over a row by this.

    Args:
        seed: the same seed gives the same codes, on one kind of device.
    """
    codes = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    amax = weight.detach().abs().amax(-1, keepdim=True).float()
    # As quantize_rowwise: floor and product, and a row with NaN or an infinity stays non-finite.
    scale = amax.clamp(min=1e-12) * (1.0 / E4M3_MAX)
    finite = amax.isfinite()
    for index, part in enumerate(pieces(weight, weight.device)):
        values = torch.where(finite[part], weight[part].float() * (1.0 / scale[part]), 0.0)
        codes[part] = stochastic_codes(values.clamp_(-E4M3_MAX, E4M3_MAX), seed + index)
    return QuantizedRows(codes, scale.masked_fill(~finite, torch.nan))


def stochastic_codes(values: torch.Tensor, seed: int) -> torch.Tensor:
    """E4M3 of ``values``, FP32 within 448, each rounded up or down by chance."""
    from comfy.float import stochastic_rounding

    return stochastic_rounding(values, E4M3, seed=seed)


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """() FP32: the least power of two by which ``amax``, a () tensor, divides to 448 or less."""
    # mantissa in [0.5, 1): exactly 0.5 is a power of two itself.
    mantissa, exponent = torch.frexp(amax.double() / E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64, device=amax.device), exponent)
    return torch.where(amax > 0, scale, 1.0).float()


def pieces(weight: torch.Tensor, device: torch.device):
    """Slices of rows that are small enough to exist in FP32 beside the weight."""
    rows, columns = weight.shape[0], max(1, weight[:1].numel())
    step = max(1, _PIECE.get(device.type, _PIECE["cpu"]) // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)
