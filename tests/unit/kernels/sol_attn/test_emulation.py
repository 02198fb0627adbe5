"""The FP8 emulation against a loop that has its own E4M3 codec, and against the specification."""

import math

import pytest
import torch

from hopper_sol.kernels.sol_attn import emulation
from hopper_sol.kernels.sol_attn.emulation import (
    sample_stride,
    sampled_mean,
    sol_attention_fp8_emulation,
)
from hopper_sol.kernels.sol_attn.reference import (
    block_mean,
    block_scores,
    num_blocks,
    route_threshold,
    sol_attention_reference,
)

LOG2E = 1.4426950408889634
SCALE = 128**-0.5
BF16 = torch.bfloat16
# Relative rounding errors: E4M3 has a 3-bit mantissa, whose error over a uniform log scale is
# 2.65 % rms and at most 1/17; BF16 has 8 significant bits and rounds by at most 2^-8.
E4M3_RMS = 0.0265
BF16_UNIT = 2.0**-8

# --- An independent emulation: Python loops, FP64, and a table of the E4M3 values.

TABLE = torch.tensor(
    [m * 2.0**-9 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8) for e in range(16) for m in range(8)],
    dtype=torch.float64,
)[:127]  # the 128th code is NaN


def e4m3(x):
    """Nearest table entry, ties to the even code, saturating at 448."""
    size = x.abs().contiguous()
    above = torch.searchsorted(TABLE, size).clamp(1, 126)
    middle = (TABLE[above - 1] + TABLE[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return TABLE[torch.where(up, above, above - 1)] * x.sign()


def probabilities(exponent, exp_mode):
    """P as it enters the PV product, and what is added to the row sum."""
    if exp_mode == "exp2":
        return e4m3(exponent.exp2()), exponent.exp2()
    if exp_mode == "expcast":
        code = (8 * (exponent + 7) - 0.35).round().clamp(0, 126).long()
        return TABLE[code], TABLE[code]
    return exponent.exp2(), exponent.exp2()  # "uncast": the other roundings only


def quantized(x, dims=None):
    """E4M3 codes and the scale of one tensor as a whole, or of each slice along ``dims``.

    In FP32 and by products, as the contract says: 3 / 64 of the maximum is exactly between two
    codes (21 / 448), so that one rounding more or less decides about elements that are not rare.
    """
    x = x.float()
    scale = x.abs().amax(dims, keepdim=dims is not None).clamp(min=1e-6) * torch.tensor(1 / 448)
    return e4m3((x * (1 / scale)).double()), scale.double()


def streaming(
    q,
    k,
    v,
    mask=None,
    *,
    tau=1.0,
    exp_mode="exp2",
    probability_scale=256.0,
    k_smoothing="none",
    v_smoothing="none",
    v_bias_correction=False,
    kv_splits=1,
):
    """out before its last rounding, lse, mask, and sum of squared weights per row."""
    q, k, v = (x.to(BF16).double() for x in (q, k, v))
    batch, tokens, heads, _ = q.shape
    spans = [(start, min(start + 64, tokens)) for start in range(0, tokens, 64)]
    count = len(spans)
    out, lse = torch.zeros_like(q), torch.zeros(batch, heads, tokens, dtype=torch.float64)
    squares = torch.zeros_like(lse)
    used = torch.zeros(batch, heads, count, count, dtype=torch.bool)
    groups = -(-count // 64)
    width = -(-groups // kv_splits) * 64
    for b in range(batch):
        for h in range(heads):
            qh, kh, vh = q[b, :, h], k[b, :, h], v[b, :, h]
            # Every s-th block, s odd and the largest that leaves 32 blocks or so.
            stride = {66: 3}.get(count, 1)
            sample = torch.cat([torch.arange(*span) for span in spans[::stride]])
            k_offset = kh[sample].mean(0) if k_smoothing == "mean" else 0 * kh[0]
            v_offset = vh[sample].mean(0) if v_smoothing == "mean" else 0 * vh[0]
            kh, vh = kh - k_offset, vh - v_offset
            v8, v_scale = quantized(vh, 0)
            moved = (v8 * v_scale - vh).mean(0)
            correction = v_offset - moved if v_bias_correction else v_offset
            means = torch.stack([kh[start:stop].mean(0) for start, stop in spans])
            mean_tiles = [quantized(means[g : g + 64]) for g in range(0, count, 64)]
            mean_k = torch.cat([codes * scale for codes, scale in mean_tiles])
            base = mean_k if k_smoothing == "block" else 0 * mean_k
            key_tiles = [quantized(kh[a:z] - base[j]) for j, (a, z) in enumerate(spans)]
            mean_v8 = e4m3(torch.stack([v8[start:stop].mean(0) for start, stop in spans]))
            query_means = torch.stack([qh[start:stop].mean(0) for start, stop in spans])
            threshold = route_threshold(
                query_means[None, :, None],
                means[None, :, None],
                tau=tau,
                estimator="diag",
                scale=SCALE,
            )[0, 0]
            for i, (start, stop) in enumerate(spans):
                q8, q_scale = quantized(qh[start:stop])
                queries = q8 * q_scale * SCALE * LOG2E
                route = queries @ mean_k.T
                if mask is None:
                    near = (torch.arange(count) - i).abs() <= 1
                    exact = (route.mean(0) > threshold[i]) | near
                else:
                    exact = mask[b, h, i]
                used[b, h, i] = exact
                parts = []
                for first in range(0, count, width):
                    last = min(first + width, count)
                    columns = []  # (logits, values) in the order in which they are visited
                    for g in range(first, last, 64):
                        some = [j for j in range(g, min(g + 64, last)) if not exact[j]]
                        if some:
                            length = torch.tensor([float(spans[j][1] - spans[j][0]) for j in some])
                            columns.append((route[:, some] + length.double().log2(), mean_v8[some]))
                    for j in range(last - 1, first - 1, -1):
                        if exact[j]:
                            codes, k_scale = key_tiles[j]
                            logits = queries @ (codes * k_scale + base[j]).T
                            columns.append((logits, v8[spans[j][0] : spans[j][1]]))
                    peak = torch.full((stop - start, 1), -math.inf, dtype=torch.float64)
                    total, square = torch.zeros_like(peak), torch.zeros_like(peak)
                    acc = torch.zeros(stop - start, qh.shape[1], dtype=torch.float64)
                    for logits, values in columns:
                        new = torch.maximum(peak, logits.amax(1, keepdim=True))
                        shrink = (peak - new).exp2()
                        exponent = logits - new + math.log2(probability_scale)
                        cast, added = probabilities(exponent, exp_mode)
                        acc = acc * shrink + cast @ values
                        total = total * shrink + added.sum(1, keepdim=True)
                        square = square * shrink**2 + (exponent.exp2() ** 2).sum(1, keepdim=True)
                        peak = new
                    part_lse = (peak + (total / probability_scale).log2()) / LOG2E
                    parts.append((acc / total * v_scale, part_lse, square / total**2))
                if len(parts) > 1:
                    parts = [(o.to(BF16).double(), part_lse, s) for o, part_lse, s in parts]
                whole = torch.stack([part_lse for _, part_lse, _ in parts]).logsumexp(0)
                out[b, start:stop, h] = correction + sum((x - whole).exp() * o for o, x, _ in parts)
                shift = (qh[start:stop] @ k_offset) * SCALE
                lse[b, h, start:stop] = whole.squeeze(1) + shift
                squares[b, h, start:stop] = sum(
                    (2 * (x - whole)).exp() * s for _, x, s in parts
                ).squeeze(1)
    return out, lse, used, squares


def logit_noise(q, k, scale=SCALE):
    """RMS error of a natural logit: E4M3 noise in each factor of each of its D products."""
    products = q.double().square().mean((0, 1, 2)) * k.double().square().mean((0, 1, 2))
    return scale * E4M3_RMS * 2**0.5 * products.sum().sqrt().item()


def random_mask(batch, heads, tokens, fill="random"):
    count = num_blocks(tokens)
    mask = torch.rand(batch, heads, count, count, generator=torch.Generator().manual_seed(9)) > 0.5
    return mask if fill == "random" else torch.full_like(mask, fill == "all-exact")


# Both sides round alike but compute in FP32 and FP64. FP32 logits of size ~10 err by ~1e-6 and P by
# the same factor, an E4M3 step is 1/16: about 2e-5 of the P's, and fewer of the operands, round to
# the neighbouring code, 6 .. 12 % away. That makes 0.1 * sqrt(2e-5) = 5e-4 in relative L2, twice
# that is allowed. Another cast point or another scale moves every P, by percents.
SAME_ROUNDINGS = 1e-3


def same_lse(exp_mode="exp2", k_smoothing="none", **_):
    """Allowed LSE difference of two sides that round alike."""
    # exp2 sums unrounded P's, so only the FP32 logits show: 8 sqrt(128) 2^-24 of |q| |k| s ~ 40.
    # expcast sums codes, and an FP32 mean of K can flip a code of K: one key's weight (~1 %)
    # changes by 6 .. 12 %, twice that is allowed.
    return 2.2e-4 if exp_mode == "exp2" and k_smoothing == "none" else 2.5e-3


OPTIONS = {
    "plain": {},
    "expcast": {"exp_mode": "expcast"},
    "scale1": {"probability_scale": 1.0},
    "scale448-like": {"probability_scale": 100.0},
    "k-mean": {"k_smoothing": "mean"},
    "k-block": {"k_smoothing": "block"},
    "v-mean": {"v_smoothing": "mean"},
    "kv-mean-corrected": {
        "k_smoothing": "mean",
        "v_smoothing": "mean",
        "v_bias_correction": True,
        "exp_mode": "expcast",
    },
    "k-block-v-mean": {"k_smoothing": "block", "v_smoothing": "mean", "v_bias_correction": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fill", ["routed", "random", "all-summary", "all-exact"])
def test_fp8_emulation_equals_streaming_loop(make_qkv, rel_l2, options, fill):
    q, k, v = make_qkv(330, batch=2, heads=2, dtype=BF16, spread=0.3)
    k, v = k + 1.0, v + 0.5
    mask = None if fill == "routed" else random_mask(2, 2, 330, fill)
    out, lse, used, _ = streaming(q, k, v, mask, **options)
    got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, **options)
    assert torch.equal(got.exact_mask, used)
    assert rel_l2(got.out, out.to(BF16)) < SAME_ROUNDINGS
    assert (got.lse - lse).abs().max() < same_lse(**options)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_fp8_emulation_equals_streaming_loop_short(make_qkv, rel_l2, tokens):
    q, k, v = make_qkv(tokens, heads=2, dtype=BF16, seed=tokens)
    for mask in (None, random_mask(1, 2, tokens, "all-summary")):
        out, lse, used, _ = streaming(q, k, v, mask)
        got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
        assert torch.equal(got.exact_mask, used)
        assert rel_l2(got.out, out.to(BF16)) < SAME_ROUNDINGS
        assert (got.lse - lse).abs().max() < same_lse()


@pytest.mark.parametrize("kv_splits", [1, 2])
def test_fp8_emulation_equals_streaming_loop_two_groups(make_qkv, rel_l2, kv_splits):
    q, k, v = make_qkv(4171, dtype=BF16, spread=0.2)
    out, lse, used, _ = streaming(q, k, v, kv_splits=kv_splits)
    got = sol_attention_fp8_emulation(q, k, v, kv_splits=kv_splits)
    assert torch.equal(got.exact_mask, used)
    assert rel_l2(got.out, out.to(BF16)) < SAME_ROUNDINGS
    assert (got.lse - lse).abs().max() < same_lse()


def test_to_e4m3_equals_the_table():
    values = torch.cat([TABLE, -TABLE])
    ties = (TABLE[1:] + TABLE[:-1]) / 2
    beyond = torch.tensor([463.9, 464.0, 465.0, 1e30, -1e30, math.inf, -math.inf])
    x = torch.cat([values, ties, -ties, ties * (1 + 1e-6), ties * (1 - 1e-6), beyond]).float()
    x = torch.cat([x, 30 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))])
    assert torch.equal(emulation.to_e4m3(x).double(), e4m3(x.double()))


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_quantize_round_trip(make_qkv, tokens):
    x, *_ = make_qkv(tokens, batch=2, heads=3)
    blocks = num_blocks(tokens)
    codes, scale = emulation.quantize_blocks(x)
    assert codes.shape == (2, blocks * 64, 3, 128) and scale.shape == (2, blocks, 3)
    assert (codes[:, tokens:] == 0).all()
    per_token = scale.repeat_interleave(64, 1)[:, :tokens, :, None]
    channel_codes, channel_scale = emulation.quantize_channels(x)
    assert channel_codes.shape == x.shape and channel_scale.shape == (2, 1, 3, 128)
    for got, step in ((codes[:, :tokens], per_token), (channel_codes, channel_scale)):
        # Nearest of a 3-bit mantissa: half a step of 1/8 at 1 + 1/16 is 1/17 of the value (and a
        # rounded division more); among subnormals half of 2^-9.
        allowed = torch.maximum(x.abs() * (1 / 17 + 1e-6), step * 2.0**-10)
        assert ((got * step - x).abs() <= allowed).all()
        assert got.abs().max() == 448.0


def test_quantize_rounds_ties_by_products():
    # Row m: a maximum of 1 + m / 128 and every BF16 number that divides to halfway between codes.
    amax = 1 + torch.arange(128.0) / 128
    ties = amax.double().unsqueeze(1) * (TABLE[1:] + TABLE[:-1]) / 2 / 448
    ties = ties.to(BF16).float() * (ties.to(BF16).double() == ties)
    rows = torch.cat([amax.unsqueeze(1), ties], 1)  # (128, 127)
    assert (ties != 0).sum() > 1000
    want, want_scale = quantized(rows, 1)
    by_quotient = e4m3((rows / want_scale.float()).double())
    assert not torch.equal(want, by_quotient)  # the contract decides something
    codes, scale = emulation.quantize_channels(rows.T[None, :, None])
    assert torch.equal(codes[0, :, 0].T.double(), want) and torch.equal(
        scale.flatten().double(), want_scale.flatten()
    )
    padded = torch.zeros(1, 64, 128, 128)  # one head for each row
    padded[0, 0, :, :127] = rows
    codes, scale = emulation.quantize_blocks(padded)
    assert torch.equal(codes[0, 0, :, :127].double(), want)
    assert torch.equal(scale.flatten().double(), want_scale.flatten())


# --- Against the specification


@pytest.mark.parametrize("exp_mode", ["exp2", "expcast"])
@pytest.mark.parametrize("fill", ["random", "all-summary", "all-exact"])
def test_fp8_emulation_error_is_that_of_e4m3(make_qkv, rel_l2, fill, exp_mode):
    q, k, v = make_qkv(1000, heads=2, dtype=BF16, spread=0.2)
    mask = random_mask(1, 2, 1000, fill)
    want = sol_attention_reference(*(x.float() for x in (q, k, v)), exact_mask=mask)
    got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, exp_mode=exp_mode)
    # out = sum w V with independent V of mean 0. Its relative error is the RMS of independent
    # relative errors of every term: of the weight through its logit, of P (for expcast also the
    # linear mantissa, ~2 % rms around its mean), of V, and again of mean V in a summary.
    p_error = E4M3_RMS if exp_mode == "exp2" else math.hypot(E4M3_RMS, 0.02)
    noise = logit_noise(q, k)
    expected = math.sqrt(noise**2 + p_error**2 + 2 * E4M3_RMS**2)
    assert rel_l2(got.out, want.out) < 1.5 * expected
    # At least the rounding of V is always there; less means that nothing was quantised.
    assert rel_l2(got.out, want.out) > 0.5 * E4M3_RMS
    # LSE errs by a weighted mean of logit errors, so by no more than their RMS; expcast adds the
    # common bias of a linear mantissa, mean of log2(1 + f) - f = 0.057 less 0.35 / 8 = 0.044
    # octaves, 0.009 in natural log, and as much again for bytes below 8 that decode too low.
    bias = 0.0 if exp_mode == "exp2" else 0.02
    assert (got.lse - want.lse).square().mean().sqrt() < 1.5 * noise + bias


def test_fp8_emulation_mask_differs_only_near_the_threshold(make_qkv):
    q, k, v = make_qkv(2000, heads=4, dtype=BF16, spread=0.05)
    q_mean, k_mean = block_mean(q.double()), block_mean(k.double())
    threshold = route_threshold(q_mean, k_mean, tau=1.0, estimator="diag", scale=SCALE)
    at_zero = route_threshold(q_mean, k_mean, tau=0.0, estimator="diag", scale=SCALE)
    sigma = (threshold - at_zero).unsqueeze(-1)
    distance = (block_scores(q_mean, k_mean, SCALE) - threshold.unsqueeze(-1)).abs()
    want = sol_attention_reference(q, k, v).exact_mask
    got = sol_attention_fp8_emulation(q, k, v).exact_mask
    differs = got != want
    assert differs.any()  # the decision does look at rounded operands
    # Score noise of one pair: 64 rows of Q round independently, the mean key rounds once; six
    # standard deviations.
    lengths = torch.tensor([64.0] * 31 + [2000 - 31 * 64]).double()
    q_power = torch.stack([x.double().square().mean(1) for x in q.split(64, 1)], 1)
    noise = torch.einsum(
        "bihd,bjhd->bhij", q_power / lengths.view(1, -1, 1, 1) + q_mean.square(), k_mean.square()
    ).sqrt()
    noise = SCALE * LOG2E * E4M3_RMS * noise
    assert (distance[differs] <= 6 * noise[differs]).all()
    # |q| and mean K are as spread out as the population is: noise is ~ sqrt(2) * 2.65 % of sigma,
    # so no pair further than 6 times that may flip, and no more of them than the density of
    # N(0, 1) at tau = 1, 0.242, times the mean |noise|, 0.8 * 3.75 %, times 3 for luck.
    assert (distance[differs] <= 6 * 2**0.5 * E4M3_RMS * sigma.expand_as(distance)[differs]).all()
    assert differs.double().mean() <= 3 * 0.242 * 0.8 * 2**0.5 * E4M3_RMS


def test_fp8_emulation_rounds_inputs_to_bf16_first(make_qkv):
    q, k, v = make_qkv(200, heads=2)
    rounded = [x.to(BF16) for x in (q, k, v)]
    got, want = sol_attention_fp8_emulation(q, k, v), sol_attention_fp8_emulation(*rounded)
    assert torch.equal(got.out, want.out.float()) and torch.equal(got.lse, want.lse)
    assert got.out.dtype == torch.float32 and want.out.dtype == BF16
    assert got.lse.dtype == torch.float32 and got.out.is_contiguous()


def test_fp8_emulation_routing_options(make_qkv):
    q, k, v = make_qkv(500, dtype=BF16, spread=0.3)
    plain = sol_attention_fp8_emulation(q, k, v, tau=8.0).exact_mask[0, 0]
    band = torch.ones(8, 8, dtype=torch.bool).tril(1).triu(-1)
    assert torch.equal(plain, band)
    columns, rows = band.clone(), band.clone()
    columns[:, 1:3] = True
    rows[7] = True
    sink = sol_attention_fp8_emulation(q, k, v, tau=8.0, sink_kv=((127, 129),))
    assert torch.equal(sink.exact_mask[0, 0], columns)
    dense = sol_attention_fp8_emulation(q, k, v, tau=8.0, dense_q=((499, 500),))
    assert torch.equal(dense.exact_mask[0, 0], rows)
    assert sol_attention_fp8_emulation(q, k, v, tau=8.0, routing=False).exact_mask.all()
    assert sol_attention_fp8_emulation(q, k, v, tau=-1000.0).exact_mask.all()
    diag, exact = (
        sol_attention_fp8_emulation(q, k, v, estimator=name).exact_mask
        for name in ("diag", "exact")
    )
    assert not torch.equal(diag, exact)


def test_lowest_tau_is_exact_where_rounding_is_larger_than_the_floor(make_qkv):
    """Equal keys, so that no score spreads: E4M3 moves them by more than a thousand floors."""
    q, k, v = make_qkv(500, dtype=BF16)
    k = (1000 * k[:, :1]).expand_as(k)
    assert sol_attention_fp8_emulation(q, k, v, tau=-1000.0).exact_mask.all()
    assert not sol_attention_fp8_emulation(q, k, v, tau=-999.0).exact_mask.all()


@pytest.mark.parametrize("k_smoothing", ["none", "mean"])
def test_fp8_emulation_scale_is_a_factor_of_q(make_qkv, k_smoothing):
    q, k, v = make_qkv(500, heads=2, dtype=BF16, spread=0.3)
    options = {"k_smoothing": k_smoothing, "estimator": "exact"}
    default = sol_attention_fp8_emulation(q, k, v, **options)
    explicit = sol_attention_fp8_emulation(q, k, v, scale=SCALE, **options)
    # A power of two passes through every rounding unchanged.
    double_scale = sol_attention_fp8_emulation(q, k, v, scale=2 * SCALE, **options)
    double_q = sol_attention_fp8_emulation(2 * q, k, v, **options)
    for got, want in ((explicit, default), (double_scale, double_q)):
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
        assert torch.equal(got.exact_mask, want.exact_mask)
    assert not torch.equal(double_scale.out, default.out)


def test_fp8_emulation_needs_a_score_strictly_above():
    zero = torch.zeros(1, 400, 1, 128)
    mask = sol_attention_fp8_emulation(zero, zero, zero, tau=0.0).exact_mask[0, 0]
    assert torch.equal(mask, torch.ones(7, 7, dtype=torch.bool).tril(1).triu(-1))


@pytest.mark.parametrize("exp_mode", ["exp", "mixed"])
def test_fp8_emulation_rejects_unknown_exp_mode(make_qkv, exp_mode):
    with pytest.raises(ValueError, match=f"exp_mode: got '{exp_mode}'"):
        sol_attention_fp8_emulation(*make_qkv(65), exp_mode=exp_mode)


# --- Weights


def test_fp8_emulation_constant_values_dense(make_qkv):
    q, k, _ = make_qkv(2048, dtype=BF16)
    v = torch.full_like(q, 1.96875)
    for exp_mode in ("exp2", "expcast"):
        got = sol_attention_fp8_emulation(q * 0.5, k, v, tau=-1000.0, exp_mode=exp_mode)
        # Logits of variance 1/4 spread a row over 2048 / e^(1/4) = 1600 keys, so the E4M3 errors
        # of P average to 2.65 % / 40 = 0.07 %: four standard deviations and half a BF16 step just
        # below 2 (2^-8 / 1.97 = 0.2 %) make 0.47 %. expcast divides by the sum of what it
        # multiplied: only FP32 steps, which BF16 rounds away.
        bound = 5e-3 if exp_mode == "exp2" else 0.0
        assert ((got.out.double() - 1.96875).abs() <= bound * 1.96875).all()


@pytest.mark.parametrize("exp_mode", ["exp2", "expcast"])
@pytest.mark.parametrize("tau", [1.0, 8.0])
def test_fp8_emulation_constant_values_routed_with_tail(make_qkv, exp_mode, tau):
    q, k, v = make_qkv(1029, dtype=BF16, spread=0.2)
    v = torch.full_like(v, -0.75)
    *_, squares = streaming(q, k, v, tau=tau)
    got = sol_attention_fp8_emulation(q, k, v, tau=tau, exp_mode=exp_mode)
    relative = (got.out.double() / -0.75 - 1).abs().amax(-1).transpose(1, 2)
    # Independent E4M3 errors of the P's average with the weights: 5 sigma of
    # 2.65 % sqrt(sum w^2) over 1029 rows, plus BF16. expcast: as above.
    noise = 5 * E4M3_RMS * squares.sqrt() if exp_mode == "exp2" else torch.zeros_like(squares)
    assert (relative <= noise + 1.01 * BF16_UNIT).all()


@pytest.mark.parametrize("tokens", [64 * 6 + 5, 64 * 6 + 32, 64 * 6])
def test_fp8_emulation_all_summary_equal_keys_average_the_values(tokens):
    # Equal K: every summary's logit is the same, P = 256 * L / 64, exact for L = 64, 32 and 5.
    # V constant in a block with values E4M3 has in units of the channel's 448: nothing rounds but
    # the output.
    q = torch.randn(1, tokens, 1, 128, generator=torch.Generator().manual_seed(0), dtype=BF16)
    k = torch.full_like(q, 0.5)
    v = torch.zeros_like(q)
    for block, value in enumerate((448.0, -320.0, 60.0, 1.0, 0.0, 96.0, -448.0)):
        v[:, 64 * block : 64 * (block + 1)] = value
    mask = random_mask(1, 1, tokens, "all-summary")
    got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
    want = v.double().mean(1, keepdim=True)
    assert ((got.out.double() - want).abs() <= 1.001 * BF16_UNIT * want.abs()).all()
    # Q's E4M3 error shifts all logits alike, hence the LSE: 5 sigma of the logit noise of a row.
    shift = got.lse[0, 0] - ((q[0, :, 0].double() @ k[0, 0, 0].double()) * SCALE + math.log(tokens))
    row_noise = SCALE * E4M3_RMS * 0.5 * q.double().square().sum(-1).sqrt().max()
    assert shift.abs().max() <= 5 * row_noise


def sink_rows(tokens, gap):
    """q, k whose logits are i.i.d. N(0, 1), and ``gap`` higher for 4 keys of the last block."""
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(tokens, 64, generator=generator)
    logits[-4:] += gap
    q, k = torch.zeros(2, 1, tokens, 1, 128)
    q[0, torch.arange(tokens), 0, torch.arange(tokens) % 64] = 128**0.5
    k[0, :, 0, :64] = logits
    return q, k


def test_fp8_emulation_probability_scale_keeps_the_light_keys():
    # The sink is visited first (descending order), as in arXiv 2606.06521: at scale 1 every later
    # key with P <= 2^-10 of it becomes 0 while the row sum still counts it, and a constant V
    # shrinks by exactly their mass. At scale 256 the limit is 2^-18.
    tokens = 1024
    q, k = sink_rows(tokens, 7.0)
    v = torch.ones_like(q)
    rounded_q, rounded_k = q.to(BF16).double(), k.to(BF16).double()
    key_tiles = [quantized(x) for x in rounded_k[0, :, 0].split(64)]
    k_used = torch.cat([codes * scale for codes, scale in key_tiles])
    logits = rounded_q[0, :, 0] @ k_used.T * SCALE
    lse, peak = logits.logsumexp(1, keepdim=True), logits.amax(1, keepdim=True)
    weights = (logits - lse).exp()
    lost = (weights * (logits - peak < -10 * math.log(2))).sum(1)
    assert lost.mean() > 0.05  # the construction does what it is for

    got = {
        s: sol_attention_fp8_emulation(q, k, v, routing=False, probability_scale=s)
        for s in (1.0, 256.0)
    }
    # What is left are E4M3 errors of the surviving P's, weighted, 5 sigma of them.
    shrink = {s: 1 - x.out[0, :, 0, 0].double() for s, x in got.items()}
    noise = E4M3_RMS * weights.square().sum(1).sqrt()
    assert ((shrink[1.0] - lost).abs() <= 5 * noise + BF16_UNIT).all()
    assert (shrink[256.0].abs() <= 5 * noise + BF16_UNIT).all()
    # In the mean they are those of four sinks, <= 2.65 % / 2, in 64 different rows: 5 sigma. Keys
    # just above the limit round up to the smallest code and give a part of the loss back.
    mean_error = 5 * E4M3_RMS / 2 / 64**0.5
    assert shrink[256.0].mean().abs() < mean_error
    assert shrink[1.0].mean() > lost.mean() / 2 > mean_error


def test_fp8_emulation_probability_scale_on_random_values(rel_l2):
    q, k = sink_rows(2048, 7.0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)) + 1.0
    operands = {"q": q, "k": k, "v": v, "mask": random_mask(1, 1, 2048, "all-exact")}
    want, *_ = streaming(*operands.values(), exp_mode="uncast")
    error = {
        s: rel_l2(
            sol_attention_fp8_emulation(q, k, v, routing=False, probability_scale=s).out, want
        )
        for s in (1.0, 256.0)
    }
    # Scale 1 loses some 10 % of a row's mass (previous test) and with it that much of mean V = 1;
    # the E4M3 error of P cannot exceed 2.65 % of what the weights carry.
    assert error[256.0] < E4M3_RMS + BF16_UNIT
    assert error[1.0] > 3 * error[256.0]


def test_fp8_emulation_default_probability_scale_is_256():
    q, k = sink_rows(256, 9.0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    got = sol_attention_fp8_emulation(q, k, v, routing=False)
    want = sol_attention_fp8_emulation(q, k, v, routing=False, probability_scale=256.0)
    other = sol_attention_fp8_emulation(q, k, v, routing=False, probability_scale=1.0)
    assert torch.equal(got.out, want.out)
    assert not torch.equal(got.out, other.out)


def test_fp8_emulation_expcast_loses_nothing_when_the_sink_is_last():
    # Bytes 1 .. 7 decode too low and what is 10.3 nats below the running maximum is lost. Blocks
    # are visited in descending order: a sink in block 0 comes last and the light keys are cast
    # before it, a sink in the last block comes first. V = 0 on the sink and 1 elsewhere makes the
    # output the mass of the light keys.
    q, k = sink_rows(1024, 9.0)
    v = torch.ones_like(q)
    v[:, -4:] = 0
    lost = {}
    for sink, keys, values in (("first", k, v), ("last", k.flip(1), v.flip(1))):
        want = sol_attention_reference(q, keys, values, routing=False).out
        got = sol_attention_fp8_emulation(q, keys, values, routing=False, exp_mode="expcast").out
        lost[sink] = 1 - (got / want).mean().item()
    # Published: 40 % of the light keys are flushed at this gap, the lightest ones; a quarter of
    # that as mass is safely below it. Sink last: E4M3 errors of 1020 keys average out to 0.1 %,
    # those of the four sinks to 2.65 % / 2 per row over 64 different rows, 5 sigma of 0.17 %;
    # ExpCast's light keys before the sink lie inside the normal range.
    assert lost["first"] > 0.1
    assert abs(lost["last"]) < 5 * 0.0017 + 0.001


@pytest.mark.parametrize("fill", ["routed", "all-exact", "all-summary"])
def test_fp8_emulation_lse_does_not_depend_on_probability_scale(make_qkv, fill):
    q, k, v = make_qkv(500, heads=2, dtype=BF16, spread=0.3)
    mask = None if fill == "routed" else random_mask(1, 2, 500, fill)
    lse = [
        sol_attention_fp8_emulation(q, k, v, exact_mask=mask, probability_scale=s).lse
        for s in (1.0, 37.0, 256.0)
    ]
    # Adding log2(scale) to an exponent above -64 rounds it by 2^-19, and so does the last
    # addition: 4 such steps.
    assert (lse[0] - lse[1]).abs().max() <= 4 * 2.0**-19
    assert (lse[0] - lse[2]).abs().max() <= 4 * 2.0**-19


@pytest.mark.parametrize("exp_mode", ["exp2", "expcast"])
@pytest.mark.parametrize("fill", ["routed", "all-summary", "all-exact"])
def test_fp8_emulation_no_code_above_256(make_qkv, monkeypatch, exp_mode, fill):
    original = emulation._OnlineSoftmax
    codes = []

    class Spy(original):
        def update(self, logits, values):
            super().update(logits, values)
            # The same columns on a state with this maximum and one-hot values give P itself.
            batch, heads, tokens, columns = logits.shape
            probe = original(logits.new_zeros(batch, tokens, heads, columns), exp_mode, 256.0)
            probe.row_max = self.row_max.clone()
            eye = torch.eye(columns).view(1, columns, 1, columns)
            probe.update(logits, eye.expand(batch, columns, heads, columns))
            codes.append(probe.acc.flatten())

    monkeypatch.setattr(emulation, "_OnlineSoftmax", Spy)
    q, k, v = make_qkv(330, heads=2, dtype=BF16, spread=1.0)
    mask = None if fill == "routed" else random_mask(1, 2, 330, fill)
    sol_attention_fp8_emulation(q, k, v, exact_mask=mask, exp_mode=exp_mode)
    codes = torch.cat(codes).double()
    assert torch.equal(codes, e4m3(codes))
    assert codes.max() == 256.0


# --- Smoothing


def grid_values(tokens, seed=0):
    """(1, T, 2, 128) multiples of 1/16 in -4 .. 4: BF16 holds them, and them plus 8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (1, tokens, 2, 128), generator=generator).float() / 16


def test_fp8_emulation_block_smoothing_keeps_the_residuals(make_qkv, rel_l2):
    """Keys that differ from block to block by more than within one: E4M3 keeps the small part."""
    q, k, v = make_qkv(330, heads=2, dtype=BF16)
    shift = 8 * torch.randn(1, 6, 2, 128, generator=torch.Generator().manual_seed(2))
    k = (k.float() + shift.repeat_interleave(64, 1)[:, :330]).to(BF16)
    q = q / 8
    mask = random_mask(1, 2, 330, "all-exact")
    want = sol_attention_reference(*(x.float() for x in (q, k, v)), exact_mask=mask)
    plain, block = (
        sol_attention_fp8_emulation(q, k, v, exact_mask=mask, k_smoothing=name)
        for name in ("none", "block")
    )
    # LSE errs by the keys' logits: 2.65 % of 8 without, of 1 with; the summary's own error, of the
    # mean key, never reaches an exact token: what it lost is in the residual.
    error, plain_error = ((x.lse - want.lse).square().mean().sqrt() for x in (block, plain))
    assert rel_l2(block.out, want.out) < rel_l2(plain.out, want.out)
    assert error < plain_error


# Subtracting an FP32 mean leaves each smoothed value off by ~1e-6, so ~1e-5 of the codes flip by
# a step of 6 .. 12 %: relative L2 below 1e-3. Two BF16 roundings of outputs come on top.
SAME_CODES = 1e-3


def test_fp8_emulation_k_smoothing_removes_a_constant_in_keys(make_qkv, rel_l2):
    q, _, v = make_qkv(330, heads=2, dtype=BF16, spread=0.3)
    k = grid_values(330)
    offset = torch.tensor([8.0, -8.0] * 64)
    plain, moved = (
        sol_attention_fp8_emulation(q, x, v, k_smoothing="mean") for x in (k, k + offset)
    )
    assert torch.equal(plain.exact_mask, moved.exact_mask)
    assert rel_l2(moved.out, plain.out) <= SAME_CODES + 2 * BF16_UNIT
    # One in 1e5 codes of K flips by ~9 %; a row sees 330 * 128 of them, less than one flip, of one
    # product (|q k| s ~ 0.2) of one key (weight 1/330 .. 1/3): far below 1e-3 in the mean of rows.
    shift = (q.double() * offset).sum(-1).transpose(1, 2) * SCALE
    assert shift.square().mean().sqrt() > 1
    assert (moved.lse - plain.lse - shift).square().mean().sqrt() <= 1e-3
    # Without smoothing the offset takes E4M3's range and the keys drown.
    rough = sol_attention_fp8_emulation(q, k + offset, v)
    want = sol_attention_reference(*(x.float() for x in (q, k, v)), exact_mask=plain.exact_mask)
    assert rel_l2(rough.out, want.out) > 2 * rel_l2(moved.out, want.out)


def test_fp8_emulation_k_smoothing_changes_noise_only(make_qkv, rel_l2):
    q, k, v = make_qkv(500, heads=2, dtype=BF16, spread=0.2)
    k = k + 0.5
    mask = random_mask(1, 2, 500)
    plain, smooth = (
        sol_attention_fp8_emulation(q, k, v, k_smoothing=name, exact_mask=mask)
        for name in ("none", "mean")
    )
    # Two outputs that each carry the E4M3 error derived in test_..._error_is_that_of_e4m3; V and
    # its error are common.
    noise = logit_noise(q, k)
    assert rel_l2(smooth.out, plain.out) < 1.5 * math.sqrt(2 * (noise**2 + E4M3_RMS**2))
    assert (smooth.lse - plain.lse).square().mean().sqrt() < 1.5 * math.sqrt(2) * noise


@pytest.mark.parametrize("correction", [False, True], ids=["plain", "corrected"])
def test_fp8_emulation_v_smoothing_adds_a_constant_in_values(make_qkv, correction):
    q, k, _ = make_qkv(330, heads=2, dtype=BF16, spread=0.3)
    v = grid_values(330)
    plain, moved = (
        sol_attention_fp8_emulation(
            q, k, x, v_smoothing="mean", v_bias_correction=correction
        ).out.double()
        for x in (v, v + 8.0)
    )
    # Outputs of 4 .. 12 round to BF16 by half a step of 2^-4 at most, those below 4 by 2^-7; a
    # flipped code moves V by a step: <= 1/8 of <= 4, and a key has less than a quarter of a row.
    assert (moved - plain - 8.0).abs().max() <= 2.0**-5 + 2.0**-7 + 4 / 8 / 4
    # Rounding errors are uniform, and flips are rare.
    assert (moved - plain - 8.0).square().mean().sqrt() <= (2.0**-5 + 2.0**-7) / 3**0.5


def test_fp8_emulation_v_smoothing_keeps_a_constant_exactly(make_qkv):
    q, k, v = make_qkv(330, dtype=BF16, spread=0.3)
    v = torch.full_like(v, 0.7)
    for correction in (False, True):
        got = sol_attention_fp8_emulation(q, k, v, v_smoothing="mean", v_bias_correction=correction)
        # The FP32 mean may miss the constant by some units of 2^-24, far inside a BF16 step.
        assert torch.equal(got.out, v)


def test_fp8_emulation_v_bias_correction_restores_the_mean():
    # Q = K = 0: every key weighs the same and P is a power of two or 256 * L / 64, so the output
    # is the mean of V as the kernel sees it.
    tokens = 256
    generator = torch.Generator().manual_seed(4)
    v = torch.randn(1, tokens, 1, 128, generator=generator, dtype=BF16).float()
    # Three quarters of the tokens on one value, so that its rounding error does not average out.
    v[:, : 3 * tokens // 4] = 0.3
    v = v.to(BF16)
    zero = torch.zeros_like(v)
    mean = v.double().mean(1, keepdim=True)
    smooth = v.double()[0, :, 0] - mean[0, 0, 0]
    scale = smooth.abs().amax(0) / 448
    left = (e4m3(smooth / scale) * scale).mean(0)  # mean of what should have none
    got = {
        on: sol_attention_fp8_emulation(
            zero, zero, v, routing=False, v_smoothing="mean", v_bias_correction=on
        ).out.double()
        for on in (False, True)
    }
    # BF16 rounding of the output, and for codes that an FP32 mean flips one step in 256 tokens.
    slack = BF16_UNIT * (mean.abs() + left.abs()) + 1e-5
    assert ((got[True] - mean).abs() <= slack).all()
    assert ((got[False] - mean - left).abs() <= slack).all()
    # Else one output could satisfy both lines above.
    assert left.abs().max() > 2 * slack.max()


@pytest.mark.parametrize(
    ("blocks", "stride"), [(1, 1), (63, 1), (64, 3), (510, 15), (512, 17), (1182, 37)]
)
def test_sample_stride(blocks, stride):
    assert sample_stride(blocks) == stride


def test_sampled_mean_looks_at_every_so_many_th_block(make_qkv):
    _, _, x = make_qkv(4171, heads=2)
    sample = (
        torch.arange(4171) // 64 % 3 == 0
    )  # 66 blocks, the last of 11 tokens and not among them
    got = sampled_mean(x)
    assert got.shape == (1, 1, 2, 128)
    assert (got - x.double()[:, sample].mean(1, keepdim=True)).abs().max() <= 1e-6
    assert (got - x.double().mean(1, keepdim=True)).abs().max() > 1e-3
    x[:, ~sample] = math.nan
    assert torch.equal(sampled_mean(x), got)


# --- Splits


def test_fp8_emulation_splits_agree(make_qkv, rel_l2):
    q, k, v = make_qkv(4171, dtype=BF16, spread=0.2)  # 66 blocks: two groups of 64
    one, two, four = (sol_attention_fp8_emulation(q, k, v, kv_splits=n) for n in (1, 2, 4))
    assert torch.equal(one.exact_mask, two.exact_mask)
    assert not torch.equal(one.out, two.out)
    # Another running maximum means another rounding of P: two independent E4M3 errors, and the
    # partial outputs are rounded to BF16.
    assert rel_l2(two.out, one.out) <= 2**0.5 * E4M3_RMS + 2 * BF16_UNIT
    # FP32 log-sum-exps below 16 of the same logits: a few units of 2^-20.
    assert (two.lse - one.lse).abs().max() <= 8 * 2.0**-20
    # Four splits of two groups are two splits and two empty ones.
    assert torch.equal(four.out, two.out) and torch.equal(four.lse, two.lse)


@pytest.mark.parametrize("tokens", [1, 500])
def test_fp8_emulation_one_group_cannot_be_split(make_qkv, tokens):
    q, k, v = make_qkv(tokens, dtype=BF16, spread=0.2)
    one, four = (sol_attention_fp8_emulation(q, k, v, kv_splits=n) for n in (1, 4))
    assert torch.equal(one.out, four.out) and torch.equal(one.lse, four.lse)


# --- Hostile inputs


@pytest.mark.parametrize("size", [1e4, 1e-3, 1e-12])
@pytest.mark.parametrize("exp_mode", ["exp2", "expcast"])
def test_fp8_emulation_is_finite_at_any_size(make_qkv, size, exp_mode):
    q, k, v = (size * x for x in make_qkv(300, heads=2, spread=1.0))
    smoothing = {"k_smoothing": "mean", "v_smoothing": "mean", "v_bias_correction": True}
    for options in ({}, {"routing": False}, {"tau": 8.0}, smoothing):
        got = sol_attention_fp8_emulation(q, k, v, exp_mode=exp_mode, **options)
        assert got.out.isfinite().all() and got.lse.isfinite().all()
        # An average of V lies within it, up to the E4M3 error of P (1/17) and V and BF16.
        assert got.out.abs().max() <= 1.13 * v.abs().max()


def test_fp8_emulation_zero_blocks_and_channels(make_qkv, rel_l2):
    q, k, v = make_qkv(330, heads=2, dtype=BF16, spread=0.3)
    q[:, 64:128], k[:, 192:256], k[:, 320:], v[:, 128:192], v[..., 5] = 0, 0, 0, 0, 0
    for fill in ("random", "all-summary", "all-exact"):
        mask = random_mask(1, 2, 330, fill)
        out, lse, _, _ = streaming(q, k, v, mask)
        got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
        assert rel_l2(got.out, out.to(BF16)) < SAME_ROUNDINGS
        assert (got.lse - lse).abs().max() < same_lse()
        assert (got.out[..., 5] == 0).all()


def test_fp8_emulation_outlier_spoils_only_what_shares_its_scale(make_qkv):
    q, k, v = make_qkv(330, heads=2, dtype=BF16, spread=0.3)
    mask = random_mask(1, 2, 330)
    plain = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)

    def spoilt(index, position, value=1e4):
        inputs = [x.clone() for x in (q, k, v)]
        inputs[index][position] = value
        return sol_attention_fp8_emulation(*inputs, exact_mask=mask)

    # Q: one scale per 64-token block. Half of all values in it become 0 codes.
    got = spoilt(0, (0, 70, 0, 3))
    others = torch.ones(330, dtype=torch.bool)
    others[64:128] = False
    assert torch.equal(got.out[:, others], plain.out[:, others])
    assert torch.equal(got.out[:, :, 1], plain.out[:, :, 1])
    assert not torch.equal(got.out[:, 64:128, 0], plain.out[:, 64:128, 0])
    # K: no other head. V: no other channel.
    got = spoilt(1, (0, 70, 0, 3))
    assert torch.equal(got.out[:, :, 1], plain.out[:, :, 1])
    assert got.out.isfinite().all()
    got = spoilt(2, (0, 70, 0, 3))
    assert torch.equal(got.out[:, :, 1], plain.out[:, :, 1])
    assert torch.equal(got.out[..., :3], plain.out[..., :3])
    assert torch.equal(got.out[..., 4:], plain.out[..., 4:])
    assert torch.equal(got.lse, plain.lse)


def test_fp8_emulation_one_outlier_in_keys(make_qkv, rel_l2):
    q, k, v = make_qkv(330, dtype=BF16)
    k[0, 70, 0, 3] = 100.0  # 25 times the next: E4M3 keeps 2.65 % of the small ones all the same
    mask = random_mask(1, 1, 330, "all-exact")
    want = sol_attention_reference(*(x.float() for x in (q, k, v)), exact_mask=mask)
    got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask)
    # Smallest normal is 100 / 448 / 64 = 0.0035, so nearly all values keep their 3 bits. The
    # outlier's own logit (|q| * 100 * s = 9 |q|) errs by up to 2 * 1/17 of itself in each row:
    # leave the rows out that give it more than 1 % of their weight.
    weight = ((q[0, :, 0].float() @ k[0, 70, 0].float()) * SCALE - want.lse[0, 0]).exp()
    rows = weight < 0.01
    assert rows.sum() > 100
    clean = k.clone()
    clean[0, 70] = 0
    expected = math.sqrt(logit_noise(q, clean) ** 2 + 3 * E4M3_RMS**2)
    assert rel_l2(got.out[:, rows], want.out[:, rows]) < 1.5 * expected


def test_fp8_emulation_stays_inside_its_inputs(make_qkv):
    clean = make_qkv(150, batch=2, heads=2, dtype=BF16, spread=0.3)
    poisoned = []
    for x in clean:
        buffer = torch.full((4, 230, 5, 160), math.nan, dtype=BF16)
        buffer[1:3, 40:190, 2:4, 16:144] = x
        poisoned.append(buffer[1:3, 40:190, 2:4, 16:144])
    smoothing = {"k_smoothing": "mean", "v_smoothing": "mean", "v_bias_correction": True}
    for options in ({}, smoothing, {"routing": False, "exp_mode": "expcast"}):
        got = sol_attention_fp8_emulation(*poisoned, **options)
        want = sol_attention_fp8_emulation(*clean, **options)
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


# --- Roundings of the SM90 kernel


def test_fp8_emulation_cast_row_sums_keep_a_constant_value(make_qkv):
    """Numerator and denominator hold the same rounded probabilities: they cancel."""
    q, k, v = make_qkv(330, heads=2, dtype=BF16, spread=1.0)
    v = torch.full_like(v, 3.0)
    off = {}
    for sums in ("exact", "cast"):
        out = sol_attention_fp8_emulation(q, k, v, tau=0.5, row_sums=sums).out
        off[sums] = (out.float() / 3.0 - 1).abs().max().item()
    assert off["cast"] <= 2.0**-9  # FP32 sums of the same terms, and the output in BF16
    assert off["exact"] > 2.0**-8  # a row with few large probabilities shows their rounding


def test_fp8_emulation_whole_maximum_does_not_depend_on_when_it_moves(make_qkv, rel_l2):
    """Probabilities of normal size have the same codes under any whole maximum."""
    q, k, v = make_qkv(320, heads=1, dtype=BF16)
    options = {"exact_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool), "row_sums": "cast"}
    # With the blocks the other way round, a row meets its maximum at another time.
    back = [x.unflatten(1, (5, 64)).flip(1).flatten(1, 2) for x in (k, v)]
    results = {
        whole: [
            sol_attention_fp8_emulation(q, *pair, **options, whole_maximum=whole).out.float()
            for pair in ((k, v), back)
        ]
        for whole in (True, False)
    }
    # Left are products below E4M3's normal numbers, 2^-14 of the maximum, and FP32 sums.
    assert rel_l2(*results[True]) <= 2e-3
    assert rel_l2(*results[False]) > 5e-3


@pytest.mark.parametrize("name", ["row_sums", "exp_mode"])
def test_fp8_emulation_rejects_unknown_roundings(make_qkv, name):
    with pytest.raises(ValueError, match=f"{name}: got 'other', need"):
        sol_attention_fp8_emulation(*make_qkv(64), **{name: "other"})
