"""The public ops ``fp8_linear`` and ``quantize_rowwise``: checks, choice of a backend, custom ops.

The custom ops are what ``torch.compile`` sees. They are named explicitly because ComfyUI imports
this pack under a module name that is a file path.
"""

import torch

from .. import registry
from ..arch import device_facts
from .config import FP8LinearCall, FP8LinearStats, QuantizeCall, use_fast_accum
from .reference import E4M3, QuantizedRows

OP = "fp8_linear"
QUANTIZE_OP = "quantize_rowwise"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_linear(
    x: torch.Tensor | QuantizedRows,
    weight8: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    stats: FP8LinearStats | None = None,
) -> torch.Tensor:
    """A Linear over E4M3 operands: one scale for each row of ``x`` and each row of the weight.

    out = BF16((codes @ weight8^T) x_scale weight_scale + bias) (README.md).

    Args:
        x: (..., K) bfloat16, float16 or float32 of one dimension or more, any strides, quantised
            here from its own dtype; or QuantizedRows, the result of ``quantize_rowwise`` and of
            the ops that quantise what they produce, which several Linears can share.
        weight8: (N, K) float8_e4m3fn. weight_scale: (N,) or (N, 1) FP32.
        bias: (N,) or None; rounded to BF16, added in FP32.
        backend: "auto" or a name from ``list_linear_backends()``.
        out_dtype: of the result, bfloat16, float16 or float32; None for x's own, BF16 for quantised
            rows.
        stats: filled with what ran, if given.

    Returns:
        (..., N) in ``out_dtype``; values are rounded to BF16 either way. Contiguous. No rows in, no
        rows out.

    Raises:
        ValueError, TypeError: an argument no backend could take.
        BackendUnavailable: the named backend, or every backend, declines; says why.

    A row of ``x`` with NaN or an infinity comes out as NaN, whole; other rows are not touched. The
    backward pass is not defined.

    Accuracy: relative L2 against the unquantised product 3.7 % on normal data (README.md).
    """
    codes, x_scale = x if isinstance(x, QuantizedRows) else (x, None)
    out = _fp8_linear(codes, x_scale, weight8, weight_scale, bias, backend, out_dtype)
    if stats is not None:
        call = describe_linear(x, weight8)
        chosen, declined = registry.select(OP, call, backend)
        stats.backend, stats.declined = chosen.name, declined
        stats.fast_accum = chosen.name != "reference" and use_fast_accum(call.k)
    return out


def quantize_rowwise(
    x: torch.Tensor, *, backend: str = "auto", grid: float | None = None
) -> QuantizedRows:
    """E4M3 codes of ``x`` and one FP32 scale for each row (README.md).

    Args:
        x: (..., K) bfloat16, float16 or float32 of one dimension or more, any strides.
        backend: "auto" or a name; every backend gives the same bits.
        grid: the scale of E4M3 numbers that ``x`` already consists of, if it does: they keep
            their codes, because scales are then grid times a power of two.

    Returns:
        codes (..., K) and scale (..., 1). A row with NaN or an infinity has scale NaN and codes 0.

    Raises: as ``fp8_linear``.
    """
    return QuantizedRows(*_quantize_rowwise(x, grid, backend))


def list_linear_backends() -> tuple[str, ...]:
    """Backends of ``fp8_linear``, preferred first."""
    return registry.list_backends(OP)


def why_not_linear(call: FP8LinearCall, backend: str = "auto") -> str | None:
    """Why ``backend`` would decline ``call``; None if it would run. Touches no device.

    For "auto": the reasons of all backends, if every one of them declines.
    """
    return registry.why_not(OP, call, backend)


def choose_linear_backend(
    call: FP8LinearCall, backend: str = "auto", exclude: frozenset[str] = frozenset()
) -> tuple[str, dict[str, str]]:
    """Name of the backend that would compute ``call``, and why preferred ones declined.

    Raises BackendUnavailable (all reasons) if none would; ``exclude`` names backends to pass over.
    """
    return registry.choose(OP, call, backend, exclude)


def describe_linear(x: torch.Tensor | QuantizedRows, weight: torch.Tensor) -> FP8LinearCall:
    """The facts of a call on ``x`` and a weight (N, K), quantised or not."""
    x = x.codes if isinstance(x, QuantizedRows) else x
    n, k = weight.shape
    return FP8LinearCall(x.numel() // max(k, 1), n, k, x.dtype, device_facts(x.device))


def check_rows(x: torch.Tensor, x_scale: torch.Tensor | None = None) -> None:
    """Raise ValueError or TypeError for rows that no backend could accept."""
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}, need (..., K) with K at least 1")
    if x_scale is None:
        if x.dtype not in DTYPES:
            raise TypeError(
                f"x: got {x.dtype}, need bfloat16, float16 or float32, or QuantizedRows"
            )
        return
    if x.dtype != E4M3 or x_scale.dtype != torch.float32:
        raise TypeError(
            f"x: got codes of {x.dtype} and a scale of {x_scale.dtype}, need {E4M3} and float32"
        )
    if x_scale.shape != (*x.shape[:-1], 1) or x_scale.device != x.device:
        raise ValueError(
            f"x: got a scale of shape {tuple(x_scale.shape)} on {x_scale.device}, codes of shape "
            f"{tuple(x.shape)} on {x.device} need {(*x.shape[:-1], 1)} there"
        )


def check_weight(x, weight8, weight_scale, bias) -> None:
    """Raise ValueError or TypeError for a weight or bias that does not fit ``x``."""
    if weight8.dtype != E4M3 or weight_scale.dtype != torch.float32:
        raise TypeError(
            f"weight8: got {weight8.dtype} with a weight_scale of {weight_scale.dtype}, need "
            f"{E4M3} and float32"
        )
    if weight8.dim() != 2 or weight8.shape[0] < 1 or weight8.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight8: got shape {tuple(weight8.shape)}, need (N, {x.shape[-1]}): x has "
            f"{x.shape[-1]} columns"
        )
    n = weight8.shape[0]
    if tuple(weight_scale.shape) not in ((n,), (n, 1)):
        raise ValueError(
            f"weight_scale: got shape {tuple(weight_scale.shape)}, need ({n},) or ({n}, 1)"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, need ({n},)")
    for name, tensor in (("weight8", weight8), ("weight_scale", weight_scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, need x's {x.device}")


# Checks and the choice of a backend happen inside the ops, so that a compiled caller traces
# nothing but the op itself.
def _linear(x, x_scale, weight8, weight_scale, bias, backend, out_dtype=None):
    check_rows(x, x_scale)
    check_weight(x, weight8, weight_scale, bias)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype}, need bfloat16, float16 or float32")
    rows = x if x_scale is None else QuantizedRows(x, x_scale)
    chosen, _ = registry.select(OP, describe_linear(rows, weight8), backend)
    shape, out_dtype = (*x.shape[:-1], weight8.shape[0]), out_dtype or _out_dtype(x)
    if x.numel() == 0:  # CUDA's GEMM takes no empty operand
        return x.new_empty(shape, dtype=out_dtype)
    flat = x.reshape(-1, x.shape[-1])
    if x_scale is None:
        quantized = registry.loaded(registry.get(QUANTIZE_OP, chosen.name))(
            contiguous_rows(flat), None
        )
    else:
        quantized = QuantizedRows(flat.contiguous(), x_scale.reshape(-1, 1).contiguous())
    out = registry.loaded(chosen)(quantized, weight8, weight_scale, bias)
    return out.to(out_dtype).view(shape)


def _quantize(x, grid, backend):
    check_rows(x)
    if grid is not None and not 0.0 < grid < float("inf"):
        raise ValueError(f"grid: got {grid}, need a finite number above 0")
    columns = x.shape[-1]
    call = QuantizeCall(x.numel() // columns, columns, x.dtype, device_facts(x.device))
    chosen, _ = registry.select(QUANTIZE_OP, call, backend)
    if x.numel() == 0:
        return _fake_quantize(x, grid, backend)
    codes, scale = registry.loaded(chosen)(contiguous_rows(x.reshape(-1, columns)), grid)
    return codes.view(x.shape), scale.view(*x.shape[:-1], 1)


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (M, K) with neighbours of a row side by side; a copy only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _out_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == E4M3 else x.dtype


_fp8_linear = torch.library.custom_op(
    "hopper_sol::fp8_linear",
    _linear,
    mutates_args=(),
    schema="(Tensor x, Tensor? x_scale, Tensor weight8, Tensor weight_scale, Tensor? bias, "
    "str backend, ScalarType? out_dtype=None) -> Tensor",
)
_quantize_rowwise = torch.library.custom_op(
    "hopper_sol::quantize_rowwise",
    _quantize,
    mutates_args=(),
    schema="(Tensor x, float? grid, str backend) -> (Tensor codes, Tensor scale)",
)


@_fp8_linear.register_fake
def _fake_linear(x, x_scale, weight8, weight_scale, bias, backend, out_dtype=None):
    return x.new_empty((*x.shape[:-1], weight8.shape[0]), dtype=out_dtype or _out_dtype(x))


@_quantize_rowwise.register_fake
def _fake_quantize(x, grid, backend):
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
