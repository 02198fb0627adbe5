"""A whole Wan block without its attention: the Linears in the company they keep.

Norms, modulations, GELU and residuals run as ComfyUI's model has them, all tokens with one row of
the modulation. Left out: both attentions and the rotary embedding of q and k. The value stands in
for the output of self-attention, the query for that of cross-attention.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import gelu, layer_norm, linear, rms_norm

from ...fp8_linear import fp8_linear, quantize_gelu, quantize_norm, quantize_rowwise
from .fp8_producers import LAYER_EPS, modulated

QK_EPS = 1e-6
FP8 = "fp8"


class Computation(Protocol):
    """How the parts of a block that touch a Linear are computed."""

    def norm(self, x, scale, shift) -> Any:
        """Norm and modulation of x: what ``linear`` takes, several times if need be."""

    def gelu(self, x) -> Any:
        """GELU of x, as above."""

    def linear(self, x, name: str) -> torch.Tensor:
        """Linear ``name`` of a tensor, or of what the two above made."""


class Weights:
    """BF16 Linears, norms and modulation of one block.

    Attributes:
        linears: name -> (weight (N, K), bias (N,)).
        modulation: (6, hidden): shift, scale and gate of self-attention, then of the feed-forward.
    """

    def __init__(self, hidden: int, inner: int, draw: Callable[..., torch.Tensor]):
        square = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o")
        shapes = dict.fromkeys(square, (hidden, hidden))
        shapes.update(up=(inner, hidden), down=(hidden, inner))
        self.linears = {
            name: (draw((n, k), k**-0.5), draw((n,), 0.1)) for name, (n, k) in shapes.items()
        }
        self.modulation = draw((6, hidden), 0.3)
        names = ("norm_q", "norm_k", "norm_cross_q", "norm_cross_k", "norm3", "norm3_bias")
        self.norms = {name: draw((hidden,), 0.3).add_(1) for name in names}


def run_block(
    x: torch.Tensor, context: torch.Tensor, weights: Weights, compute: Computation
) -> list[torch.Tensor]:
    """The block's results for x (M, hidden) and context (C, hidden), in x's dtype.

    Returns: q and k of self-attention, k and v of cross-attention, what the two attentions and the
    feed-forward add to x before their gates, and the new x.
    """
    shift1, scale1, gate1, shift2, scale2, gate2 = weights.modulation.to(x.dtype).unsqueeze(1)
    norms = {name: vector.to(x.dtype) for name, vector in weights.norms.items()}

    def normed(y, name):
        return rms_norm(y, y.shape[-1:], norms[name], eps=QK_EPS)

    rows = compute.norm(x, scale1, shift1)
    q = normed(compute.linear(rows, "q"), "norm_q")
    k = normed(compute.linear(rows, "k"), "norm_k")
    v = compute.linear(rows, "v")
    added = compute.linear(v, "o")
    out = torch.addcmul(x, added, gate1)

    y = layer_norm(out, out.shape[-1:], norms["norm3"], norms["norm3_bias"], eps=LAYER_EPS)
    cross_q = normed(compute.linear(y, "cross_q"), "norm_cross_q")
    cross_k = normed(compute.linear(context, "cross_k"), "norm_cross_k")
    cross_v = compute.linear(context, "cross_v")
    cross_added = compute.linear(cross_q, "cross_o")
    out = out + cross_added

    inner = compute.linear(compute.norm(out, scale2, shift2), "up")
    ffn_added = compute.linear(compute.gelu(inner), "down")
    out = torch.addcmul(out, ffn_added, gate2)
    return [q, k, cross_k, cross_v, added, cross_added, ffn_added, out]


class Plain:
    """As the model: in the dtype of its input."""

    def __init__(self, weights: Weights, linear_=linear):
        self.weights, self._linear = weights, linear_

    def norm(self, x, scale, shift):
        return modulated(x, scale, shift)

    def gelu(self, x):
        return gelu(x, approximate="tanh")

    def linear(self, x, name):
        weight, bias = self.weights.linears[name]
        return self._linear(x, weight.to(x.dtype), bias.to(x.dtype))


class Quantized:
    """In FP8; norms and GELU fused with quantisation, or before it."""

    def __init__(self, weights: Weights, backend: str, fused: bool):
        self.backend, self.fused = backend, fused
        self._linears = {
            name: (*quantize_rowwise(weight, backend=backend), bias)
            for name, (weight, bias) in weights.linears.items()
        }

    def norm(self, x, scale, shift):
        if self.fused:
            return quantize_norm(x, eps=LAYER_EPS, scale=scale, shift=shift, backend=self.backend)
        return quantize_rowwise(modulated(x, scale, shift), backend=self.backend)

    def gelu(self, x):
        return quantize_gelu(x, backend=self.backend) if self.fused else gelu(x, approximate="tanh")

    def linear(self, x, name):
        return fp8_linear(x, *self._linears[name], backend=self.backend)
