"""What is fused with row quantisation rounds where a model that runs in x's dtype rounds."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from hopper_sol.kernels.fp8_linear.config import GELU, SWIGLU, NormSettings
from hopper_sol.kernels.fp8_linear.fused_reference import (
    activation_reference,
    modulation_rows,
    norm_reference,
    quantize_activation_reference,
    quantize_norm_reference,
)
from hopper_sol.kernels.fp8_linear.reference import quantize_rowwise_reference

BF16 = torch.bfloat16
DTYPES = [BF16, torch.float16]
WAN = NormSettings("layer", 1e-6, round_product=False)
H3 = NormSettings("rms", 1e-5, round_product=True)


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_roundings(got, eager):
    """Equal up to FP32 sums in another order, which now and then end on the other side of a middle.

    A step of the dtype is 2^13 steps of FP32 (FP16; BF16 has 2^16), so sums that differ by a few
    FP32 steps fall apart in some 2^-11 of all values; a rounding that is missing or in another place
    moves every third. One that fell apart moves by one step, and what is computed from it by a few.
    """
    assert got.dtype == eager.dtype and got.shape == eager.shape
    assert (got != eager).float().mean() <= 2**-10
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, eager, rtol=4 * step, atol=4 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [77, 1536])
def test_gelu_is_the_models(k, dtype):
    x = 2 * normal(64, k, dtype=dtype)
    assert_same_roundings(activation_reference(x, GELU), gelu(x, approximate="tanh"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [77, 1536])
def test_swiglu_is_the_models(k, dtype):
    """Gate first, as ComfyUI's ``chunk`` has it; silu is rounded before the product."""
    x = 2 * normal(64, 2 * k, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    assert_same_roundings(activation_reference(x, SWIGLU), silu(gate).mul_(up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-3])  # variances far above and about eps
@pytest.mark.parametrize("k", [77, 1536])
def test_wan_norm_is_the_models(k, size, dtype):
    x = (size * (normal(64, k, dtype=torch.float32) + 0.5)).to(dtype)
    scale, shift = 0.5 * normal(1, k, seed=1, dtype=dtype), normal(1, k, seed=2, dtype=dtype)
    eager = torch.addcmul(shift, layer_norm(x, (k,), eps=1e-6), 1 + scale)
    assert_same_roundings(norm_reference(x, WAN, None, None, scale, shift), eager)


@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_norm_is_the_models(dtype):
    x, weight, bias = normal(64, 1536, dtype=dtype), *normal(2, 1536, seed=1, dtype=dtype)
    eager = layer_norm(x, (1536,), weight, bias, 1e-6)
    assert_same_roundings(norm_reference(x, WAN, weight, bias), eager)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 3e-3])
@pytest.mark.parametrize("k", [77, 1536])
def test_h3_norm_is_the_models(k, size, dtype):
    """The model multiplies and adds in place, one segment of tokens after the other."""
    x = (size * (normal(64, k, dtype=torch.float32) + 0.5)).to(dtype)
    weight = normal(k, seed=3, dtype=dtype)
    scale, shift = 0.5 * normal(3, k, seed=1, dtype=dtype), normal(3, k, seed=2, dtype=dtype)
    segments = ((0, 5, 2), (5, 6, 0), (6, 64, 1))
    eager = rms_norm(x, (k,), weight, eps=1e-5)
    mod_row = torch.empty(64, dtype=torch.int32)
    for start, end, row in segments:
        eager[start:end].mul_(1.0 + scale[row]).add_(shift[row])
        mod_row[start:end] = row
    assert_same_roundings(norm_reference(x, H3, weight, None, scale, shift, mod_row), eager)


def test_roundings_are_where_they_are_said_to_be():
    """The two ways to modulate differ, and neither is the exact value."""
    x, scale, shift = normal(64, 512), 0.5 * normal(1, 512, seed=1), normal(1, 512, seed=2)
    one = norm_reference(x, NormSettings("layer", 1e-6, False), None, None, scale, shift)
    two = norm_reference(x, NormSettings("layer", 1e-6, True), None, None, scale, shift)
    exact = norm_reference(x.float(), WAN, None, None, scale.float(), shift.float())
    for got in (one, two):
        assert 0.05 < (got != exact.to(BF16)).float().mean() < 0.9
    assert (one != two).float().mean() > 0.05


def test_modulation_rows():
    table = torch.empty(3, 8)
    assert modulation_rows(6, table).tolist() == [0, 0, 1, 1, 2, 2]
    assert modulation_rows(2, torch.empty(1, 8)).tolist() == [0, 0]
    given = torch.tensor([2, 0])
    assert modulation_rows(2, table, given) is given


def test_runs_of_rows_share_a_modulation():
    x, scale, shift = normal(12, 32), normal(3, 32, seed=1), normal(3, 32, seed=2)
    whole = norm_reference(x, WAN, None, None, scale, shift)
    for part in range(3):
        rows = slice(4 * part, 4 * part + 4)
        row = slice(part, part + 1)
        alone = norm_reference(x[rows], WAN, None, None, scale[row], shift[row])
        assert torch.equal(whole[rows], alone)


def test_quantisation_is_that_of_the_rounded_result():
    x, scale, shift = normal(5, 64), normal(1, 64, seed=1), normal(1, 64, seed=2)
    for got, h in (
        (quantize_activation_reference(x, GELU), activation_reference(x, GELU)),
        (quantize_activation_reference(x, SWIGLU), activation_reference(x, SWIGLU)),
        (
            quantize_norm_reference(x, H3, None, None, scale, shift),
            norm_reference(x, H3, None, None, scale, shift),
        ),
    ):
        want = quantize_rowwise_reference(h)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scale, want.scale)
