"""Public ops that quantise what they produce: ``quantize_norm``, ``quantize_gelu``, ``quantize_swiglu``.

Each takes the place of a pass over memory that a model makes anyway, and of the quantisation behind
it. Their results go to ``fp8_linear``.
"""

import math

import torch

from .. import registry
from ..arch import device_facts
from .config import GELU, LAYER_NORM, RMS_NORM, SWIGLU, NormSettings, QuantizeCall
from .op import DTYPES, contiguous_rows
from .reference import E4M3, QuantizedRows

NORM_OP = "quantize_norm"
ACTIVATION_OP = "quantize_activation"
_INTEGERS = (torch.int32, torch.int64)


def quantize_gelu(x: torch.Tensor, *, backend: str = "auto") -> QuantizedRows:
    """Row quantisation of GELU(x), tanh form, rounded to x's dtype first (README.md).

    Args:
        x: (..., K) bfloat16, float16 or float32 of one dimension or more, any strides.
        backend: "auto" or a name.

    Returns:
        codes (..., K) and scale (..., 1), as ``quantize_rowwise`` gives them. A row with NaN or an
        infinity in GELU(x) has scale NaN and codes 0.

    Raises: as ``fp8_linear``.
    """
    return QuantizedRows(*_quantize_activation(x, GELU, backend))


def quantize_swiglu(x: torch.Tensor, *, backend: str = "auto") -> QuantizedRows:
    """Row quantisation of silu(gate) up, both steps rounded to x's dtype (README.md).

    Args:
        x: (..., 2 K), gate in the first K columns and up in the last; else as ``quantize_gelu``.

    Returns: codes (..., K) and scale (..., 1), as ``quantize_gelu``. Raises: as ``fp8_linear``.
    """
    return QuantizedRows(*_quantize_activation(x, SWIGLU, backend))


def quantize_norm(
    x: torch.Tensor,
    *,
    kind: str = LAYER_NORM,
    eps: float = 1e-6,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mod_row: torch.Tensor | None = None,
    round_product: bool = False,
    scale_has_one: bool = False,
    backend: str = "auto",
) -> QuantizedRows:
    """Row quantisation of norm(x) (1 + scale) + shift, rounded where a model rounds (README.md).

    Args:
        x: (..., K) bfloat16, float16 or float32 of one dimension or more, any strides. All other
            floats have x's dtype.
        kind: "layer" for LayerNorm, "rms" for RMSNorm. eps: 0 or more.
        weight, bias: (K,) or None.
        scale, shift: of the modulation, (..., K) with R rows, both or neither.
        mod_row: for each row of x its row of scale and shift: int32 or int64 of x's leading
            shape, 0 .. R - 1 (not checked: that would wait for the device). None: R divides the
            rows of x, and that many neighbours share a row.
        round_product: round norm (1 + scale) before shift is added: a model that multiplies and
            adds in two operations (MiniMax-H3). False: one operation (Wan).
        scale_has_one: scale holds 1 + scale, as a model that hands both on has computed it.
        backend: "auto" or a name.

    Returns:
        codes (..., K) and scale (..., 1), as ``quantize_rowwise`` gives them. A row with NaN or an
        infinity has scale NaN and codes 0.

    Raises: as ``fp8_linear``.
    """
    return QuantizedRows(
        *_quantize_norm(
            x,
            weight,
            bias,
            scale,
            shift,
            mod_row,
            kind,
            float(eps),
            round_product,
            scale_has_one,
            backend,
        )
    )


def check_activation(x: torch.Tensor, activation: str) -> None:
    """Raise ValueError or TypeError for what no backend could take."""
    halves = _halves(activation)
    if x.dim() < 1 or x.shape[-1] < 1 or x.shape[-1] % halves:
        need = "(..., 2 K)" if halves == 2 else "(..., K)"
        raise ValueError(f"x: got shape {tuple(x.shape)}, need {need} with K at least 1")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got {x.dtype}, need bfloat16, float16 or float32")


def check_norm(x, weight, bias, scale, shift, mod_row, kind, eps) -> None:
    """Raise ValueError or TypeError for what no backend could take."""
    check_activation(x, "")
    if kind not in (LAYER_NORM, RMS_NORM):
        raise ValueError(f"kind: got {kind!r}, need {LAYER_NORM!r} or {RMS_NORM!r}")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps}, need a finite number, 0 or more")
    columns = x.shape[-1]
    floats = (("weight", weight), ("bias", bias), ("scale", scale), ("shift", shift))
    for name, tensor in floats:
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, need x's {x.dtype}")
    for name, tensor in (*floats, ("mod_row", mod_row)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, need x's {x.device}")
    for name, tensor in floats[:2]:
        if tensor is not None and tuple(tensor.shape) != (columns,):
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need ({columns},)")
    _check_modulation(x, scale, shift, mod_row)


def _check_modulation(x, scale, shift, mod_row) -> None:
    if (scale is None) != (shift is None):
        given = "scale" if shift is None else "shift"
        raise ValueError(f"scale and shift: got {given} alone, need both or neither")
    if scale is None:
        if mod_row is not None:
            raise ValueError("mod_row: got one without scale and shift, need all three or none")
        return
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor.dim() < 1 or tensor.shape[-1] != columns or tensor.numel() == 0:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need (..., {columns})")
    mods = scale.numel() // columns
    if shift.numel() != scale.numel():
        raise ValueError(
            f"shift: got {shift.numel() // columns} rows, need as many as scale, {mods}"
        )
    if mod_row is None:
        if rows % mods:
            raise ValueError(
                f"scale: got {mods} rows for {rows} rows of x, need a divisor of that, or mod_row"
            )
    elif mod_row.dtype not in _INTEGERS or mod_row.shape != x.shape[:-1]:
        raise ValueError(
            f"mod_row: got {mod_row.dtype} of shape {tuple(mod_row.shape)}, need int32 or int64 of "
            f"x's {tuple(x.shape[:-1])}"
        )


def _activate(x, activation, backend):
    check_activation(x, activation)
    if x.numel() == 0:
        return _fake_activation(x, activation, backend)
    flat = contiguous_rows(x.reshape(-1, x.shape[-1]))
    columns = x.shape[-1] // _halves(activation)
    codes, scale = _chosen(ACTIVATION_OP, flat, columns, backend)(flat, activation)
    return codes.view(*x.shape[:-1], columns), scale.view(*x.shape[:-1], 1)


def _norm(x, weight, bias, scale, shift, mod_row, kind, eps, round_product, scale_has_one, backend):
    check_norm(x, weight, bias, scale, shift, mod_row, kind, eps)
    if x.numel() == 0:
        return _empty(x, x.shape)
    columns = x.shape[-1]

    def table(tensor):
        return None if tensor is None else contiguous_rows(tensor.reshape(-1, columns))

    flat = table(x)
    codes, row_scale = _chosen(NORM_OP, flat, columns, backend)(
        flat,
        NormSettings(kind, eps, round_product, scale_has_one),
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        table(scale),
        table(shift),
        None if mod_row is None else mod_row.reshape(-1).contiguous(),
    )
    return codes.view(x.shape), row_scale.view(*x.shape[:-1], 1)


def _chosen(op: str, x: torch.Tensor, columns: int, backend: str):
    """The implementation for rows of ``columns`` results from x (M, ...)."""
    call = QuantizeCall(x.shape[0], columns, x.dtype, device_facts(x.device))
    return registry.loaded(registry.select(op, call, backend)[0])


def _halves(activation: str) -> int:
    """Columns of x for each column of the result."""
    return 2 if activation == SWIGLU else 1


def _empty(x, shape):
    codes = torch.empty(shape, dtype=E4M3, device=x.device)
    return codes, x.new_empty((*shape[:-1], 1), dtype=torch.float32)


_quantize_activation = torch.library.custom_op(
    "hopper_sol::quantize_activation",
    _activate,
    mutates_args=(),
    schema="(Tensor x, str activation, str backend) -> (Tensor codes, Tensor scale)",
)
_quantize_norm = torch.library.custom_op(
    "hopper_sol::quantize_norm",
    _norm,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "
    "Tensor? mod_row, str kind, float eps, bool round_product, bool scale_has_one, str backend) "
    "-> (Tensor codes, Tensor scale)",
)


@_quantize_activation.register_fake
def _fake_activation(x, activation, backend):
    return _empty(x, (*x.shape[:-1], x.shape[-1] // _halves(activation)))


@_quantize_norm.register_fake
def _fake_norm(x, *rest):
    return _empty(x, x.shape)
