"""The specification of FP8 Linear: scales, codes, sums, and what rounding costs."""

import math

import pytest
import torch

from hopper_sol.kernels.fp8_linear.reference import (
    AMAX_FLOOR,
    E4M3,
    QuantizedRows,
    fp8_linear_reference,
    quantize_rowwise_reference,
)

BF16 = torch.bfloat16


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_code():
    """The 254 finite E4M3 values, as FP32."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    return values[values.isfinite()]


def dequantized(rows):
    return rows.codes.float() * rows.scale


def test_scale_is_amax_over_448():
    x = torch.tensor([[1.0, -448.0, 3.0], [0.5, 0.25, -0.125]])
    rows = quantize_rowwise_reference(x)
    # 448 FP32(1 / 448) rounds to 1, and a scale of 1 keeps what E4M3 can hold.
    assert rows.scale.tolist() == [[1.0], [0.5 * torch.tensor(1 / 448).item()]]
    assert rows.codes.float().tolist()[0] == [1.0, -448.0, 3.0]
    assert rows.codes.float().tolist()[1] == [448.0, 224.0, -112.0]


def test_codes_are_products_with_the_rounded_reciprocal():
    """BF16 values lie between two codes often enough that a quotient gives others."""
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    quotients_differ = 0
    for amax in torch.linspace(1.0, 1.99, 40).to(BF16):
        x = every[every <= amax]
        rows = quantize_rowwise_reference(x[None])
        scale = amax.float() * torch.tensor(1 / 448)
        products = (x.float() * (torch.tensor(1.0) / scale)).clamp(-448, 448).to(E4M3)
        assert rows.scale.item() == scale.item()
        assert torch.equal(rows.codes[0].view(torch.uint8), products.view(torch.uint8))
        quotients = (x.float() / scale).clamp(-448, 448).to(E4M3)
        quotients_differ += (quotients.float() != products.float()).sum().item()
    assert quotients_differ > 0


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_every_value_is_within_half_a_step(dtype):
    x = normal(50, 333).to(dtype)
    rows = quantize_rowwise_reference(x)
    # Three mantissa bits: at most 2^-4 of the value; below the normal range at most half of the
    # smallest step, 2^-10, in units of the scale. FP32 arithmetic adds a few 2^-24.
    bound = torch.maximum(x.float().abs() * 2**-4, rows.scale * 2**-10) * (1 + 1e-6)
    assert ((dequantized(rows) - x.float()).abs() <= bound).all()


def test_fp32_is_not_rounded_to_bf16_first():
    x = torch.tensor([[448.0, 17.001]])  # above the middle of the codes 16 and 18; in BF16 on it
    assert quantize_rowwise_reference(x).codes.float().tolist() == [[448.0, 18.0]]
    assert quantize_rowwise_reference(x.to(BF16)).codes.float().tolist() == [[448.0, 16.0]]


def test_zero_and_tiny_rows():
    x = torch.zeros(3, 8)
    x[1] = 1e-30
    x[2] = torch.linspace(-1e-11, 1e-11, 8)
    rows = quantize_rowwise_reference(x)
    assert rows.codes[:2].float().abs().max() == 0
    assert rows.scale[0] == rows.scale[1] == torch.tensor(AMAX_FLOOR) * torch.tensor(1 / 448)
    # A small row keeps its relative accuracy: the floor is below it.
    torch.testing.assert_close(dequantized(rows)[2], x[2], rtol=2**-4, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_row_stays_alone(bad):
    x = normal(5, 64)
    clean = quantize_rowwise_reference(x)
    x[2, 7] = bad
    rows = quantize_rowwise_reference(x)
    assert rows.scale[2].isnan().all() and rows.codes[2].float().abs().max() == 0
    for row in (0, 1, 3, 4):
        assert torch.equal(rows.codes[row].float(), clean.codes[row].float())
        assert rows.scale[row] == clean.scale[row]


def test_largest_finite_values_do_not_overflow():
    x = torch.tensor([[3.3e38, -1e38]])
    rows = quantize_rowwise_reference(x)
    assert rows.codes.float().tolist() == [[448.0, -128.0]]
    assert rows.scale.isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("grid", [1.0, 2.0**-9, 0.00731, 3.7e-5])
def test_grid_keeps_codes(dtype, grid):
    """Values that are E4M3 numbers times grid, even after rounding to BF16, are kept exactly."""
    codes = every_code()
    x = torch.stack([codes, codes / 4, codes.flip(0)]) if dtype != torch.float16 else codes[None]
    x[0, :3] = torch.tensor([448.0, -448.0, 2.0**-9])
    if x.shape[0] > 1:
        x[1] = (x[1] * 4).clamp(-100, 100).to(E4M3).float()  # a row without the largest codes
    stored = (x * grid).to(dtype)
    if dtype == torch.float16 and grid < 2.0**-9:
        pytest.skip("the smallest codes are below FP16's range")
    rows = quantize_rowwise_reference(stored, grid)
    power = (rows.scale / grid).log2()
    assert torch.equal(power, power.round())
    back = rows.codes.float() * power.exp2()
    assert torch.equal(back, x)


def test_without_grid_codes_move():
    """The reason why grid is there: another scale rounds a second time."""
    codes = every_code()[None] * 0.9
    x = codes.to(E4M3).float()
    rows = quantize_rowwise_reference(x.clamp(-416, 416))
    assert not torch.equal(dequantized(rows), x.clamp(-416, 416))


def test_linear_is_the_product_of_what_the_codes_mean():
    x, w, bias = normal(7, 48), normal(32, 48, seed=1), normal(32, seed=2)
    rows, weight = quantize_rowwise_reference(x), quantize_rowwise_reference(w)
    out = fp8_linear_reference(rows, *weight, bias)
    want = dequantized(rows).double() @ dequantized(weight).double().t() + bias.to(BF16).double()
    assert out.dtype == BF16 and out.shape == (7, 32)
    # One rounding to BF16, at most 2^-8 of the value, and FP32 sums far below that.
    assert ((out.double() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()


def test_linear_uses_every_scale_on_its_own_row():
    codes = torch.ones(3, 16).to(E4M3)
    x = QuantizedRows(codes, torch.tensor([[1.0], [2.0], [4.0]]))
    out = fp8_linear_reference(x, torch.ones(16, 16).to(E4M3), torch.arange(16.0).view(16, 1))
    want = 16 * torch.tensor([[1.0], [2.0], [4.0]]) * torch.arange(16.0)
    assert torch.equal(out.float(), want)


@pytest.mark.parametrize("k", [256, 1536, 8960])
def test_relative_error_on_normal_data(k, rel_l2):
    """At most 4 %, and not far from what rounding must cost.

    An E4M3 code has a relative error uniform in +-2^-4 / m for a mantissa m in [1, 2): its mean
    square is 2^-8 / 3 E[1 / m^2] = 2^-8 / 3 / 2, 2.55 %, for every operand; two of them 3.6 %.
    """
    x, w = normal(64, k).to(BF16), normal(96, k, seed=1).to(BF16)
    out = fp8_linear_reference(quantize_rowwise_reference(x), *quantize_rowwise_reference(w))
    error = rel_l2(out, x.double() @ w.double().t())
    assert 0.033 <= error <= 0.04


def test_better_than_a_fixed_activation_scale_on_outliers(rel_l2):
    """Rows of very different size, as in a transformer: a cast at scale 1.0 clips one end."""
    x, w = normal(64, 512), normal(96, 512, seed=1)
    x[:8] *= 2000.0
    x[8:16] *= 1e-4
    x[:, 3] *= 50.0  # an outlier channel
    want = x.double() @ w.double().t()
    weight = quantize_rowwise_reference(w)
    ours = fp8_linear_reference(quantize_rowwise_reference(x), *weight)
    fixed = QuantizedRows(x.clamp(-448, 448).to(E4M3), torch.ones(64, 1))
    theirs = fp8_linear_reference(fixed, *weight)
    for rows in (slice(0, 8), slice(8, 16)):
        assert rel_l2(ours[rows], want[rows]) < 0.05
        assert rel_l2(theirs[rows], want[rows]) > 2 * rel_l2(ours[rows], want[rows])
    assert rel_l2(ours, want) < rel_l2(theirs, want)
