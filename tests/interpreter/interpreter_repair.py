"""Make Triton's interpreter round BF16 and FP8 as a GPU does.

Triton 3.6's interpreter stores BF16 and FP8 as bare integers. What it then does with them differs
from the hardware, and ``apply`` replaces it:

* FP32 to E4M3 rounds without carrying into the exponent, wraps above 448 and loses NaN. The
  hardware rounds to nearest even and saturates (cvt.rn.satfinite).
* FP32 to BF16 cuts instead of rounding.
* ``tl.dot`` multiplies BF16 bit patterns as if they were integers.
* A scalar used as a loop bound is an array of one element, which NumPy 2.4 no longer takes for an
  integer.
* BF16 and FP8 arithmetic works on the bit patterns as well. It has no use in our kernels, which
  widen right after a load, so here it raises.

All conversions go through torch, whose CPU casts are compared with the hardware's in
``tests/gpu``.
"""

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_STORED_AS_INTEGERS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
_SATURATING = (tl.float8e4nv, tl.float8e5)
_ARITHMETIC = (
    *("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_frem", "create_fma"),
    *("create_precise_divf", "create_maxnumf", "create_minnumf", "create_maximumf"),
    *("create_minimumf", "create_clampf", "create_exp", "create_exp2", "create_sqrt"),
)


def apply() -> None:
    """Patch the interpreter of this process, once."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "rounds_like_hardware", False):
        return
    builder.rounds_like_hardware = True
    builder.cast_impl = _cast
    builder.create_fp_to_fp = lambda self, src, to, rounding_mode: _cast(self, src, to)
    builder.create_dot = _dot
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    for name in _ARITHMETIC:
        setattr(builder, name, _refusing(getattr(builder, name), name))


def _values(handle) -> torch.Tensor:
    """The handle's numbers as a torch tensor of its own type."""
    bits = np.ascontiguousarray(handle.data)
    dtype = handle.dtype.scalar
    as_bits = torch.from_numpy(bits.view(f"int{dtype.primitive_bitwidth}").copy())
    return as_bits.view(_TORCH[dtype])


def _cast(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source not in _TORCH or target not in _TORCH:
        if source in _STORED_AS_INTEGERS or target in _STORED_AS_INTEGERS:
            raise TypeError(f"{source} to {target}: not a conversion that the repair knows")
        data = src.data.astype(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, target)
    values = _values(src)
    if target in _SATURATING and source not in _SATURATING:
        limit = torch.finfo(_TORCH[target]).max
        values = values.float().clamp(-limit, limit)  # NaN stays NaN
    bits = values.to(_TORCH[target]).view(_BITS[target.primitive_bitwidth]).numpy()
    data = bits.view(interpreter._get_np_dtype(target)).reshape(src.data.shape)
    return interpreter.TensorHandle(data, target)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    def widened(handle):
        if handle.dtype.scalar in _STORED_AS_INTEGERS:
            return _values(handle).float().numpy()
        return handle.data

    product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _refusing(original, name):
    def call(self, *operands, **options):
        for operand in operands:
            dtype = getattr(operand, "dtype", None)
            if dtype is not None and dtype.scalar in _STORED_AS_INTEGERS:
                raise TypeError(f"{name} on {dtype.scalar}: widen to float32 right after the load")
        return original(self, *operands, **options)

    return call
