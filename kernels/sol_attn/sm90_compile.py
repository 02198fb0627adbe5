"""Compile one variant of the SM90 Sol-Attn kernel for tensors that are not there yet."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import HEAD_DIM
from .sm90_kernel import SolAttnSm90
from .sm90_variant import Variant


def compile_variant(variant: Variant, options: str = "--enable-tvm-ffi"):
    """The callable of ``SolAttnSm90`` for torch tensors; needs no GPU. See there for arguments."""
    dtype = cutlass.Uint8 if variant.fp8 else cutlass.BFloat16
    per_16_bytes = 16 if variant.fp8 else 8  # TMA wants strides of whole 16 bytes
    heads, batches = cute.sym_int32(), cute.sym_int32()

    def stride():
        return cute.sym_int64(divisibility=per_16_bytes)

    def rows():  # (rows, channels, H, B)
        shape = (cute.sym_int32(), HEAD_DIM, heads, batches)
        return make_fake_tensor(dtype, shape, (stride(), 1, stride(), stride()), assumed_align=16)

    def values():  # (channels, rows, H, B)
        shape = (HEAD_DIM, cute.sym_int32(), heads, batches)
        strides = (stride(), 1) if variant.fp8 else (1, stride())
        return make_fake_tensor(dtype, shape, (*strides, stride(), stride()), assumed_align=16)

    def per_head(dtype=Float32):  # (count, B H), or a placeholder
        return make_fake_tensor(
            *(dtype, (cute.sym_int32(), cute.sym_int32()), (1, cute.sym_int64())), assumed_align=4
        )

    words = make_fake_tensor(
        Int32,
        (cute.sym_int32(), cute.sym_int32(), cute.sym_int32()),
        (1, cute.sym_int64(), cute.sym_int64()),
        assumed_align=4,
    )
    out = make_fake_tensor(
        cutlass.BFloat16,
        (HEAD_DIM, heads, cute.sym_int32(), cute.sym_int32()),
        (1, *(cute.sym_int64(divisibility=8) for _ in range(3))),
        assumed_align=16,
    )
    order = make_fake_tensor(cutlass.Int64, (cute.sym_int32(),), (1,), assumed_align=8)
    counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
    return cute.compile(
        SolAttnSm90(variant),
        *(rows(), rows(), values(), rows(), values()),
        *(per_head() for _ in range(5)),
        *(words, per_head(), order, out, per_head(), per_head(Int32), counter),
        *(Float32(0.1), Float32(6.0), Int32(1), Int32(1), Int32(0), Int32(1)),
        make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options),
        options=options,
    )
