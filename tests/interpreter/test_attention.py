"""Triton attention, through its backend and through the public op, against the specification."""

import dataclasses
import math

import pytest
import torch
from sol_attn_cases import fused_qkv_views, made, poisoned_memory, rel_l2, same_bits, spread

from hopper_sol.kernels import SolAttnConfig, SolAttnStats, TokenLayout, registry, sol_attention
from hopper_sol.kernels.requirements import Requirements
from hopper_sol.kernels.sol_attn.config import num_blocks
from hopper_sol.kernels.sol_attn.emulation import sol_attention_fp8_emulation
from hopper_sol.kernels.sol_attn.reference import (
    block_mean,
    block_scores,
    forced_blocks,
    route_threshold,
    sol_attention_reference,
)
from hopper_sol.kernels.sol_attn.triton_backend import Steps, sol_attention_fwd_triton

SCALE = 128**-0.5
BF16 = torch.bfloat16
PRECISIONS = ["bf16", "fp8"]
SHORT = [1, 63, 64, 65, 130, 300, 700]
SHARES = {"random": 0.5, "all-summary": -1.0, "all-exact": 2.0}
GIVEN = [(tokens, fill) for tokens in SHORT for fill in SHARES if tokens < 700 or fill == "random"]
# BF16 rounds by 2^-9 of a value at most, uniform over a step: 0.16 % rms on average. P, the mean
# values, the output, and (times a logit of order 1) the mean keys make 0.33 %.
BF16_TO_FP32 = 5e-3
# README.md, "Accuracy": 5.1 %, nearly all of it from Q, K and V.
FP8_TO_FP32 = 6e-2
# Same roundings, other orders of FP32 sums: 2e-5 of the P's fall on the other side of a rounding
# and move by a tenth (tests/unit/kernels/sol_attn/test_emulation.py, SAME_ROUNDINGS); block means
# on the other side of one move as rarely, and with "block" all residuals of their channel.
FP8_TO_EMULATION = {"none": 1e-3, "mean": 1e-3, "block": 2e-3}


def run(q, k, v, mask=None, *, layout=None, scale=SCALE, with_lse=True, order=None, **settings):
    config = SolAttnConfig(**{"precision": "bf16", **settings})
    with poisoned_memory():
        return sol_attention_fwd_triton(
            *(q, k, v),
            config=config,
            layout=layout or TokenLayout(),
            scale=scale,
            with_lse=with_lse,
            order=order,
            exact_mask=mask,
        )


def specification(q, k, v, mask=None, *, layout=None, **settings):
    """The reference in FP32, also for BF16 inputs."""
    layout = layout or TokenLayout()
    return sol_attention_reference(
        *(x.to(BF16).float() for x in (q, k, v)),
        exact_mask=mask,
        sink_kv=layout.sink_kv,
        dense_q=layout.dense_q,
        **settings,
    )


def random_mask(tokens, heads=2, batch=1, share=0.5, seed=9):
    blocks = num_blocks(tokens)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, heads, blocks, blocks, generator=generator) < share


def assert_close(got, want, bound):
    assert got.shape == want.shape and got.isfinite().all()
    assert rel_l2(got, want) <= bound


def lse_bound(q, k, precision):
    """Allowed LSE difference to the FP32 reference."""
    # BF16: a mean key rounds by 2^-9 of each channel, a random walk over 128 of them; 6 sigma.
    # FP8: E4M3 rounds Q and K by 2.65 % rms; 6 sigma of one logit bound the weighted mean of many.
    size = (q.float().square().mean().sqrt() * k.float().square().mean().sqrt()).item()
    unit = 2**-9 / 3**0.5 if precision == "bf16" else 0.0265 * 2**0.5
    return 6 * unit * SCALE * 128**0.5 * size + 1e-4


# --- One mask for both sides


@pytest.mark.parametrize(("tokens", "fill"), GIVEN)
def test_bf16_with_a_given_mask(tokens, fill):
    q, k, v = spread(tokens, 1 if tokens > 200 else 2)
    mask = random_mask(tokens, q.shape[2], share=SHARES[fill])
    out, lse, counts = run(q, k, v, mask)
    want = specification(q, k, v, mask)
    assert out.dtype == BF16 and out.is_contiguous() and lse.dtype == torch.float32
    assert_close(out, want.out, BF16_TO_FP32)
    assert (lse - want.lse).abs().max() <= lse_bound(q, k, "bf16")
    assert counts.dtype == torch.int32 and torch.equal(counts, mask.sum(-1).int())


@pytest.mark.parametrize(("tokens", "fill"), GIVEN)
def test_fp8_with_a_given_mask(tokens, fill):
    q, k, v = spread(tokens, 1 if tokens > 200 else 2)
    mask = random_mask(tokens, q.shape[2], share=SHARES[fill])
    out, lse, counts = run(q, k, v, mask, precision="fp8")
    want = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
    assert_close(out, want.out, FP8_TO_EMULATION["none"])
    assert (lse - want.lse).abs().max() <= 1e-3  # unrounded P's: FP32 logits only, and rare codes
    fp32 = specification(q, k, v, mask)
    if tokens > 1:  # one token is its own output: V alone rounds
        assert rel_l2(out, fp32.out) > 1e-2
    assert rel_l2(out, fp32.out) <= FP8_TO_FP32
    assert (lse - fp32.lse).abs().max() <= lse_bound(q, k, "fp8")
    assert torch.equal(counts, mask.sum(-1).int())


SMOOTHING = {
    "k-mean": {"k_smoothing": "mean"},
    "k-block": {"k_smoothing": "block"},
    "v-mean": {"v_smoothing": "mean", "v_bias_correction": False},
    "kv-mean-corrected": {"k_smoothing": "mean", "v_smoothing": "mean", "v_bias_correction": True},
    "k-block-v-corrected": {
        "k_smoothing": "block",
        "v_smoothing": "mean",
        "v_bias_correction": True,
    },
}


@pytest.mark.parametrize("options", SMOOTHING.values(), ids=SMOOTHING)
@pytest.mark.parametrize("tokens", [65, 330])
def test_smoothing(tokens, options):
    q, k, v = (x + shift for x, shift in zip(spread(tokens, 1), (0.0, 1.5, 0.5), strict=True))
    mask = random_mask(tokens, 1)
    mask[..., 0, -1], mask[..., -1, -1] = False, True  # the partial block in both roles
    out, lse, _ = run(q, k, v, mask, precision="fp8", **options)
    want = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, **options)
    bound = FP8_TO_EMULATION[options.get("k_smoothing", "none")]
    assert_close(out, want.out, bound)
    # An offset of 1.5 is a logit of some units: the LSE has to get it back.
    assert (lse - want.lse).abs().max() <= 5e-3
    fp32 = specification(q, k, v, mask)
    assert rel_l2(out, fp32.out) <= FP8_TO_FP32
    if tokens > 64 * 2:
        plain = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
        assert rel_l2(out, plain.out) > 3 * bound  # the option does something here


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_groups(precision):
    """66 blocks: groups of summaries with some, with none (dense rows) and with only summaries."""
    tokens = 4171
    q, k, v = spread(tokens, 1, size=0.2)
    mask = random_mask(tokens, 1, share=0.02)
    mask[0, 0, 5], mask[0, 0, 6, :64], mask[0, 0, 7, 64:] = True, True, True
    mask[0, 0, 8], mask[0, 0, 9, :64], mask[0, 0, 10, 64:] = False, False, False
    mask[0, 0, 0, 65], mask[0, 0, 1, 65] = True, False
    options = {"k_smoothing": "block"} if precision == "fp8" else {}
    out, lse, counts = run(q, k, v, mask, precision=precision, **options)
    fp32 = specification(q, k, v, mask)
    assert torch.equal(counts, mask.sum(-1).int())
    assert (lse - fp32.lse).abs().max() <= lse_bound(q, k, precision)
    if precision == "bf16":
        assert_close(out, fp32.out, BF16_TO_FP32)
        return
    assert rel_l2(out, fp32.out) <= FP8_TO_FP32
    want = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, **options)
    assert_close(out, want.out, FP8_TO_EMULATION["block"])
    assert (lse - want.lse).abs().max() <= 1e-3


def test_splits_of_two_groups():
    """Parts are rounded to BF16 and merged; four splits of two groups leave two empty."""
    tokens = 64 * 64 + 70  # two blocks in the second group
    q, k, v = spread(tokens, 1, size=0.2)
    k, v = k + 0.25, v + 0.25
    mask = random_mask(tokens, 1, share=0.02)
    mask[0, 0, 3, 65], mask[0, 0, 4, 64:], mask[0, 0, 5, 64:] = True, True, False
    mask[0, 0, 6], mask[0, 0, 7] = False, True
    options = {"k_smoothing": "mean", "v_smoothing": "mean", "v_bias_correction": True}
    out, lse, counts = run(q, k, v, mask, precision="fp8", kv_splits=4, **options)
    assert torch.equal(counts, mask.sum(-1).int())
    want = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, kv_splits=4, **options)
    # Parts whose FP32 value is near a BF16 tie round apart: rare, and 2^-8 of them.
    assert_close(out, want.out, FP8_TO_EMULATION["mean"])
    assert (lse - want.lse).abs().max() <= 1e-3
    fp32 = specification(q, k, v, mask)
    assert rel_l2(out, fp32.out) <= FP8_TO_FP32
    assert (lse - fp32.lse).abs().max() <= lse_bound(q, k, "fp8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_splits_of_one_group_are_one_part(precision):
    q, k, v = spread(130, 2, size=0.2)
    one, many = (run(q, k, v, precision=precision, kv_splits=n) for n in (1, 4))
    assert same_bits(one[2], many[2])
    # The one part is rounded to BF16 before and after, its weight is 1.
    assert same_bits(one[0], many[0])
    assert (one[1] - many[1]).abs().max() <= 2e-6  # log(1) added to values below 8


# --- Its own mask


def sure_of_routing(q, k, *, tau, estimator, layout):
    """The reference's mask, and whether no score lies within rounding of its threshold."""
    q_mean, k_mean = (block_mean(x.double()) for x in (q, k))
    options = {"tau": tau, "estimator": estimator, "scale": SCALE}
    threshold = route_threshold(q_mean, k_mean, **options).unsqueeze(-1)
    score = block_scores(q_mean, k_mean, SCALE)
    forced = forced_blocks(q.shape[1], layout.sink_kv, layout.dense_q)
    # FP32 sums of 128 products and of 64 tokens, worst case: 200 units of the magnitudes.
    noise = 200 * 2**-24 * block_scores(q_mean.abs(), k_mean.abs(), SCALE)
    sure = ((score - threshold).abs() > noise) | forced
    return (score > threshold) | forced, bool(sure.all())


LAYOUTS = {
    "none": TokenLayout(),
    "ends": TokenLayout(sink_kv=((0, 3), (690, 700)), dense_q=((70, 80),)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_own_routing(precision, estimator, layout):
    q, k, v = spread(700, 1)
    options = {"tau": 0.7, "estimator": estimator}
    mask, sure = sure_of_routing(q, k, layout=layout, **options)
    assert sure and 0.3 < mask.float().mean() < 0.9
    out, lse, counts = run(q, k, v, layout=layout, precision=precision, **options)
    assert torch.equal(counts, mask.sum(-1).int())
    fp32 = specification(q, k, v, layout=layout, **options)
    assert torch.equal(fp32.exact_mask, mask)
    assert_close(out, fp32.out, BF16_TO_FP32 if precision == "bf16" else FP8_TO_FP32)
    assert (lse - fp32.lse).abs().max() <= lse_bound(q, k, precision)
    same = run(q, k, v, mask, precision=precision)
    assert same_bits(out, same[0]) and same_bits(lse, same[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_short_sequences_route_everything_exact(precision):
    for tokens in (1, 63, 64, 65):
        q, k, v = made(tokens, 1)
        out, _, counts = run(q, k, v, precision=precision, tau=8.0)
        assert (counts == num_blocks(tokens)).all()
        bound = BF16_TO_FP32 if precision == "bf16" else FP8_TO_FP32
        assert_close(out, specification(q, k, v, tau=8.0).out, bound)


def test_key_offset_does_not_change_routing():
    q, k, v = spread(500, 1)
    options = {"precision": "fp8", "tau": 0.5}
    plain = run(q, k, v, **options)
    for k_smoothing in ("mean", "block"):
        smooth = run(q, k, v, k_smoothing=k_smoothing, **options)
        assert torch.equal(plain[2], smooth[2])


# --- Dense cases


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("splits", [1, 2])
def test_skipped_queries(precision, splits):
    """What is computed does not depend on what is left out; nothing is counted for it."""
    q, k, v = made(330, 2)
    whole = run(q, k, v, precision=precision, kv_splits=splits)
    rest = run(q, k, v, precision=precision, kv_splits=splits, layout=TokenLayout(skip_q=150))
    assert same_bits(rest[0][:, 128:], whole[0][:, 128:])
    assert same_bits(rest[1][..., 128:], whole[1][..., 128:])
    assert (rest[2][..., :2] == 0).all() and torch.equal(rest[2][..., 2:], whole[2][..., 2:])


def sdpa(q, k, v, scale=SCALE):
    heads_first = (x.float().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(
        1, 2
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_everything_exact_is_dense_attention(precision):
    q, k, v = spread(300, 1)
    dense = sdpa(q, k, v, 0.2)
    bound = BF16_TO_FP32 if precision == "bf16" else FP8_TO_FP32 * 2  # logits are twice as large
    cases = (
        {"tau": -1000.0},
        {"routing": False, "tau": 8.0},
        {"tau": 8.0, "layout": TokenLayout(sink_kv=((0, 300),))},
        {"tau": 8.0, "layout": TokenLayout(dense_q=((0, 300),))},
    )
    results = [run(q, k, v, precision=precision, scale=0.2, **options) for options in cases]
    assert_close(results[0][0], dense, bound)
    for out, lse, counts in results:
        assert same_bits(out, results[0][0]) and same_bits(lse, results[0][1])
        assert (counts == 5).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dense_query_rows_are_dense_attention(precision):
    q, k, v = spread(500, 1)
    layout = TokenLayout(dense_q=((64, 66), (499, 500)))
    out, _, counts = run(q, k, v, layout=layout, precision=precision, tau=8.0)
    dense = run(q, k, v, precision=precision, tau=-1000.0)[0]
    rows = torch.zeros(500, dtype=torch.bool)
    rows[64:128], rows[448:] = True, True
    assert same_bits(out[:, rows], dense[:, rows])
    assert_close(dense, sdpa(q, k, v), BF16_TO_FP32 if precision == "bf16" else FP8_TO_FP32)
    assert not torch.equal(out[:, ~rows], dense[:, ~rows])
    assert (counts[0, 0, [1, 7]] == 8).all() and counts[0, 0, 3] == 3


def test_one_scale_multiplies_logits():
    q, k, v = spread(300, 1)
    for precision in PRECISIONS:
        double_scale = run(q, k, v, precision=precision, scale=2 * SCALE, tau=0.5)
        double_q = run(2 * q, k, v, precision=precision, tau=0.5)
        assert all(same_bits(x, y) for x, y in zip(double_scale, double_q, strict=True))


# --- Weights


def alternating(tokens, sign=1.0):
    values = torch.ones(1, tokens, 1, 128)
    values[:, 1::2] = -1.0
    return (sign * values).to(BF16)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sink", [False, True], ids=["band", "sink"])
def test_closed_form(precision, sink):
    """q = c, K = V = +-1 in turn: block means are 0, and n forced tokens see cosh and sinh of a.

    out = n sinh a / (n cosh a + T - n), with a = 128 c scale; all values are exact in both formats
    but P and the quotient.
    """
    tokens, a = 640, 1.0
    q = torch.full((1, tokens, 1, 128), 0.125, dtype=BF16)
    k = v = alternating(tokens)
    layout = TokenLayout(sink_kv=((0, 64),)) if sink else TokenLayout()
    out, lse, counts = run(
        q, k, v, precision=precision, tau=4.0, layout=layout, scale=a / (128 * 0.125)
    )
    n = (64 * counts[0, 0]).double().repeat_interleave(64)
    forced = forced_blocks(tokens, layout.sink_kv).sum(-1)
    assert torch.equal(counts[0, 0], forced.int())
    total = n * math.cosh(a) + tokens - n
    want = (n * math.sinh(a) / total).view(1, -1, 1, 1)
    # All P's of one sign round alike: to E4M3 by 1/17 at most, to BF16 by 2^-9. exp(1) and
    # exp(-1) enter sinh with 1.57 times its value in sum.
    bound = 2**-8 + 1.57 * (2**-9 if precision == "bf16" else 1 / 17)
    assert ((out.double() - want) / want).abs().max() <= bound
    assert (lse[0, 0] - total.log()).abs().max() <= 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [65, 389])
def test_zero_queries_average_the_values(precision, tokens):
    """Every token weighs the same, in blocks and in summaries: the LSE is log T."""
    _, k, v = made(tokens, 1)
    q = torch.zeros_like(k)
    v = torch.round(v.float() * 4).clamp(-8, 8).to(BF16)
    for share in (-1.0, 0.5, 2.0):
        mask = random_mask(tokens, 1, share=share)
        out, lse, _ = run(q, k, v, mask, precision=precision)
        assert (lse - math.log(tokens)).abs().max() <= 2e-6 * math.log(tokens)
        want = v.double().mean(1, keepdim=True).expand_as(out)
        if precision == "bf16":
            # Powers of two as P but for the tail's 5 or 1; BF16 means, and the output.
            assert (
                (out.double() - want).abs() <= 2**-8 * (block_mean(v.double().abs()).amax() + 1)
            ).all()
        else:
            emulated = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
            assert_close(out, emulated.out, FP8_TO_EMULATION["none"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_constant_values_stay(precision):
    tokens = 197
    q, k, v = spread(tokens, 1, size=0.2)
    v = torch.full_like(v, 1.75)
    for share in (-1.0, 0.4, 2.0):
        mask = random_mask(tokens, 1, share=share)
        out, *_ = run(q, k, v, mask, precision=precision)
        if precision == "bf16":
            # P rounds by 2^-9 at most in the numerator only, the output once more by 2^-8 / 1.75.
            assert ((out.double() - 1.75).abs() <= 1.75 * (2**-9 + 2**-8)).all()
        else:
            # E4M3 rounds a P by 1/17 at most, 2.65 % rms; a row has 5 P's or more that matter.
            assert ((out.double() - 1.75).abs() <= 1.75 / 17 + 2**-8).all()
            smooth, *_ = run(q, k, v, mask, precision=precision, v_smoothing="mean")
            assert (smooth == 1.75).all()  # nothing is left to round


# --- Inputs and outputs


def options_of(precision):
    smooth = {"k_smoothing": "mean", "v_smoothing": "mean"} if precision == "fp8" else {}
    return {"precision": precision, "tau": 0.3, **smooth}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("per_head", [False, True], ids=["qkv-first", "heads-first"])
def test_strided_views(precision, per_head):
    packed = spread(130, 1 if per_head else 2, 2 if per_head else 1)
    views = fused_qkv_views(*packed, per_head=per_head)
    want = run(*packed, **options_of(precision))
    got = run(*views, **options_of(precision))
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
    assert got[0].is_contiguous()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_operand_has_strides_of_its_own(precision):
    packed = spread(130, 1, 2)
    q, k, v = packed
    wide, wider = fused_qkv_views(*packed, gap=256), fused_qkv_views(*packed, tail=3)
    want = run(*packed, **options_of(precision))
    for views in ((q, wide[1], wider[2]), (wide[0], k, wider[2]), (wide[0], wider[1], v)):
        assert len({x.stride() for x in views}) == 3
        got = run(*views, **options_of(precision))
        assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


def test_views_are_not_copied():
    views = fused_qkv_views(*made(70, 1))
    steps = Steps(*views, config=SolAttnConfig(precision="bf16"), layout=TokenLayout(), scale=SCALE)
    for x, view in zip((steps.q, steps.k, steps.v), views, strict=True):
        assert x.data_ptr() == view.data_ptr() and x.stride() == view.stride()
    operands = steps.prepare()
    assert operands.q.data_ptr() == views[0].data_ptr()


def test_token_stride_beyond_int32_is_packed_first():
    """64 tokens must lie within 2^31 elements; a view that is wider is copied."""
    wide = torch.empty_strided((1, 3, 1, 128), (0, 2**24, 0, 1), device="meta", dtype=BF16)
    assert not wide.is_contiguous()
    steps = Steps(
        *(wide, wide, wide),
        config=SolAttnConfig(precision="bf16"),
        layout=TokenLayout(),
        scale=SCALE,
    )
    assert steps.q.stride(1) == 128


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_are_cast(precision, dtype):
    inputs = [x.to(dtype) for x in spread(130, 1)]
    inputs = [x + 1e-3 for x in inputs]  # values that BF16 does not hold
    got = run(*inputs, **options_of(precision))
    want = run(*(x.to(BF16) for x in inputs), **options_of(precision))
    assert got[0].dtype == dtype
    assert same_bits(got[0], want[0].to(dtype))
    assert precision == "fp8" or same_bits(got[1], want[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_head_of_nan_stays_alone(precision):
    clean = spread(70, 2, 2)
    spoilt = [x.clone() for x in clean]
    for x in spoilt:
        x[1, 66, 0, 3] = float("nan")
    want, got = (run(*x, **options_of(precision)) for x in (clean, spoilt))
    for b, h in ((0, 0), (0, 1), (1, 1)):
        assert same_bits(got[0][b, :, h], want[0][b, :, h])
        assert same_bits(got[1][b, h], want[1][b, h])
    assert got[0][1, :, 0].isnan().any(-1).all()  # and it does not pass for a result


@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeatable_and_inputs_unchanged(precision):
    inputs = spread(200, 1)
    before = [x.clone() for x in inputs]
    first, second = (run(*inputs, kv_splits=2, **options_of(precision)) for _ in range(2))
    assert all(same_bits(x, y) for x, y in zip(first, second, strict=True))
    assert all(same_bits(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_lse(precision):
    inputs = spread(130, 1)
    for splits in (1, 2):
        options = {**options_of(precision), "kv_splits": splits}
        out, lse, counts = run(*inputs, with_lse=False, **options)
        want = run(*inputs, **options)
        assert same_bits(out, want[0]) and same_bits(counts, want[2])
        assert lse is None or splits > 1  # parts need it to be merged


@pytest.mark.parametrize("size", [1e4, 1e-3, 1e-12])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_finite_at_any_size(precision, size):
    q, k, v = (x * size for x in spread(130, 1))
    out, lse, _ = run(q, k, v, **options_of(precision))
    assert out.isfinite().all() and lse.isfinite().all()
    # An average of V lies within it, up to the E4M3 errors of P and V (1/17 each) and BF16.
    assert out.abs().max() <= 1.13 * v.abs().max()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_order(precision, splits):
    """Blocks, layout and counts go by position; rows of the output and the LSE by token."""
    inputs = spread(200, 1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    layout = TokenLayout(sink_kv=((0, 1),), dense_q=((199, 200),))
    options = {**options_of(precision), "layout": layout, "kv_splits": splits, "tau": 1.5}
    want = run(*(x[:, order] for x in inputs), **options)
    out, lse, counts = run(*fused_qkv_views(*inputs), order=order, **options)
    assert same_bits(out[:, order], want[0]) and same_bits(counts, want[2])
    # The offset's logit is added by torch, whose sums depend on the place in memory.
    assert (lse[:, :, order] - want[1]).abs().max() <= 1e-5
    assert out.is_contiguous() and lse.is_contiguous()


# --- The public op


@pytest.fixture
def triton_on_cpu(monkeypatch):
    """The registered backend with everything but the device that it asks for."""
    original = registry.get("sol_attention", "triton")
    backend = dataclasses.replace(original, requirements=Requirements())
    monkeypatch.setitem(registry._BACKENDS["sol_attention"], "triton", backend)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_public_op(triton_on_cpu, precision):
    q, k, v = spread(260, 1)
    layout = TokenLayout(sink_kv=((0, 3),), dense_q=((259, 260),))
    config = SolAttnConfig(**options_of(precision))
    stats = SolAttnStats()
    out, lse = sol_attention(
        *(q, k, v), config=config, layout=layout, scale=0.1, return_lse=True, stats=stats
    )
    want = run(q, k, v, layout=layout, scale=0.1, **options_of(precision))
    assert same_bits(out, want[0]) and same_bits(lse, want[1])
    assert same_bits(stats.exact_blocks, want[2])
    names = {"bf16": "bfloat16", "fp8": "fp8"}
    assert (stats.backend, stats.precision) == ("triton", names[precision])
    assert stats.cast_from is None and list(stats.declined) == ["sm90"]
    assert same_bits(sol_attention(q, k, v, config=config, layout=layout, scale=0.1), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_public_op_notes_the_cast(triton_on_cpu, dtype):
    inputs = [x.to(dtype) for x in made(65, 1)]
    stats = SolAttnStats()
    out = sol_attention(*inputs, config=SolAttnConfig(), stats=stats, backend="triton")
    assert out.dtype == dtype
    assert (stats.precision, stats.cast_from) == ("bfloat16", dtype)  # no FP8 without a GPU
