"""The interpreter rounds and multiplies as the hardware does, once repaired."""

import pytest
import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn


@triton.jit
def _round_trip(x_ptr, e4m3_ptr, bf16_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(e4m3_ptr + at, x.to(tl.float8e4nv))
    tl.store(bf16_ptr + at, x.to(tl.bfloat16))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + row * N + column)
    b = tl.load(b_ptr + row * N + column)
    tl.store(out_ptr + row * N + column, tl.dot(a, b))


@triton.jit
def _bf16_sum(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x + x)


def every_code_and_midpoint():
    """All finite E4M3 values, the ties between neighbours, and what saturates."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = codes[~codes.isnan()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e6, -1e6, float("inf"), float("-inf")])
    values = torch.cat([codes, ties, beyond, torch.tensor([float("nan"), 0.1237, -0.0])])
    return torch.cat([values, torch.zeros(1024 - values.numel())])


def test_conversions_round_to_nearest_even_and_saturate():
    x = every_code_and_midpoint()
    e4m3, bf16 = torch.empty(1024, dtype=E4M3), torch.empty(1024, dtype=torch.bfloat16)
    _round_trip[(1,)](x, e4m3, bf16, 1024)
    assert torch.equal(
        e4m3.float().nan_to_num(-1e9), x.clamp(-448, 448).to(E4M3).float().nan_to_num(-1e9)
    )
    assert e4m3.float().isnan().sum() == 1
    x = torch.randn(1024)
    _round_trip[(1,)](x, e4m3, bf16, 1024)
    assert torch.equal(bf16, x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_dot_multiplies_values(dtype):
    a, b = (
        torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1)
    )
    out = torch.empty(32, 32)
    _product[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_arithmetic_on_bit_patterns_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="widen to float32"):
        _bf16_sum[(1,)](x, torch.empty_like(x), 16)
