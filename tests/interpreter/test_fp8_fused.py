"""Fused Triton quantisation against the specification.

FP32 steps before a rounding may differ: sums in another order, exp2 for exp. So a value that lies on
the middle of two numbers of x's dtype may fall to the other side, and its code with it.
"""

import dataclasses

import pytest
import torch
from sol_attn_cases import poisoned_memory

from hopper_sol.kernels.fp8_linear.config import NormSettings
from hopper_sol.kernels.fp8_linear.fused_reference import (
    activation_reference,
    norm_reference,
    quantize_activation_reference,
    quantize_norm_reference,
)
from hopper_sol.kernels.fp8_linear.triton_norm import norm_launch_shape, quantize_norm_triton
from hopper_sol.kernels.fp8_linear.triton_quant import quantize_activation_triton

BF16 = torch.bfloat16
DTYPES = [BF16, torch.float16, torch.float32]
# Rows and columns: tails of a piece, of a row of pieces, and several pieces.
SIZES = [(1, 48), (63, 77), (65, 48), (5, 1000), (3, 1536)]
WAN = NormSettings("layer", 1e-6, round_product=False)
H3 = NormSettings("rms", 1e-5, round_product=True)
NONE = (None,) * 5


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got, want, h):
    """``got`` against the specification's rows ``want`` and what was quantised there, ``h``.

    FP32 results that differ by some 2^-20 of themselves fall on two sides of a BF16 middle once in
    2^-20 / 2^-8, an FP16 middle in 2^-9; with up to four roundings a value in less than 2^-7 cases.
    An E4M3 step is at least four steps of FP16 and 16 of BF16: a quarter of those cases, 2^-9, at
    the most change a code, and by one. A missing rounding moves a third of all values, and so more
    than 2^-7 of the codes.
    A scale follows the row's largest value: with it, by at most 3 steps of 2^-8 (a flip of each
    rounding), seldom.
    """
    assert got.codes.shape == want.codes.shape and got.scale.shape == want.scale.shape
    assert torch.equal(got.scale.isnan(), want.scale.isnan())
    usable = ~want.scale.isnan().flatten()
    torch.testing.assert_close(got.scale, want.scale, rtol=3 * 2**-8, atol=0, equal_nan=True)
    same_scale = usable & (got.scale == want.scale).flatten()
    if h.dtype == torch.float32:  # nothing is rounded: scales differ in their last bits
        close = (got.scale / want.scale - 1).abs().flatten() <= 2**-18
        assert close[usable].all()
        same_scale = usable
    assert (usable & ~same_scale).sum() <= 1 + 0.05 * usable.sum()
    a, b = got.codes.view(torch.uint8)[same_scale], want.codes.view(torch.uint8)[same_scale]
    assert (a != b).sum() <= 1 + 2**-9 * a.numel()
    back = got.codes.float() * got.scale
    # Half an E4M3 step of what was quantised, and its own distance from ``h``.
    step = torch.finfo(h.dtype).eps if h.dtype != torch.float32 else 2**-18
    size = h.float().abs()
    allowed = torch.maximum(size * 2**-4, got.scale * 2**-10) + 4 * step * (size + got.scale * 448)
    assert ((back - h.float()).abs() <= allowed)[usable].all()


# --- activations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_activations(activation, rows, columns, dtype):
    x = 2 * normal(rows, columns * (2 if activation == "swiglu" else 1), dtype=dtype)
    with poisoned_memory():
        got = quantize_activation_triton(x, activation)
    want = quantize_activation_reference(x, activation)
    assert_close(got, want, activation_reference(x, activation))


def test_gelu_of_every_bf16_value():
    """From -inf to inf: tails, where 1 + tanh cancels, and rows that are not finite."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 256)
    got = quantize_activation_triton(every, "gelu_tanh")
    want = quantize_activation_reference(every, "gelu_tanh")
    finite = every.isfinite().all(1)
    assert torch.equal(got.scale.isnan().flatten(), ~finite)
    h = activation_reference(every, "gelu_tanh").float()
    back = got.codes.float() * got.scale
    # 1 + tanh(u) in FP32 is off by 2^-24, times x / 2; a BF16 step and half an E4M3 step on top.
    noise = every.float().abs() * 2**-24 + h.abs() * 2**-7
    allowed = torch.maximum(h.abs() * 2**-4, got.scale * 2**-10) * 1.02 + noise
    assert ((back - h).abs() <= allowed)[finite].all()
    assert (got.scale / want.scale - 1).abs()[finite & (h.abs().amax(1) > 1e-10)].max() <= 2**-7


def test_gate_is_the_first_half():
    x = torch.cat([torch.full((3, 16), 4.0), torch.full((3, 16), -1.0)], 1).to(BF16)
    got = quantize_activation_triton(x, "swiglu")
    silu = torch.nn.functional.silu(torch.tensor(4.0)).to(BF16).item()
    assert torch.allclose(got.codes.float() * got.scale, torch.tensor(-silu), rtol=2**-22)


# --- norms


def vectors(columns, dtype, which):
    """weight, bias, scale, shift, mod_row of a combination."""
    weight, bias, scale, shift = 0.5 * normal(4, columns, seed=5, dtype=dtype)
    return {
        "bare": NONE,
        "affine": (1 + weight, bias, None, None, None),
        "modulated": (None, None, scale[None], shift[None], None),
        "all": (1 + weight, bias, scale[None], shift[None], None),
    }[which]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize(
    ("dtype", "which"),
    [
        *((BF16, which) for which in ("bare", "affine", "modulated", "all")),
        *((dtype, "all") for dtype in DTYPES[1:]),
    ],
)
@pytest.mark.parametrize("settings", [WAN, H3], ids=["wan", "h3"])
def test_norms(settings, dtype, which, rows, columns):
    x = (normal(rows, columns, dtype=torch.float32) * 3 + 1).to(dtype)
    arguments = (settings, *vectors(columns, dtype, which))
    with poisoned_memory():
        got = quantize_norm_triton(x, *arguments)
    assert_close(got, quantize_norm_reference(x, *arguments), norm_reference(x, *arguments))


@pytest.mark.parametrize("settings", [WAN, H3], ids=["wan", "h3"])
@pytest.mark.parametrize("round_product", [False, True])
def test_each_way_to_modulate(settings, round_product):
    """A product that is rounded once too often or too seldom is seen."""
    settings = NormSettings(settings.kind, settings.eps, round_product)
    x, arguments = normal(20, 1536), (None, None, *0.5 * normal(2, 1, 1536, seed=1), None)
    got = quantize_norm_triton(x, settings, *arguments)
    want = quantize_norm_reference(x, settings, *arguments)
    assert_close(got, want, norm_reference(x, settings, *arguments))
    other = NormSettings(settings.kind, settings.eps, not round_product)
    wrong = quantize_norm_reference(x, other, *arguments)
    with pytest.raises(AssertionError):
        assert_close(got, wrong, norm_reference(x, other, *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_that_holds_one(dtype):
    x, (scale, shift) = normal(12, 1000, dtype=dtype), 0.5 * normal(2, 2, 1000, seed=1, dtype=dtype)
    settings = dataclasses.replace(WAN, scale_has_one=True)
    arguments = (settings, None, None, 1 + scale, shift, None)
    got = quantize_norm_triton(x, *arguments)
    assert_close(got, quantize_norm_reference(x, *arguments), norm_reference(x, *arguments))
    added = quantize_norm_triton(x, WAN, None, None, scale, shift, None)
    assert torch.equal(got.codes.float(), added.codes.float())
    assert torch.equal(got.scale, added.scale)


@pytest.mark.parametrize("settings", [WAN, H3], ids=["wan", "h3"])
def test_eps_and_small_rows(settings):
    """Variances about eps, rows of one value, zeros."""
    x = normal(6, 512) * 1e-3
    x[1], x[2] = 0.0, 0.25
    arguments = (settings, *vectors(512, BF16, "modulated"))
    got, want = (f(x, *arguments) for f in (quantize_norm_triton, quantize_norm_reference))
    assert_close(got, want, norm_reference(x, *arguments))


def test_large_mean():
    """The variance is summed around the mean: x^2 - mean^2 would have lost it. And what lies behind
    the row, zeros, is far from the mean: it must not count."""
    x = normal(8, 1000, dtype=torch.float32) + 3000.0
    got, want = (f(x, WAN, *NONE) for f in (quantize_norm_triton, quantize_norm_reference))
    # A mean in FP32 is off by a few 2^-24 of 3000 here, of rows of size 1.
    back = got.codes.float() * got.scale, want.codes.float() * want.scale
    torch.testing.assert_close(*back, rtol=2**-3, atol=2**-9)
    torch.testing.assert_close(got.scale, want.scale, rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_modulation_by_row(dtype):
    x, scale, shift = normal(65, 96), normal(4, 96, seed=1), normal(4, 96, seed=2)
    mod_row = torch.arange(65).mul(7).remainder(4).to(dtype)
    arguments = (WAN, None, None, scale, shift, mod_row)
    got, want = (f(x, *arguments) for f in (quantize_norm_triton, quantize_norm_reference))
    assert_close(got, want, norm_reference(x, *arguments))


@pytest.mark.parametrize("mods", [1, 3, 21])
def test_runs_of_rows_share_a_modulation(mods):
    """Tables that are slices of a wider tensor, as chunks of a model's six vectors are."""
    x, wide = normal(21, 96), normal(mods, 6 * 96, seed=1)
    shift, scale = wide.chunk(6, 1)[1:3]
    arguments = (WAN, None, None, scale, shift, None)
    got, want = (f(x, *arguments) for f in (quantize_norm_triton, quantize_norm_reference))
    assert_close(got, want, norm_reference(x, *arguments))


# --- memory, rows that are not finite


@pytest.mark.parametrize("columns", [40, 48, 77])
def test_strided_rows_and_nothing_outside_is_read(columns):
    storage = torch.full((7, 200), float("nan"), dtype=BF16)
    storage[:, 8 : 8 + 2 * columns] = normal(7, 2 * columns)
    narrow, wide = storage[::2, 8 : 8 + columns], storage[::2, 8 : 8 + 2 * columns]
    for activation, x in (("gelu_tanh", narrow), ("swiglu", wide)):
        with poisoned_memory():
            got = quantize_activation_triton(x, activation)
        want = quantize_activation_reference(x, activation)
        assert want.scale.isfinite().all()
        assert_close(got, want, activation_reference(x, activation))
    storage[:, 8 + columns :] = float("nan")
    for settings in (WAN, H3):
        with poisoned_memory():
            got = quantize_norm_triton(narrow, settings, *NONE)
        want = quantize_norm_reference(narrow, settings)
        assert want.scale.isfinite().all()
        assert_close(got, want, norm_reference(narrow, settings))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows(bad, dtype):
    columns = 77
    x = normal(6, 2 * columns, dtype=dtype)
    x[1, 3], x[4, columns - 1] = bad, bad
    want = [False, True, False, False, True, False]
    runs = (
        quantize_activation_triton(x, "gelu_tanh"),
        quantize_activation_triton(x, "swiglu"),
        quantize_norm_triton(x, WAN, *NONE),
        quantize_norm_triton(x, H3, *vectors(2 * columns, dtype, "all")),
    )
    for got in runs:
        assert got.scale.isnan().flatten().tolist() == want
        assert got.codes.float()[want].abs().sum() == 0


def test_launch_shapes():
    for columns in (1, 48, 1536, 5120, 5376, 13824, 32768):
        for itemsize in (2, 4):
            part, parts, warps = norm_launch_shape(columns, itemsize)
            assert part * itemsize == 512 * warps  # 16 bytes a thread
            assert part * (parts - 1) < columns <= part * parts
