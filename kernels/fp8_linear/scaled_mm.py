"""PyTorch's own row-wise FP8 GEMM."""

import torch

from .config import use_fast_accum
from .reference import QuantizedRows


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
