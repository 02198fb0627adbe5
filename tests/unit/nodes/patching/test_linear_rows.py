"""Weights as FP8 rows, made and undone in pieces."""

import sys
from types import ModuleType

import pytest
import torch

from hopper_sol.kernels import quantize_rowwise
from hopper_sol.nodes.patching import linear_rows
from hopper_sol.nodes.patching.linear_rows import (
    dequantize_rows,
    pieces,
    plain_weight,
    power_of_two_scale,
    row_scale,
    row_weight,
    stochastic_rows,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Every weight here is several pieces, the last of them ragged."""
    monkeypatch.setitem(linear_rows._PIECE, "cpu", 200)


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """ComfyUI's stochastic rounding of FP32 to E4M3, as it is defined: up with the probability of
    the part of a step that is over."""

    def stochastic_rounding(values, dtype, seed):
        assert dtype == E4M3 and values.dtype == torch.float32
        draw = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
        _, exponent = torch.frexp(values)
        step = torch.ldexp(torch.ones_like(values), (exponent - 4).clamp(min=-9))
        return (torch.floor(values / step + draw) * step).to(dtype)

    module = ModuleType("comfy.float")
    module.stochastic_rounding = stochastic_rounding
    monkeypatch.setitem(sys.modules, "comfy", ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.float", module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_quantised_as_a_whole_would_be(dtype):
    weight = (normal(37, 48) * torch.logspace(-3, 3, 37)[:, None]).to(dtype)
    codes, scale = row_weight(weight)
    want = quantize_rowwise(weight)
    assert torch.equal(codes.float(), want.codes.float()) and torch.equal(scale, want.scale)
    assert codes.dtype == E4M3 and codes.is_contiguous() and scale.shape == (37, 1)


@pytest.mark.parametrize("scale", [None, torch.tensor(0.37), torch.tensor([0.37])])
def test_e4m3_keeps_its_codes(scale):
    weight = normal(37, 48).to(E4M3)
    codes, scales = row_weight(weight, scale)
    assert torch.equal(codes.view(torch.uint8), weight.view(torch.uint8))
    assert codes.data_ptr() != weight.data_ptr()  # the file's memory is not held on to
    assert torch.equal(scales, torch.full((37, 1), 1.0 if scale is None else 0.37))


@pytest.mark.parametrize("shape", [(37,), (37, 1)])
def test_e4m3_with_a_scale_for_every_row(shape):
    weight, scale = normal(37, 48).to(E4M3), normal(37).abs()
    codes, scales = row_weight(weight, scale.view(shape))
    assert torch.equal(scales, scale[:, None])
    assert torch.equal(codes.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.01), normal(37, 1, seed=2).abs()])
def test_e5m2_is_quantised_again(scale):
    weight = normal(37, 48).to(E5M2)
    meant = weight.float() * (1.0 if scale is None else scale)
    codes, scales = row_weight(weight, scale)
    want = quantize_rowwise(meant)
    assert torch.equal(codes.float(), want.codes.float()) and torch.equal(scales, want.scale)


def test_other_scales_are_refused():
    with pytest.raises(ValueError, match=r"weight_scale: got \(2, 37\) for 37 rows, need one"):
        row_weight(normal(37, 48).to(E4M3), torch.ones(2, 37))


def test_row_scale_is_a_copy_in_fp32():
    scale = torch.ones(3, dtype=torch.float64)
    each = row_scale(scale, 3)
    assert each.dtype == torch.float32 and each.shape == (3, 1)
    one = row_scale(torch.tensor(2.0), 3)
    one[0] = 5.0
    assert one.flatten().tolist() == [5.0, 2.0, 2.0]  # no view of a single number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_rounds_once(dtype):
    codes, scale = row_weight(normal(37, 48))
    got = dequantize_rows(codes, scale, dtype)
    assert torch.equal(got, (codes.float() * scale).to(dtype))


def test_plain_weight():
    weight = normal(37, 48).to(E4M3)
    want = (weight.float() * 0.25).bfloat16()
    assert torch.equal(plain_weight(weight, torch.tensor(0.25), torch.bfloat16), want)
    assert torch.equal(plain_weight(weight, None, torch.bfloat16), weight.bfloat16())


def test_stochastic_rows_are_right_on_average():
    """A change of 2 % of a step, which rounding to the nearest loses, is there in the mean."""
    unit = 2.0**-10
    base = torch.full((64, 4096), 208 * unit)  # a code, with 16 to the next
    base[:, 0] = 448 * unit
    changed = base.clone()
    changed[:, 1:] += 0.02 * 16 * unit
    got = dequantize_rows(*stochastic_rows(changed, 7), torch.float32)
    error = float((got - changed)[:, 1:].double().mean())
    # The error of one number has a deviation of at most half a step; five times that of the mean.
    assert abs(error) < 5 * 8 * unit * (64 * 4095) ** -0.5
    assert torch.equal(dequantize_rows(*row_weight(changed), torch.float32), base)


def test_stochastic_rows_depend_on_the_seed_only():
    weight = normal(37, 48)
    one, two, other = (stochastic_rows(weight, seed).codes for seed in (3, 3, 4))
    assert torch.equal(one.float(), two.float()) and not torch.equal(one.float(), other.float())


def test_stochastic_rows_have_the_scales_of_rounding_to_nearest():
    weight = normal(37, 48) * torch.logspace(-3, 3, 37)[:, None]
    codes, scale = stochastic_rows(weight, 1)
    want = quantize_rowwise(weight)
    assert torch.equal(scale, want.scale)
    exponent = torch.frexp(want.codes.float())[1]
    steps = torch.ldexp(torch.ones(37, 48), (exponent - 4).clamp(min=-9))
    assert ((codes.float() - want.codes.float()).abs() <= 2 * steps).all()
    assert codes.float().abs().max() == 448.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_alone(bad):
    weight = normal(5, 48)
    weight[2, 7] = bad
    codes, scale = stochastic_rows(weight, 1)
    assert scale.isnan().flatten().tolist() == [False, False, True, False, False]
    assert not codes.float().isnan().any() and not codes[2].float().any()


@pytest.mark.parametrize("shape", [(1, 1000), (37, 48), (5, 40), (4, 10, 7), (0, 8)])
def test_pieces(shape):
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [weight[part] for part in pieces(weight, weight.device)]
    assert all(part.numel() <= 200 or len(part) == 1 for part in parts)
    assert torch.equal(torch.cat([*parts, weight[:0]]), weight)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (448.0 * (1 + 2.0**-23), 2.0),
        (224.0, 0.5),
        (225.0, 1.0),
        (7 * 2.0**-30, 2.0**-36),
        (1.0, 2.0**-8),
        (0.0, 1.0),
    ],
)
def test_power_of_two_scale(amax, scale):
    """448 is 7 times a power of two: the edges are exact."""
    found = power_of_two_scale(torch.tensor(amax))
    assert found.dtype == torch.float32 and found.shape == () and float(found) == scale
