"""The specification of what is fused with row quantisation: norm and modulation, GELU, SwiGLU.

Everything is computed in FP32 and rounded to x's dtype exactly where a model that runs in that dtype
rounds. What is quantised is therefore what the model's own Linear would have been given.

    GELU      h = r(x (1 + tanh(u)) / 2),  u = (2 / pi)^(1/2) (x + 0.044715 x^3)
    SwiGLU    h = r(r(silu(gate)) up),  gate and up the first and the second half of x
    norm      n = r((x - mean) (var + eps)^(-1/2) weight + bias)
              or  r(x (mean square + eps)^(-1/2) weight + bias)
    modulated h = r(n r(1 + scale) + shift), or r(r(n r(1 + scale)) + shift) with round_product

r rounds to x's dtype. With scale_has_one, r(1 + scale) is given in place of scale.
"""

import torch

from .config import GELU, RMS_NORM, NormSettings
from .reference import QuantizedRows, quantize_rowwise_reference


def activation_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """(..., K) in x's dtype: ``activation``, GELU or SWIGLU, of x (..., K) or (..., 2 K)."""
    if activation == GELU:
        return torch.nn.functional.gelu(x.float(), approximate="tanh").to(x.dtype)
    gate, up = x.chunk(2, dim=-1)
    gate = torch.nn.functional.silu(gate.float()).to(x.dtype)
    return (gate.float() * up.float()).to(x.dtype)


def norm_reference(
    x: torch.Tensor,
    settings: NormSettings,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mod_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, K) in x's dtype: x normalised over its columns, then modulated.

    Args:
        x: (M, K) bfloat16, float16 or float32; all others in the same dtype.
        settings: which norm, its eps, and how the modulation is given and rounded.
        weight, bias: (K,) or None.
        scale, shift: (R, K), both or neither.
        mod_row: (M,) integers, the row of scale and shift for each row of x; None if R divides M
            and M / R neighbours share one.
    """
    y = x.float()
    if settings.kind != RMS_NORM:
        y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + settings.eps).rsqrt()
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype)
    if scale is None:
        return y
    index = modulation_rows(x.shape[0], scale, mod_row)
    factor = scale if settings.scale_has_one else (1.0 + scale.float()).to(x.dtype)
    factor = factor[index]
    product = y.float() * factor.float()
    if settings.round_product:
        product = product.to(x.dtype).float()
    return (product + shift[index].float()).to(x.dtype)


def modulation_rows(
    rows: int, scale: torch.Tensor, mod_row: torch.Tensor | None = None
) -> torch.Tensor:
    """(rows,) integers: the row of ``scale`` (R, K) for each row of x."""
    if mod_row is not None:
        return mod_row
    return torch.arange(rows, device=scale.device) // (rows // scale.shape[0])


def quantize_activation_reference(x: torch.Tensor, activation: str) -> QuantizedRows:
    """E4M3 codes and a scale for each row of ``activation_reference``."""
    return quantize_rowwise_reference(activation_reference(x, activation))


def quantize_norm_reference(
    x: torch.Tensor,
    settings: NormSettings,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mod_row: torch.Tensor | None = None,
) -> QuantizedRows:
    """E4M3 codes and a scale for each row of ``norm_reference``."""
    return quantize_rowwise_reference(
        norm_reference(x, settings, weight, bias, scale, shift, mod_row)
    )
