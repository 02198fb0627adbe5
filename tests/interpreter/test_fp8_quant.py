"""Triton row quantisation against the specification: the same bits."""

import pytest
import torch
from sol_attn_cases import poisoned_memory

from hopper_sol.kernels.fp8_linear import quantize_rowwise
from hopper_sol.kernels.fp8_linear.reference import quantize_rowwise_reference
from hopper_sol.kernels.fp8_linear.triton_quant import launch_shape, quantize_rowwise_triton

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
E4M3 = torch.float8_e4m3fn


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bits(got, want):
    assert got.codes.dtype == E4M3 and got.codes.shape == want.codes.shape
    assert got.scale.dtype == torch.float32 and got.scale.shape == want.scale.shape
    assert torch.equal(got.scale.isnan(), want.scale.isnan())
    assert torch.equal(got.scale.nan_to_num(), want.scale.nan_to_num())
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 17])
@pytest.mark.parametrize("columns", [1, 16, 48, 1000, 1536, 8960, 13824])
def test_same_bits(rows, columns, dtype):
    x = normal(rows, columns, dtype=dtype)
    with poisoned_memory():
        got = quantize_rowwise_triton(x)
    assert_same_bits(got, quantize_rowwise_reference(x))


@pytest.mark.parametrize("rows", [1, 63, 65])
def test_rows_need_no_multiple(rows):
    x = normal(rows, 77, dtype=torch.bfloat16)
    with poisoned_memory():
        got = quantize_rowwise_triton(x)
    assert_same_bits(got, quantize_rowwise_reference(x))


def test_widest_row():
    x = normal(2, 32768, dtype=torch.bfloat16)
    assert_same_bits(quantize_rowwise_triton(x), quantize_rowwise_reference(x))


@pytest.mark.parametrize("amax", [448.0, 1.0, 0.3, 1.5, 3.40625])
def test_every_bf16_value_in_units_of_its_row(amax):
    """Values exactly between two codes included: BF16 has many.

    With the last two a quotient would give other codes than the product with a reciprocal.
    """
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    row = every[every.isfinite() & (every.abs() <= 448)].clamp(-amax, amax)
    row = row[: len(row) // 1024 * 1024].view(-1, 1024)
    row[:, 0] = amax
    assert_same_bits(quantize_rowwise_triton(row), quantize_rowwise_reference(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [1.0, 0.00731, 3.7e-5, 900.0])
def test_grid(dtype, grid):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    codes = codes[codes.isfinite()].expand(5, -1) * torch.tensor([[1.0], [0.5], [0.25], [2.0], [0]])
    x = (codes * grid).clamp(-60000, 60000).to(dtype)
    assert_same_bits(quantize_rowwise_triton(x, grid), quantize_rowwise_reference(x, grid))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grid", [None, 0.01])
def test_non_finite_rows(dtype, bad, grid):
    x = normal(6, 40, dtype=dtype)
    x[1, 3], x[4, 39], x[5] = bad, bad, bad
    got = quantize_rowwise_triton(x, grid)
    assert got.scale.flatten().isnan().tolist() == [False, True, False, False, True, True]
    assert_same_bits(got, quantize_rowwise_reference(x, grid))


def test_zero_tiny_and_huge_rows():
    x = normal(5, 48)
    x[0], x[1] = 0.0, x[1] * 1e-30
    x[2], x[3] = x[2] * 1e-10, x[3] * 1e37
    assert_same_bits(quantize_rowwise_triton(x), quantize_rowwise_reference(x))


def test_strided_rows_and_nothing_outside_is_read_or_written():
    storage = torch.full((7, 100), float("nan"))
    view = storage[:, 8:56]
    view.copy_(normal(7, 48))
    assert_same_bits(
        quantize_rowwise_triton(view[::2]), quantize_rowwise_reference(view[::2].contiguous())
    )


def test_the_registered_backend():
    """What the op calls with flattened rows."""
    from hopper_sol.kernels import registry

    x = normal(2, 3, 48, dtype=torch.bfloat16)
    backend = registry.get("quantize_rowwise", "triton")
    codes, scale = registry.loaded(backend)(x.reshape(-1, 48), None)
    want = quantize_rowwise(x, backend="reference")
    assert torch.equal(codes.view(2, 3, 48).float(), want.codes.float())
    assert torch.equal(scale.view(2, 3, 1), want.scale)


def test_launch_shape():
    for columns in (1, 48, 1536, 5120, 5376, 7168, 8960, 13824, 14336, 32768):
        for itemsize in (2, 4):
            part, parts, warps = launch_shape(columns, itemsize)
            assert part * itemsize == 512 * warps  # 16 bytes a thread
            assert part * (parts - 1) < columns <= part * parts
            assert parts * 16 <= 256  # bytes of a thread: 64 of its registers
