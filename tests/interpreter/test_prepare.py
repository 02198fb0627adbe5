"""Triton preparation against its PyTorch twin.

Only sums of FP32 numbers may depend on the order of addition: the means. They are compared with
FP64 under a worst-case bound; everything behind them is compared bit for bit, given those means.
"""

import dataclasses
import itertools

import pytest
import torch
from sol_attn_cases import UNIT, fused_qkv_views, made, poisoned_memory, same_bits

from hopper_sol.kernels.sol_attn.config import num_blocks
from hopper_sol.kernels.sol_attn.emulation import (
    E4M3,
    padded,
    quantize_blocks,
    quantize_channels,
    sample_stride,
)
from hopper_sol.kernels.sol_attn.prepare import in_order, prepare_reference
from hopper_sol.kernels.sol_attn.reference import block_mean
from hopper_sol.kernels.sol_attn.triton_prepare import prepare

BF16 = torch.bfloat16
SHAPES = [(1, 2, 2), (63, 1, 1), (64, 1, 1), (65, 1, 2), (130, 2, 1), (4171, 1, 1)]  # T, H, B
SMOOTHING = {
    "none": {},
    "k-mean": {"k_smoothing": "mean"},
    "k-block": {"k_smoothing": "block"},
    "v-mean": {"v_smoothing": "mean"},
    "kv-mean-corrected": {"k_smoothing": "mean", "v_smoothing": "mean", "v_bias_correction": True},
    "k-block-v-corrected": {
        "k_smoothing": "block",
        "v_smoothing": "mean",
        "v_bias_correction": True,
    },
}
ALL = [{"precision": "bf16"}, *({"precision": "fp8", **options} for options in SMOOTHING.values())]
ALL_IDS = ["bf16", *(f"fp8-{name}" for name in SMOOTHING)]


def fields(prepared):
    return {name: x for name, x in vars(prepared).items() if isinstance(x, torch.Tensor)}


def assert_same(got, want):
    got, want = fields(got), fields(want)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert same_bits(got[name], value), name


def heads_first(x):
    return x.transpose(1, 2)


def assert_block_means(got, x):
    """A sum of 64 numbers in any order errs by at most 63 units of the sum of their magnitudes,
    and the quotient rounds once more."""
    want, size = block_mean(x.double()), block_mean(x.double().abs())
    assert got.dtype == torch.float32 and got.shape == heads_first(want).shape
    assert ((got - heads_first(want)).abs() <= 64 * UNIT * heads_first(size)).all()


def assert_sampled_mean(got, x):
    """Mean over the tokens of every so many-th block: a sum over these blocks, some at once, for each
    place in them, then over the places, and a quotient."""
    blocks = x.double().split(64, 1)[:: sample_stride(num_blocks(x.shape[1]))]
    tokens = torch.cat(blocks, 1)
    want, size = tokens.mean(1), tokens.abs().mean(1)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert ((got - want).abs() <= (256 + len(blocks)) * UNIT * size).all()


@pytest.mark.parametrize(("tokens", "heads", "batch"), SHAPES)
def test_bf16(tokens, heads, batch):
    q, k, v = made(tokens, heads, batch)
    with poisoned_memory():
        got = prepare(q, k, v, precision="bf16")
    assert got.q is q and got.k is k and got.v is v
    assert_block_means(got.q_mean, q)
    assert_block_means(got.k_mean, k)
    assert same_bits(got.mean_k, heads_first(padded(heads_first(got.k_mean)).to(BF16)))
    # The mean of V exists rounded only: monotone rounding keeps it between the rounded bounds.
    mean, slack = block_mean(v.double()), 64 * UNIT * block_mean(v.double().abs())
    low, high = (heads_first(padded(x)).float().to(BF16) for x in (mean - slack, mean + slack))
    assert ((got.mean_v >= low) & (got.mean_v <= high)).all()
    # 6e-6 from bound to bound, in steps of 2^-12 at a usual mean of 0.1.
    assert (low != high).float().mean() < 0.05
    assert got.tokens == tokens and got.precision == "bf16" and not got.k_residual
    assert fields(got).keys() == fields(prepare_reference(q, k, v, precision="bf16")).keys()


# The long case, with two groups of blocks and a sample of every third, once: with everything that
# sums over the sequence.
FP8_CASES = [
    pytest.param(*shape, options, id=f"{'-'.join(map(str, shape))}-{name}")
    for shape in SHAPES
    for name, options in SMOOTHING.items()
    if shape[0] != 4171 or name == "kv-mean-corrected"
]


@pytest.mark.parametrize(("tokens", "heads", "batch", "options"), FP8_CASES)
def test_fp8(tokens, heads, batch, options):
    q, k, v = made(tokens, heads, batch, offset=0.5)
    with poisoned_memory():
        got = prepare(q, k, v, precision="fp8", **options)
    want = prepare_reference(q, k, v, precision="fp8", **options)
    assert {n: (x.shape, x.dtype) for n, x in fields(got).items()} == {
        n: (x.shape, x.dtype) for n, x in fields(want).items()
    }
    assert got.tokens == tokens and got.k_residual == want.k_residual

    # Nothing is subtracted from Q.
    assert same_bits(got.q, want.q) and same_bits(got.q_scale, want.q_scale)
    assert_block_means(got.q_mean, q)
    # Means of K, of the sequence and of the blocks.
    k32, v32 = k.float(), v.float()
    if got.k_offset is not None:
        assert_sampled_mean(got.k_offset, k)
        k32 = k32 - got.k_offset.unsqueeze(1)
    assert_block_means(got.k_mean, k32)
    codes, scale = quantize_blocks(padded(heads_first(got.k_mean)))
    assert same_bits(got.mean_k, heads_first(codes).to(E4M3))
    assert same_bits(got.mean_k_scale, heads_first(scale))
    # What is left of K.
    if got.k_residual:
        means = got.dequant_mean_k().repeat_interleave(64, 2)[:, :, :tokens]
        k32 = k32 - heads_first(means)
    codes, scale = quantize_blocks(k32)
    assert same_bits(got.k, heads_first(codes).to(E4M3))
    assert same_bits(got.k_scale, heads_first(scale))
    # V.
    v_offset = None
    if options.get("v_smoothing") == "mean":
        plain = {**options, "v_bias_correction": False}
        v_offset = prepare(q, k, v, precision="fp8", **plain).out_offset
        assert_sampled_mean(v_offset, v)
        v32 = v32 - v_offset.unsqueeze(1)
    v8, v_scale = quantize_channels(v32)
    assert same_bits(got.v, padded(v8).permute(0, 2, 3, 1).to(E4M3))
    assert same_bits(got.v_scale, v_scale[:, 0])
    # Sums of 64 E4M3 codes are exact in FP32: multiples of 2^-9 below 2^15.
    assert same_bits(got.mean_v, padded(block_mean(v8)).permute(0, 2, 3, 1).to(E4M3))
    if v_offset is None:
        assert got.out_offset is None
    elif not options.get("v_bias_correction"):
        assert same_bits(got.out_offset, v_offset)
    else:
        # A value in units of its scale is a product with a rounded reciprocal, and four of them are
        # added: less than 8 units of it. What rounding changed is summed over 16 such fours, over
        # NT blocks, and scaled.
        change = v8.double() * v_scale.double() - v32.double()
        moved = change.mean(1)
        slack = 8 * v32.double().abs().mean(1) + (num_blocks(tokens) + 24) * change.abs().mean(1)
        slack = (slack + 2 * v_offset.abs()) * UNIT
        assert ((got.out_offset - (v_offset.double() - moved)).abs() <= slack).all()
        if tokens > 1:  # there is something to restore
            assert (moved.abs() > slack).float().mean() > 0.5


@pytest.mark.parametrize("tokens", [1, 65, 130, 4171])
def test_order_of_v_for_warpgroups(tokens):
    """The same codes as in natural order, in their slots, tails and summaries included."""
    q, k, v = made(tokens, 2, offset=0.5)
    options = SMOOTHING["kv-mean-corrected"] if tokens == 130 else {}
    plain = prepare(q, k, v, precision="fp8", **options)
    with poisoned_memory():
        got = prepare(q, k, v, precision="fp8", v_order="k32", **options)
    assert got.v_order == "k32" and plain.v_order == "natural"
    for name in ("v", "mean_v"):
        want = in_order(getattr(plain, name).view(torch.uint8), "k32")
        assert torch.equal(getattr(got, name).view(torch.uint8), want), name
    if options:
        # What rounding added to the mean is summed in another order; see test_fp8 for the units.
        size = v.double().abs().mean(1) + plain.out_offset.abs()
        distance = (got.out_offset - plain.out_offset).abs()
        assert (distance <= 2 * (num_blocks(tokens) + 34) * UNIT * size).all()
        got = dataclasses.replace(got, out_offset=plain.out_offset)
    assert all(torch.equal(a, b) for a, b in zip(got.dequant(), plain.dequant(), strict=True))
    rest = [name for name in fields(got) if name not in ("v", "mean_v")]
    assert all(same_bits(fields(got)[name], fields(plain)[name]) for name in rest)


@pytest.mark.parametrize("options", SMOOTHING.values(), ids=SMOOTHING)
def test_fp8_agrees_with_the_twin(options):
    """The roundings of means may differ by an FP32 step, which moves few codes, by one step."""
    q, k, v = made(130, 1, offset=0.5)
    got = fields(prepare(q, k, v, precision="fp8", **options))
    want = fields(prepare_reference(q, k, v, precision="fp8", **options))
    for name, value in want.items():
        distance = (got[name].double() - value.double()).abs()
        if value.dtype == E4M3:
            # At most to the neighbour: 1/8 of the larger, or 2^-9 among subnormals. A mean is off
            # by 4e-6 at most and a scale is 5e-3 or more for V and K (amax 2.5 / 448), a thousandth
            # in code units: less than 1 % of them can lie that near a tie. Block means have a
            # tenth of the scale, and a moved mean moves the residuals of its 64 keys.
            step = (torch.maximum(got[name].double().abs(), value.double().abs()) / 8).clamp(2**-9)
            assert (distance <= step).all(), name
            assert (distance > 0).float().mean() < 0.01, name
        else:
            # Sums of 130 numbers of size 1.3 at most; scales inherit a part of it.
            assert (distance <= 2 * 70 * UNIT * 1.5).all(), name


@pytest.mark.parametrize("options", ALL, ids=ALL_IDS)
def test_strided_views_are_read_in_place(options, monkeypatch):
    """Results equal those of packed inputs, NaN between the rows is not read, nothing is copied."""
    packed = made(70, 2, 2 if options == ALL[0] else 1)
    views = fused_qkv_views(*packed, per_head=len(options) % 2 == 0)
    assert not any(x.is_contiguous() for x in views)
    want = prepare(*packed, **options)

    def copied(self, *_, **__):
        raise AssertionError(f"copy of a tensor of shape {tuple(self.shape)}")

    for name in ("contiguous", "clone", "reshape"):
        monkeypatch.setattr(torch.Tensor, name, copied)
    with poisoned_memory():
        got = prepare(*views, **options)
    monkeypatch.undo()
    if options["precision"] == "bf16":
        assert all(x is y for x, y in zip((got.q, got.k, got.v), views, strict=True))
    assert_same(got, want)


@pytest.mark.parametrize("options", [ALL[0], ALL[-1]], ids=[ALL_IDS[0], ALL_IDS[-1]])
def test_every_operand_has_strides_of_its_own(options):
    packed = made(70, 1, 2)
    views = [fused_qkv_views(*packed, gap=128 * (1 + i), tail=1 + i)[i] for i in range(len(packed))]
    assert len({x.stride() for x in views}) == 3
    want, got = (fields(prepare(*x, **options)) for x in (packed, views))
    for name, value in want.items():
        assert same_bits(got[name], value), name


@pytest.mark.parametrize("options", ALL, ids=ALL_IDS)
def test_repeatable(options):
    inputs = made(70, 1, offset=0.3)
    with poisoned_memory():
        first, second = prepare(*inputs, **options), prepare(*inputs, **options)
    assert_same(first, second)


@pytest.mark.parametrize("options", ALL, ids=ALL_IDS)
def test_heads_and_batch_items_do_not_meet(options):
    """NaN in K and V of one head leaves every other head as it was, bit for bit."""
    clean = made(66, 2, 2, offset=0.3)
    spoilt = [x.clone() for x in clean]
    spoilt[1][1, 10, 0, 5] = spoilt[2][1, 65, 0, 7] = float("nan")
    want, got = (fields(prepare(*x, **options)) for x in (clean, spoilt))
    for name, value in want.items():
        if name in ("q", "k", "v") and options["precision"] == "bf16":
            continue  # the inputs themselves
        for b, h in itertools.product((0, 1), (0, 1)):
            if (b, h) != (1, 0):
                assert same_bits(got[name][b, h], value[b, h]), (name, b, h)
    assert got["k_mean"][1, 0, :, 5].isnan().any()
    assert got["mean_v"][1, 0].float().isnan().any()


@pytest.mark.parametrize("options", ALL, ids=ALL_IDS)
def test_zero_blocks_and_channels(options):
    q, k, v = made(130, 1)
    q[:, 64:128], k[:, 64:128], v[:, 64:128] = 0, 0, 0
    v[..., 9] = 0
    k[..., 11] = 0
    got = prepare(q, k, v, **options)
    assert all(x.float().isfinite().all() for x in fields(got).values())
    assert (got.q_mean[:, :, 1] == 0).all()
    if options["precision"] == "fp8":
        q_values, k_values, v_values = got.dequant()
        assert (q_values[:, 64:128] == 0).all()
        assert (v_values[..., 9] == 0).all() and (k_values[..., 11] == 0).all()
        floor = torch.tensor(1e-6) * torch.tensor(1 / 448)
        assert (got.q_scale[:, :, 1] == floor).all() and (got.v_scale[..., 9] == floor).all()


def test_ties_round_as_in_the_emulation():
    """BF16 data lies exactly between two codes often enough to show a quotient or a late rounding."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    codes = codes[:127]
    ties = (codes[1:] + codes[:-1]) / 2
    q = torch.zeros(1, 16 * 64, 1, 128)
    for block in range(16):
        amax = 1 + block / 16
        row = (ties.double() * amax / 448).float()
        q[0, block * 64, 0, :126] = row
        q[0, block * 64, 0, 127] = amax
    q = q.to(BF16)
    got = prepare(q, q, q, precision="fp8")
    want = prepare_reference(q, q, q, precision="fp8")
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
        assert same_bits(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("options", ALL, ids=ALL_IDS)
def test_order(options):
    """The same bits as from inputs that were permuted before, also through views."""
    inputs = made(70, 1, 2)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    want = prepare(*(x[:, order].contiguous() for x in inputs), **options)
    with poisoned_memory():
        got = prepare(*fused_qkv_views(*inputs), order=order, **options)
    assert_same(got, want)
