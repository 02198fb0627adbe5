"""Linears whose weight is kept in FP8, as custom ops: torch.compile sees one op for a layer.

Choosing a backend, counting and falling back happen when the op runs and not when it is traced.
"""

import torch

from ...kernels import QuantizedRows
from .linear_deferred import is_fusible
from .linear_rows import dequantize_rows, pieces
from .linear_run import compute_patched, compute_rows

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def stored_linear(x, codes, scale, bias=None, share: str = ""):
    """A Linear over codes (N, K) with scale (N, 1), as they are stored; x (..., K).

    share: see ``share_keys``.
    """
    # Outside of the op, which would have a pending tensor computed.
    forward = _stored if is_fusible(x) else _stored_linear
    return forward(x, codes, scale, bias, share)


def widened_linear(x, codes, scale, bias=None):
    """F.linear over the numbers that codes (N, K) and scale (N, 1) stand for, in x's dtype.

    A few rows of the weight are widened at a time. Not counted: it is no FP8 Linear.
    """
    return _widened_linear(x, codes, scale, bias)


def patched_rows_linear(x, weight, bias, seed: int, share: str = ""):
    """A Linear over a float weight (N, K) that LoRAs have been added to, rounded by ``seed``.

    The same numbers as a weight into which ComfyUI merged the LoRAs with that seed. A dtype that
    no FP8 Linear takes is computed as it is.
    """
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dtype not in _FLOATS:
        return torch.nn.functional.linear(x, weight, bias)
    forward = _patched if is_fusible(x) else _patched_rows_linear
    return forward(x, weight, bias, seed, share)


def _stored(x, codes, scale, bias, share):
    if x.dtype not in _FLOATS:
        raise TypeError(f"x: got {x.dtype}, need bfloat16, float16 or float32")
    return compute_rows(x, QuantizedRows(codes, scale), bias, share)


def _widened(x, codes, scale, bias):
    out = x.new_empty((*x.shape[:-1], codes.shape[0]))
    for part in pieces(codes, codes.device):
        weight = dequantize_rows(codes[part], scale[part], x.dtype)
        some = None if bias is None else bias[part]
        out[..., part] = torch.nn.functional.linear(x, weight, some)
    return out


def _patched(x, weight, bias, seed, share):
    return compute_patched(x, weight, bias, seed, share)


_stored_linear = torch.library.custom_op(
    "hopper_sol::stored_linear",
    _stored,
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias, str share) -> Tensor",
)
_widened_linear = torch.library.custom_op(
    "hopper_sol::widened_linear",
    _widened,
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias) -> Tensor",
)
_patched_rows_linear = torch.library.custom_op(
    "hopper_sol::patched_rows_linear",
    _patched,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int seed, str share) -> Tensor",
)


@_stored_linear.register_fake
@_widened_linear.register_fake
def _fake_stored(x, codes, *rest):
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@_patched_rows_linear.register_fake
def _fake_patched(x, weight, *rest):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
