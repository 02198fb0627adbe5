"""The Sol-Attn specification against dense attention, closed forms and a naive loop."""

import itertools
import math

import pytest
import torch

from hopper_sol.kernels.sol_attn import reference
from hopper_sol.kernels.sol_attn.reference import (
    attend,
    block_lengths,
    block_mean,
    block_scores,
    forced_blocks,
    num_blocks,
    route_mask,
    route_threshold,
    sol_attention_reference,
)

ODD_TOKENS = (1, 63, 64, 65, 130, 1000, 4171)
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LOG2E = 1.4426950408889634


# --- An independent specification: Python loops over batch, head, query block and key block.


def naive(q, k, v, *, tau, estimator, scale, sink_kv=(), dense_q=(), mask=None):
    """threshold (B, H, NT), scores and mask (B, H, NT, NT), out (B, T, H, D), lse (B, H, T)."""
    q, k, v = q.double(), k.double(), v.double()
    batch, tokens, heads, _ = q.shape
    spans = [(start, min(start + 64, tokens)) for start in range(0, tokens, 64)]
    count = len(spans)
    threshold = torch.zeros(batch, heads, count, dtype=torch.float64)
    scores = torch.zeros(batch, heads, count, count, dtype=torch.float64)
    used = torch.zeros(batch, heads, count, count, dtype=torch.bool)
    out = torch.zeros_like(q)
    lse = torch.zeros(batch, heads, tokens, dtype=torch.float64)

    def touches(span, ranges):
        return any(start < span[1] and span[0] < stop for start, stop in ranges)

    for b in range(batch):
        for h in range(heads):
            queries = [q[b, start:stop, h] for start, stop in spans]
            keys = [k[b, start:stop, h] for start, stop in spans]
            values = [v[b, start:stop, h] for start, stop in spans]
            key_means = [x.sum(0) / len(x) for x in keys]
            value_means = [x.sum(0) / len(x) for x in values]
            channel_mean = sum(key_means) / count
            channel_var = sum((m - channel_mean) ** 2 for m in key_means) / count
            for i in range(count):
                query_mean = queries[i].sum(0) / len(queries[i])
                row = [scale * LOG2E * float(query_mean @ m) for m in key_means]
                mean = sum(row) / count
                if estimator == "exact":
                    var = sum((x - mean) ** 2 for x in row) / count
                else:
                    var = float(((scale * LOG2E * query_mean) ** 2 * channel_var).sum())
                threshold[b, h, i] = mean + tau * math.sqrt(var + 1e-6)
                columns, contents = [], []
                for j in range(count):
                    scores[b, h, i, j] = row[j]
                    if mask is None:
                        exact = row[j] > threshold[b, h, i] or abs(i - j) <= 1
                        exact = exact or touches(spans[j], sink_kv) or touches(spans[i], dense_q)
                    else:
                        exact = bool(mask[b, h, i, j])
                    used[b, h, i, j] = exact
                    if exact:
                        columns.append(scale * queries[i] @ keys[j].T)
                        contents.append(values[j])
                    else:
                        logit = scale * queries[i] @ key_means[j] + math.log(len(keys[j]))
                        columns.append(logit.unsqueeze(1))
                        contents.append(value_means[j].unsqueeze(0))
                logits = torch.cat(columns, 1)
                start, stop = spans[i]
                out[b, start:stop, h] = logits.softmax(1) @ torch.cat(contents)
                lse[b, h, start:stop] = logits.logsumexp(1)
    return threshold, scores, used, out, lse


def dense(q, k, v, scale):
    """torch's own attention, in (B, T, H, D), and the log-sum-exp of its logits."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale)
    lse = (heads_first[0] @ heads_first[1].transpose(2, 3) * scale).logsumexp(-1)
    return out.transpose(1, 2), lse


def band(count):
    """Own block and both neighbours."""
    return torch.ones(count, count, dtype=torch.bool).tril(1).triu(-1)


# --- Dense limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("how", [{"tau": -1000.0}, {"routing": False}], ids=["tau", "routing"])
@pytest.mark.parametrize("tokens", ODD_TOKENS)
def test_sol_attention_reference_dense_equals_sdpa(make_qkv, rounding_bound, tokens, how, dtype):
    heads = 1 if tokens > 1000 else 2
    q, k, v = make_qkv(tokens, heads=heads, dim=32, dtype=dtype, seed=tokens)
    got = sol_attention_reference(q, k, v, **how)
    want, want_lse = dense(q, k, v, 32**-0.5)
    out_bound, lse_bound = rounding_bound(q, k, v, 32**-0.5, UNIT[dtype])
    # Both sides round: twice the bound of one.
    assert (got.out - want).abs().max() <= 2 * out_bound
    assert (got.lse - want_lse).abs().max() <= 2 * lse_bound
    assert got.exact_mask.all()
    assert got.out.dtype == got.lse.dtype == dtype


def test_sol_attention_reference_routing_off_overrides_tau(make_qkv):
    q, k, v = make_qkv(300, dim=16, spread=1.0)
    off = sol_attention_reference(q, k, v, tau=8.0, routing=False)
    assert off.exact_mask.all()
    assert torch.equal(off.out, sol_attention_reference(q, k, v, tau=-1000.0).out)


# --- Against the naive loop

ROUTED = {
    "tail": {"tokens": 300},
    "aligned": {"tokens": 320},
    "one-token": {"tokens": 1},
    "one-block": {"tokens": 63},
    "two-blocks": {"tokens": 65},
    "thousand": {"tokens": 1000},
    "tau0": {"tokens": 500, "tau": 0.0},
    "tau-negative": {"tokens": 500, "tau": -0.5},
    "tau8-forced-only": {"tokens": 580, "tau": 8.0},
    "sink-front": {"tokens": 580, "sink_kv": ((0, 70),)},
    "sink-back": {"tokens": 580, "sink_kv": ((570, 580),)},
    "sinks-both-ends": {"tokens": 580, "tau": 8.0, "sink_kv": ((0, 1), (575, 577))},
    "dense-rows": {"tokens": 580, "tau": 8.0, "dense_q": ((100, 130),)},
    "dense-tail-row": {"tokens": 580, "tau": 8.0, "dense_q": ((579, 580),)},
    "all-of-it": {"tokens": 580, "sink_kv": ((0, 64), (520, 521)), "dense_q": ((0, 65),)},
    "scale": {"tokens": 300, "scale": 0.4},
}


@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("case", ROUTED)
def test_sol_attention_reference_equals_naive_loop(make_qkv, rounding_bound, case, estimator):
    options = {"tau": 1.0, "scale": 16**-0.5, **ROUTED[case], "estimator": estimator}
    tokens = options.pop("tokens")
    q, k, v = make_qkv(tokens, batch=2, heads=2, dim=16, dtype=torch.float64, spread=0.5, seed=3)
    threshold, scores, mask, out, lse = naive(q, k, v, **options)
    got = sol_attention_reference(q, k, v, **options)

    route = {key: options[key] for key in ("tau", "estimator", "scale")}
    means = block_mean(q), block_mean(k)
    # FP64 sums of at most 1000 terms of size < 100, divided by a sigma of at least 1e-3:
    # 1000 * 2^-53 * 100 / 1e-3 is the worst case there is, 1.2e-8.
    assert (route_threshold(*means, **route) - threshold).abs().max() < 1.2e-8
    assert (block_scores(*means, options["scale"]) - scores).abs().max() < 1.2e-8
    assert torch.equal(got.exact_mask, mask)
    out_bound, lse_bound = rounding_bound(q, k, v, options["scale"], UNIT[torch.float64])
    assert (got.out - out).abs().max() <= 2 * out_bound
    assert (got.lse - lse).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_equals_naive_loop_long(make_qkv, rounding_bound):
    q, k, v = make_qkv(4171, dim=16, dtype=torch.float64, spread=0.5, seed=5)
    options = {"tau": 1.0, "estimator": "diag", "scale": 0.25, "sink_kv": ((0, 3),)}
    _, _, mask, out, lse = naive(q, k, v, **options)
    got = sol_attention_reference(q, k, v, **options)
    assert torch.equal(got.exact_mask, mask)
    assert 0.05 < mask.float().mean() < 0.35  # a routed case, neither dense nor forced only
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    assert (got.out - out).abs().max() <= 2 * out_bound
    assert (got.lse - lse).abs().max() <= 2 * lse_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("fill", ["random", "all-summary", "all-exact"])
@pytest.mark.parametrize("tokens", [1, 63, 130, 500])
def test_sol_attention_reference_takes_a_mask(make_qkv, rounding_bound, tokens, fill, dtype):
    q, k, v = make_qkv(tokens, batch=2, heads=2, dim=16, dtype=dtype, seed=7)
    count = num_blocks(tokens)
    mask = torch.rand(2, 2, count, count, generator=torch.Generator().manual_seed(1)) > 0.5
    if fill != "random":
        mask = torch.full_like(mask, fill == "all-exact")
    *_, out, lse = naive(q, k, v, tau=1.0, estimator="diag", scale=0.25, mask=mask)
    # Everything that would otherwise decide is given, and must lose.
    got = sol_attention_reference(
        q, k, v, tau=-1000.0, scale=0.25, sink_kv=((0, 1),), dense_q=((0, 1),), exact_mask=mask
    )
    assert torch.equal(got.exact_mask, mask)
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[dtype])
    assert (got.out - out).abs().max() <= 2 * out_bound
    assert (got.lse - lse).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_survives_large_logits(make_qkv, rounding_bound):
    q, k, v = make_qkv(200, dim=16, dtype=torch.float64)
    q = q * 1e4  # logits of +-1e5: exp of them overflows even FP64
    options = {"tau": 1.0, "estimator": "diag", "scale": 0.25}
    _, _, mask, out, lse = naive(q, k, v, **options)
    got = sol_attention_reference(q, k, v, **options)
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    assert torch.equal(got.exact_mask, mask)
    assert (got.out - out).abs().max() <= 2 * out_bound
    assert (got.lse - lse).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_default_scale(make_qkv):
    q, k, v = make_qkv(200, dim=16)
    default = sol_attention_reference(q, k, v)
    explicit = sol_attention_reference(q, k, v, scale=0.25)
    assert torch.equal(default.out, explicit.out)
    assert torch.equal(default.lse, explicit.lse)


# --- Closed forms


@pytest.mark.parametrize("tokens", [64 * 4 + 5, 64 * 5, 5])
def test_sol_attention_reference_zero_logits_average_all_values(make_qkv, tokens):
    _, _, v = make_qkv(tokens, heads=2, dim=8, dtype=torch.float64)
    zero = torch.zeros_like(v)
    got = sol_attention_reference(zero, zero, v, tau=1.0)
    # Every token counts once, as itself or through its block: out = mean of V, LSE = ln T.
    # FP64 averages of <= 320 values below 6: 2 * 320 * 2^-53 * 6 < 5e-13.
    assert (got.out - v.mean(1, keepdim=True)).abs().max() < 5e-13
    assert (got.lse - math.log(tokens)).abs().max() < 5e-13
    assert torch.equal(got.exact_mask[0, 0], band(num_blocks(tokens)))


@pytest.mark.parametrize("tokens", [64 * 5 + 7, 64 * 5 + 63])
def test_sol_attention_reference_weighs_the_tail_by_its_length(tokens):
    zero = torch.zeros(1, tokens, 1, 4, dtype=torch.float64)
    v = zero.clone()
    v[:, 320:] = 1.0  # the last, partial block only
    got = sol_attention_reference(zero, zero, v, tau=1.0)
    assert not got.exact_mask[0, 0, 0, -1]
    # A handful of FP64 roundings of a number below 1.
    assert (got.out - (tokens - 320) / tokens).abs().max() < 1e-14


@pytest.mark.parametrize("sinks", [(), ((64, 65),), ((200, 320),)], ids=["none", "one", "two"])
def test_sol_attention_reference_alternating_keys(sinks):
    tokens = 64 * 7 + 5
    x = torch.zeros(1, tokens, 1, 1, dtype=torch.float64)
    x[:, : 64 * 7 : 2], x[:, 1 : 64 * 7 : 2] = 1.0, -1.0  # the tail stays 0
    got = sol_attention_reference(torch.ones_like(x), x, x, tau=4.0, scale=1.0, sink_kv=sinks)
    sink_blocks = {b for start, stop in sinks for b in range(start // 64, (stop - 1) // 64 + 1)}
    for block in range(8):
        exact = {b for b in (block - 1, block, block + 1) if 0 <= b < 7} | sink_blocks
        n = 64 * len(exact)
        # Half of the n tokens weigh e, half 1/e; a summary of +-1 has logit and value 0.
        want = n * math.sinh(1) / (n * math.cosh(1) + tokens - n)
        rows = got.out[0, 64 * block : 64 * (block + 1), 0, 0]
        # Sums of < 500 FP64 terms below e: 500 * e * 2^-53 / (sum > 500) is far below 1e-13.
        assert (rows - want).abs().max() < 1e-13, block


def test_route_threshold_by_hand():
    # D = 1, two key blocks of mean +1 and -1, three query means. mean 0, population variance 1
    # (dividing by NT - 1 would give 2). log2-scale: s2 = scale * log2(e).
    k_mean = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
    q_mean = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64).view(1, 3, 1, 1)
    for estimator in ("diag", "exact"):
        got = route_threshold(q_mean, k_mean, tau=1.5, estimator=estimator, scale=0.5)
        want = [1.5 * math.sqrt((0.5 * LOG2E * q) ** 2 + 1e-6) for q in (0.0, 2.0, -3.0)]
        # A few FP64 roundings of numbers below 4.
        assert got.flatten().tolist() == pytest.approx(want, rel=1e-14, abs=0)


def test_route_threshold_diag_drops_covariance():
    # Two fully correlated channels: scores are 2 x, so exact has twice the variance of diag.
    k_mean = torch.tensor([[3.0, 3.0], [-3.0, -3.0]], dtype=torch.float64).view(1, 2, 1, 2)
    q_mean = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    diag, exact = (
        route_threshold(q_mean, k_mean, tau=1.0, estimator=name, scale=1 / LOG2E).item()
        for name in ("diag", "exact")
    )
    assert diag == pytest.approx(math.sqrt(18 + 1e-6), rel=1e-14)
    assert exact == pytest.approx(math.sqrt(36 + 1e-6), rel=1e-14)


def test_route_threshold_counts_every_block_once():
    # A one-token tail block weighs as much in the population as a full block.
    k = torch.zeros(1, 129, 1, 1, dtype=torch.float64)
    k[:, 128] = 3.0
    q = torch.ones_like(k)
    got = route_threshold(block_mean(q), block_mean(k), tau=0.0, estimator="diag", scale=1 / LOG2E)
    assert got.flatten().tolist() == pytest.approx([1.0] * 3, rel=1e-14)


def test_route_threshold_rejects_unknown_estimator(make_qkv):
    q, k, v = make_qkv(65, dim=4)
    with pytest.raises(ValueError, match=r"estimator: got 'second', need 'diag' or 'exact'"):
        sol_attention_reference(q, k, v, estimator="second")


@pytest.mark.parametrize("tokens", ODD_TOKENS)
def test_block_mean_divides_by_real_tokens(make_qkv, tokens):
    _, _, x = make_qkv(tokens, batch=2, dim=3, dtype=torch.float64)
    lengths = [min(64, tokens - start) for start in range(0, tokens, 64)]
    assert block_lengths(tokens).tolist() == lengths
    assert num_blocks(tokens) == len(lengths)
    want = torch.stack([part.mean(1) for part in x.split(64, 1)], 1)
    # FP64 means of 64 values below 6: 64 * 2^-53 * 6.
    assert (block_mean(x) - want).abs().max() < 4.3e-14
    assert torch.equal(block_mean(torch.ones_like(x)), torch.ones_like(want))


# --- Decision


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_sol_attention_reference_needs_a_score_strictly_above(value, estimator):
    # Equal keys: score and threshold at tau = 0 are the same product q * k * s2, bit by bit
    # (D = 1, powers of two), so nothing is above the threshold.
    k = torch.full((1, 400, 1, 1), value)
    q = torch.ones_like(k)
    means = block_mean(q), block_mean(k)
    threshold = route_threshold(*means, tau=0.0, estimator=estimator, scale=1.0)
    assert torch.equal(block_scores(*means, 1.0), threshold.unsqueeze(-1).expand(1, 1, 7, 7))
    got = sol_attention_reference(q, k, k, tau=0.0, estimator=estimator, scale=1.0)
    assert torch.equal(got.exact_mask[0, 0], band(7))
    below = sol_attention_reference(q, k, k, tau=-1e-3, estimator=estimator, scale=1.0)
    assert below.exact_mask.all()


def test_route_threshold_has_a_floor_under_sigma():
    zero = torch.zeros(1, 3, 1, 4, dtype=torch.float64)
    for tau in (-2.0, 1.0, 4.0):
        got = route_threshold(zero, zero, tau=tau, estimator="diag", scale=1.0)
        # sqrt(1e-6) standard deviations in log2 units whatever the scale.
        assert got.flatten().tolist() == pytest.approx([tau * 1e-3] * 3, rel=1e-14)


@pytest.mark.parametrize("tokens", [1, 64, 65, 130, 500])
def test_forced_blocks_band(tokens):
    assert torch.equal(forced_blocks(tokens), band(-(-tokens // 64)))


@pytest.mark.parametrize(
    ("token_range", "blocks"),
    [
        ((0, 1), {0}),
        ((0, 64), {0}),
        ((63, 65), {0, 1}),
        ((64, 128), {1}),
        ((100, 193), {1, 2, 3}),
        ((320, 321), {5}),
        ((389, 390), {6}),
        ((300, 390), {4, 5, 6}),
        ((0, 390), set(range(7))),
    ],
    ids=str,
)
def test_forced_blocks_ranges_act_on_every_block_they_touch(token_range, blocks):
    inside = torch.tensor([b in blocks for b in range(7)])
    sink = forced_blocks(390, sink_kv=(token_range,))
    assert torch.equal(sink, band(7) | inside.unsqueeze(0))
    rows = forced_blocks(390, dense_q=(token_range,))
    assert torch.equal(rows, band(7) | inside.unsqueeze(1))


def test_sol_attention_reference_sink_over_everything_is_dense(make_qkv):
    q, k, v = make_qkv(300, dim=16, spread=1.0)
    all_sink = sol_attention_reference(q, k, v, tau=8.0, sink_kv=((0, 300),))
    assert torch.equal(all_sink.out, sol_attention_reference(q, k, v, routing=False).out)


def test_sol_attention_reference_dense_rows_are_sdpa_rows(make_qkv, rounding_bound):
    q, k, v = make_qkv(500, dim=16, dtype=torch.float64, spread=0.5)
    plain = sol_attention_reference(q, k, v, tau=8.0)
    got = sol_attention_reference(q, k, v, tau=8.0, dense_q=((130, 140), (499, 500)))
    want, _ = dense(q, k, v, 0.25)
    rows = torch.zeros(500, dtype=torch.bool)
    rows[128:192] = rows[448:] = True  # the blocks that hold them
    out_bound, _ = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    assert (got.out - want)[:, rows].abs().max() <= 2 * out_bound
    assert torch.equal(got.out[:, ~rows], plain.out[:, ~rows])
    assert (plain.out - want)[:, rows].abs().max() > 1e-3  # dense_q had something to do


def test_sol_attention_reference_density_falls_with_tau(make_qkv):
    q, k, v = make_qkv(1000, heads=2, dim=16, spread=0.5)
    masks = [
        sol_attention_reference(q, k, v, tau=tau).exact_mask
        for tau in (-1000.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 8.0)
    ]
    for looser, stricter in itertools.pairwise(masks):
        assert not (stricter & ~looser).any()
    assert masks[0].all()
    assert torch.equal(masks[-1][0, 0], band(16))
    assert len({mask.sum().item() for mask in masks}) > 4


@pytest.mark.parametrize("ratio", [0.0, 16.0, 256.0])
@pytest.mark.parametrize("aligned", [False, True], ids=["random-q", "q-along-mean"])
def test_route_threshold_exact_sigma_is_the_spread_of_scores(ratio, aligned):
    # fp32 means; |mean K| is ``ratio`` times the typical distance of a block mean from it.
    generator = torch.Generator().manual_seed(11)
    k_mean = torch.randn(1, 64, 2, 128, generator=generator)
    direction = torch.randn(1, 1, 2, 128, generator=generator)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    k_mean = k_mean + ratio * 128**0.5 * direction
    q_mean = torch.randn(1, 64, 2, 128, generator=generator)
    if aligned:
        q_mean = q_mean * 0.3 + 128**0.5 * direction
    scale = 128**-0.5

    scores = block_scores(q_mean.double(), k_mean.double(), scale)
    want_mean, want_sigma = scores.mean(-1), (scores.var(-1, unbiased=False) + 1e-6).sqrt()
    at = {
        tau: route_threshold(q_mean, k_mean, tau=tau, estimator="exact", scale=scale).double()
        for tau in (0.0, 8.0)
    }
    sigma = (at[8.0] - at[0.0]) / 8
    # mean: a dot of 128 terms of size |q| |mu| s2, so 8 sqrt(128) units of that. sigma: a
    # quadratic form of 128^2 terms of either sign whose absolute sum is ~ 128 / sqrt(64) times
    # its value: 8 * 128 * 16 units, half of it after the root; plus the two roundings of the
    # thresholds, 2 units of |mean| / 8. A raw second moment would lose ratio^2 * 128 more.
    unit = 2.0**-24
    size = q_mean.norm(dim=-1).max() * k_mean.mean(1).norm(dim=-1).max() * scale * LOG2E
    assert ((at[0.0] - want_mean).abs().max() <= 8 * (128**0.5 + 4) * unit * size).item()
    allowed = 8 * 128 * 16 / 2 * unit * want_sigma + 2 * unit * want_mean.abs() / 8
    assert ((sigma - want_sigma).abs() <= allowed).all()


@pytest.mark.parametrize("ratio", [0.0, 16.0, 1000.0])
def test_route_threshold_diag_sigma_survives_a_large_mean(ratio):
    generator = torch.Generator().manual_seed(12)
    k_mean = torch.randn(1, 64, 1, 128, generator=generator) + ratio
    q_mean = torch.randn(1, 64, 1, 128, generator=generator)
    got = [
        route_threshold(q_mean, k_mean, tau=tau, estimator="diag", scale=1.0).double()
        for tau in (0.0, 8.0)
    ]
    variance = k_mean.double().var(1, unbiased=False, keepdim=True)
    want = ((q_mean.double().square() * variance).sum(-1) * LOG2E**2 + 1e-6).sqrt().transpose(1, 2)
    # Sums of non-negative terms: 8 sqrt(64 + 128) units at most. The mean of 64 keys of size
    # ``ratio`` errs by a few units of it and shifts the variance only by its square; the two
    # thresholds round by a unit of the mean score each.
    unit = 2.0**-24
    allowed = 8 * 14 * unit * want + 2 * unit * got[0].abs().max() / 8
    assert (((got[1] - got[0]) / 8 - want).abs() <= allowed).all()


def test_route_mask_skips_scores_when_tau_is_minus_infinity():
    bad = torch.full((1, 3, 2, 4), math.nan)
    mask = route_mask(
        bad, bad, tau=-math.inf, estimator="diag", scale=1.0, forced=forced_blocks(130)
    )
    assert mask.shape == (1, 2, 3, 3) and mask.dtype == torch.bool and mask.all()


# --- Invariances


@pytest.mark.parametrize("tau", [-1000.0, 1.0, 8.0])
@pytest.mark.parametrize("tokens", [130, 500])
def test_sol_attention_reference_constant_values(make_qkv, tokens, tau):
    q, k, _ = make_qkv(tokens, heads=2, dim=16, dtype=torch.float64, spread=0.5)
    v = torch.tensor([3.0, -0.1, 1e3, 0.0] * 4, dtype=torch.float64).expand_as(q)
    got = sol_attention_reference(q, k, v, tau=tau)
    # Weights sum to 1 up to two FP64 sums of <= 508 positive terms: 2 * 508 * 2^-53.
    assert ((got.out - v).abs() <= 1.2e-13 * v.abs()).all()


def test_sol_attention_reference_ignores_a_constant_in_keys(make_qkv, rounding_bound):
    q, k, v = make_qkv(500, heads=2, dim=16, dtype=torch.float64, spread=0.5)
    offset = torch.linspace(-3, 3, 16, dtype=torch.float64)
    for estimator in ("diag", "exact"):
        plain = sol_attention_reference(q, k, v, estimator=estimator)
        moved = sol_attention_reference(q, k + offset, v, estimator=estimator)
        out_bound, lse_bound = rounding_bound(q, k + offset, v, 0.25, UNIT[torch.float64])
        shift = (q * offset).sum(-1).transpose(1, 2) * 0.25
        assert torch.equal(moved.exact_mask, plain.exact_mask)
        assert (moved.out - plain.out).abs().max() <= 2 * out_bound
        assert (moved.lse - plain.lse - shift).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_adds_a_constant_in_values(make_qkv, rounding_bound):
    q, k, v = make_qkv(500, heads=2, dim=16, dtype=torch.float64, spread=0.5)
    offset = torch.linspace(-30, 30, 16, dtype=torch.float64)
    plain, moved = (sol_attention_reference(q, k, x) for x in (v, v + offset))
    out_bound, _ = rounding_bound(q, k, v + offset, 0.25, UNIT[torch.float64])
    assert (moved.out - plain.out - offset).abs().max() <= 2 * out_bound
    assert torch.equal(moved.lse, plain.lse)


def test_sol_attention_reference_ignores_order_within_blocks(make_qkv, rounding_bound):
    q, k, v = make_qkv(450, heads=2, dim=16, dtype=torch.float64, spread=0.5)
    generator = torch.Generator().manual_seed(2)
    order = torch.cat(
        [s + torch.randperm(min(64, 450 - s), generator=generator) for s in range(0, 450, 64)]
    )
    plain = sol_attention_reference(q, k, v)
    shuffled = sol_attention_reference(q[:, order], k[:, order], v[:, order])
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    assert torch.equal(shuffled.exact_mask, plain.exact_mask)
    assert (shuffled.out - plain.out[:, order]).abs().max() <= 2 * out_bound
    assert (shuffled.lse - plain.lse[:, :, order]).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_follows_a_block_permutation(make_qkv, rounding_bound):
    q, k, v = make_qkv(448, heads=2, dim=16, dtype=torch.float64, spread=0.5)
    blocks = torch.tensor([3, 0, 6, 5, 1, 4, 2])
    order = (blocks.unsqueeze(1) * 64 + torch.arange(64)).flatten()
    free = torch.zeros(7, 7, dtype=torch.bool)  # without the band, which follows storage order

    def routed(*qk):
        return route_mask(
            *(block_mean(x) for x in qk), tau=0.5, estimator="exact", scale=0.25, forced=free
        )

    mask, moved = routed(q, k), routed(q[:, order], k[:, order])
    assert torch.equal(moved, mask[:, :, blocks][..., blocks])
    assert 0 < mask.sum() < mask.numel()
    plain = attend(q, k, v, mask, 0.25)
    got = attend(q[:, order], k[:, order], v[:, order], moved, 0.25)
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    assert (got[0] - plain[0][:, order]).abs().max() <= 2 * out_bound
    assert (got[1] - plain[1][:, :, order]).abs().max() <= 2 * lse_bound


def test_sol_attention_reference_heads_and_batches_are_independent(make_qkv, rounding_bound):
    q, k, v = make_qkv(300, batch=2, heads=3, dim=16, dtype=torch.float64, spread=0.5)
    whole = sol_attention_reference(q, k, v)
    out_bound, _ = rounding_bound(q, k, v, 0.25, UNIT[torch.float64])
    for b in range(2):
        for h in range(3):
            one = sol_attention_reference(*(x[b : b + 1, :, h : h + 1] for x in (q, k, v)))
            assert torch.equal(whole.exact_mask[b, h], one.exact_mask[0, 0])
            assert (whole.out[b, :, h] - one.out[0, :, 0]).abs().max() <= 2 * out_bound


# --- Memory and types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [65, 300])
@pytest.mark.parametrize("view", ["fused-qkv", "heads-first"])
def test_sol_attention_reference_strided_is_bit_equal(make_qkv, view, tokens, dtype):
    packed = make_qkv(tokens, batch=2, heads=2, dim=32, dtype=dtype, spread=0.5)
    if view == "fused-qkv":
        views = torch.cat(packed, -1).split(32, -1)
    else:
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed]
    assert not any(x.is_contiguous() for x in views)
    strided = sol_attention_reference(*views)
    for got, want in zip(strided, sol_attention_reference(*packed), strict=True):
        assert torch.equal(got, want)
    assert strided.out.is_contiguous()


def test_sol_attention_reference_stays_inside_its_inputs(make_qkv):
    clean = make_qkv(150, batch=2, heads=2, dim=32, spread=0.5)
    poisoned = []
    for x in clean:
        buffer = torch.full((4, 230, 5, 64), math.nan)
        buffer[1:3, 40:190, 2:4, 16:48] = x
        poisoned.append(buffer[1:3, 40:190, 2:4, 16:48])
    for options in ({}, {"tau": 8.0}, {"routing": False}, {"estimator": "exact"}):
        got = sol_attention_reference(*poisoned, **options)
        want = sol_attention_reference(*clean, **options)
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
        assert torch.equal(got.exact_mask, want.exact_mask)


def test_sol_attention_reference_nan_head_stays_alone(make_qkv):
    clean = make_qkv(300, batch=2, heads=3, dim=16, spread=0.5)
    want = sol_attention_reference(*clean)
    for index in range(3):
        spoilt = [x.clone() for x in clean]
        spoilt[index][1, 100, 1] = math.nan
        got = sol_attention_reference(*spoilt)
        rest = torch.ones(2, 3, dtype=torch.bool)
        rest[1, 1] = False
        assert torch.equal(got.out.transpose(1, 2)[rest], want.out.transpose(1, 2)[rest])
        assert torch.equal(got.exact_mask[rest], want.exact_mask[rest])
        assert got.out[1, :, 1].isnan().any()


@pytest.mark.parametrize(
    ("dtype", "unit", "smallest"),
    [(torch.bfloat16, 2.0**-8, 0.0), (torch.float16, 2.0**-11, 2.0**-25)],
    ids=["bf16", "fp16"],
)
def test_sol_attention_reference_half_inputs_round_only_the_output(
    make_qkv, rounding_bound, dtype, unit, smallest
):
    q, k, v = make_qkv(500, heads=2, dim=64, dtype=dtype, spread=0.5)
    got = sol_attention_reference(q, k, v)
    *_, mask, out, lse = naive(q, k, v, tau=1.0, estimator="diag", scale=0.125)
    assert got.out.dtype == dtype and got.lse.dtype == torch.float32
    assert torch.equal(got.exact_mask, mask)
    # Half a unit in the last place of the output (or half of the smallest subnormal), on top of
    # what FP32 arithmetic does.
    out_bound, lse_bound = rounding_bound(q, k, v, 0.125, UNIT[torch.float32])
    error = (got.out.double() - out).abs()
    assert (error <= unit * out.abs() + smallest + 2 * out_bound).all()
    assert (got.lse - lse).abs().max() <= 2 * lse_bound


@pytest.mark.parametrize("elements", [1, 3 * 64 * (500 + 8) * 2], ids=["1-block", "3-blocks"])
def test_sol_attention_reference_chunks_do_not_show(
    make_qkv, rounding_bound, monkeypatch, elements
):
    q, k, v = make_qkv(500, heads=2, dim=16, spread=0.5)
    whole = sol_attention_reference(q, k, v)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
    parts = sol_attention_reference(q, k, v)
    assert torch.equal(parts.exact_mask, whole.exact_mask)
    # A matrix product may sum in another order when it has fewer rows.
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, UNIT[torch.float32])
    assert (parts.out - whole.out).abs().max() <= 2 * out_bound
    assert (parts.lse - whole.lse).abs().max() <= 2 * lse_bound
