"""What stands in front of a Linear in a model: as the model computes it, and fused with quantisation.

A producer takes x (M, width K) to the Linear's input (M, K), each row by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from ...fp8_linear import QuantizedRows, quantize_gelu, quantize_norm, quantize_swiglu

LAYER_EPS = 1e-6
RMS_EPS = 1e-5


@dataclass(frozen=True)
class Bound:
    """A producer with its vectors.

    Attributes:
        eager: x -> the Linear's input in x's dtype, operation by operation as ComfyUI's models do;
            of the first rows in FP32 it is the reference.
        fused: (x, backend) -> the same, quantised.
    """

    eager: Callable[[torch.Tensor], torch.Tensor]
    fused: Callable[[torch.Tensor, str], QuantizedRows]


@dataclass(frozen=True)
class Producer:
    """A kind of producer.

    Attributes:
        width: columns of its input for each column of its output.
        bind: (M, K, draw) -> Bound; ``draw(shape, size)`` makes BF16 normals of that size.
    """

    width: int
    bind: Callable[..., Bound]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Wan's norm: LayerNorm without weights, then one ``addcmul``."""
    scale, shift = scale.to(x.dtype), shift.to(x.dtype)
    return torch.addcmul(shift, layer_norm(x, x.shape[-1:], eps=LAYER_EPS), 1 + scale)


def _bind_gelu(_m, _k, _draw) -> Bound:
    return Bound(
        lambda x: gelu(x, approximate="tanh"),
        lambda x, backend: quantize_gelu(x, backend=backend),
    )


def _bind_swiglu(_m, _k, _draw) -> Bound:
    return Bound(swiglu, lambda x, backend: quantize_swiglu(x, backend=backend))


def _bind_wan_norm(_m, k, draw) -> Bound:
    """One row of scale and shift for all tokens."""
    scale, shift = draw((1, k), 0.3), draw((1, k), 0.3)

    def fused(x, backend):
        return quantize_norm(x, eps=LAYER_EPS, scale=scale, shift=shift, backend=backend)

    return Bound(lambda x: modulated(x, scale, shift), fused)


def _bind_h3_norm(m, k, draw) -> Bound:
    """RMSNorm with a weight; a product and a sum in place for each segment of tokens."""
    weight, scale, shift = draw((k,), 1.0), draw((3, k), 0.3), draw((3, k), 0.3)
    ends = (min(300, m), min(800, m), m)  # text, audio, video
    segments = tuple(zip((0, *ends[:-1]), ends, (2, 0, 1), strict=True))
    mod_row = torch.empty(m, dtype=torch.int32, device=weight.device)
    for start, end, row in segments:
        mod_row[start:end] = row

    def eager(x):
        h = rms_norm(x, (k,), weight.to(x.dtype), eps=RMS_EPS)
        for start, end, row in segments:
            h[start:end].mul_(1.0 + scale[row].to(x.dtype)).add_(shift[row].to(x.dtype))
        return h

    def fused(x, backend):
        return quantize_norm(
            x,
            kind="rms",
            eps=RMS_EPS,
            weight=weight,
            scale=scale,
            shift=shift,
            mod_row=mod_row,
            round_product=True,
            backend=backend,
        )

    return Bound(eager, fused)


PRODUCERS = {
    "gelu": Producer(1, _bind_gelu),
    "swiglu": Producer(2, _bind_swiglu),
    "wan_norm": Producer(1, _bind_wan_norm),
    "h3_norm": Producer(1, _bind_h3_norm),
}
