"""Triton routing against the reference's mask: bits, lists and counts.

``route`` reads block means, so long sequences cost little here.
"""

import math

import pytest
import torch
from sol_attn_cases import UNIT, poisoned_memory, same_bits

from hopper_sol.kernels.sol_attn.config import TokenLayout, num_blocks
from hopper_sol.kernels.sol_attn.reference import forced_blocks, route_mask, route_threshold
from hopper_sol.kernels.sol_attn.triton_route import block_ranges, route
from hopper_sol.kernels.sol_attn.triton_thresholds import route_thresholds
from hopper_sol.kernels.sol_attn.triton_words import route_words

SCALE = 128**-0.5
LOG2E = math.log2(math.e)
SINKS = ((0, 1), (70, 200), (190, 300))  # both ends below; the last two overlap


def means(blocks, heads=1, batch=1, seed=0, mean=0.0):
    """q_mean, k_mean (B, H, NT, 128) FP32 of unit spread; keys around ``mean`` times a vector."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, batch, heads, blocks, 128, generator=generator)
    return q, k + mean * torch.randn(batch, heads, 1, 128, generator=generator)


def run(q_mean, k_mean, tokens, *, tau=1.0, estimator="diag", layout=None, **options):
    with poisoned_memory():
        return route(
            q_mean,
            k_mean,
            tau=tau,
            estimator=estimator,
            routing=options.pop("routing", True),
            scale_log2=SCALE * LOG2E,
            layout=layout or TokenLayout(),
            **options,
        )


def run_words(q_mean, k_mean, *, tau=1.0, estimator="diag", layout=None, exact_mask=None):
    """The kernel that makes the words alone: the same sums in the same order."""
    with poisoned_memory():
        return route_words(
            q_mean,
            k_mean,
            tau=tau,
            estimator=estimator,
            scale_log2=SCALE * LOG2E,
            layout=layout or TokenLayout(),
            exact_mask=exact_mask,
        )


def decoded(words, blocks):
    """(B, H, NT, 64 NG) bool from packed bits; those past NT are set."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    mask = bits.flatten(-2).bool()
    assert mask[..., blocks:].all()
    return mask[..., :blocks]


def assert_lists(got, mask):
    """Lists and counts of every split say what the bits say."""
    splits, batch, heads, blocks, _ = got.blocks.shape
    groups = num_blocks(blocks)
    width = -(-groups // splits) * 64  # blocks of one split
    for split in range(splits):
        for b in range(batch):
            for h in range(heads):
                for i in range(blocks):
                    part = [
                        j
                        for j in range(split * width, min(split * width + width, blocks))
                        if mask[b, h, i, j]
                    ]
                    assert got.counts[split, b, h, i] == len(part)
                    listed = [j for j in part if j != blocks - 1]
                    found = got.blocks[split, b, h, i, : len(listed)].tolist()
                    assert found == listed[::-1], (split, b, h, i)
    assert got.words.dtype == got.counts.dtype == torch.int32 and got.blocks.dtype == torch.int16


def expected(q_mean, k_mean, tokens, *, tau=1.0, estimator="diag", layout=None):
    """The reference's mask in FP64, and where rounding may decide otherwise."""
    layout = layout or TokenLayout()
    q, k = (x.double().transpose(1, 2) for x in (q_mean, k_mean))
    forced = forced_blocks(tokens, layout.sink_kv, layout.dense_q)
    mask = route_mask(q, k, tau=tau, estimator=estimator, scale=SCALE, forced=forced)
    threshold, mean = (
        route_threshold(q, k, tau=t, estimator=estimator, scale=SCALE) for t in (tau, 0.0)
    )
    score = torch.einsum("bihd,bjhd->bhij", q, k) * (SCALE * LOG2E)
    # Sums of D products and of NT means round like a random walk (8 standard deviations): scores
    # in units of the centred keys, and all of them together by what each channel of the mean key
    # lost.
    mu = k.mean(1, keepdim=True)
    magnitude = torch.einsum("bihd,bjhd->bhij", q.abs(), (k - mu).abs())
    shift = torch.einsum("bihd,bxhd->bhix", q**2, mu**2).sqrt() * (k.shape[1] ** 0.5 + 2)
    noise = 8 * UNIT * ((128**0.5 + 2) * magnitude + shift) * (SCALE * LOG2E)
    noise = noise + 100 * UNIT * (threshold - mean).abs().unsqueeze(-1)
    unsure = ((score - threshold.unsqueeze(-1)).abs() <= noise) & ~forced
    return mask, unsure


def assert_routed(got, q_mean, k_mean, tokens, **options):
    blocks = q_mean.shape[2]
    mask, unsure = expected(q_mean, k_mean, tokens, **options)
    used = decoded(got.words, blocks)
    assert (used == mask)[~unsure].all()
    assert unsure.float().mean() < 4e-3  # else nothing was compared
    assert_lists(got, used)
    assert torch.equal(run_words(q_mean, k_mean, **options), got.words)
    return used


@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 130])
def test_scores(blocks, estimator):
    tokens = 64 * blocks - 13
    q, k = means(blocks, heads=2)
    used = assert_routed(run(q, k, tokens, estimator=estimator), q, k, tokens, estimator=estimator)
    assert blocks < 3 or (~used).sum() > 0


@pytest.mark.parametrize("tau", [-1000.0, -1.0, 0.0, 1.0, 8.0])
@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_tau(tau, estimator):
    q, k = means(70, batch=2, seed=3)
    options = {"tau": tau, "estimator": estimator}
    used = assert_routed(run(q, k, 70 * 64, **options), q, k, 70 * 64, **options)
    if tau == -1000.0:
        assert used.all()
    if tau == 8.0:  # 70 normal scores do not reach eight standard deviations
        assert torch.equal(used, forced_blocks(70 * 64).expand_as(used))


@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_floor_under_the_spread(estimator):
    """Scores that spread by less than 1e-3 are noise: at tau 1.5 none of them stands out."""
    q, k = means(70, seed=6)
    for size in (1e-3, 1e-4):
        options = {"tau": 1.5, "estimator": estimator}
        used = assert_routed(run(q, size * k, 4480, **options), q, size * k, 4480, **options)
    assert torch.equal(used[0, 0], forced_blocks(4480))


def test_estimators_differ():
    """Keys spread along one direction: dropping covariance changes the threshold."""
    q, k = means(70)
    k = 0.1 * k + torch.randn(70, 1, generator=torch.Generator().manual_seed(5))
    masks = [
        assert_routed(run(q, k, 4480, estimator=name), q, k, 4480, estimator=name)
        for name in ("diag", "exact")
    ]
    assert (masks[0] != masks[1]).sum() > 20


@pytest.mark.parametrize("mean", [100.0, 1000.0])
@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_mean_key_far_larger_than_the_spread(estimator, mean):
    """A second moment that is not centred loses 6 % of the variance, or all of it, at 1000."""
    q, k = means(130, seed=1, mean=mean)
    used = assert_routed(run(q, k, 130 * 64, estimator=estimator), q, k, 8320, estimator=estimator)
    assert 0.05 < used.float().mean() < 0.4


def test_a_constant_in_all_keys_changes_nothing():
    q, k = means(65, seed=2)
    k = (k * 256).round() / 256  # adding 64 is exact
    for estimator in ("diag", "exact"):
        plain, moved = (run(q, x, 4160, estimator=estimator) for x in (k, k + 64.0))
        _, unsure = expected(q, k + 64.0, 4160, estimator=estimator)
        differs = decoded(plain.words, 65) != decoded(moved.words, 65)
        assert not differs[~unsure].any()


def test_scores_must_be_strictly_above():
    zero = torch.zeros(1, 1, 7, 128)
    got = run(zero, zero, 400, tau=0.0)
    assert torch.equal(decoded(got.words, 7)[0, 0], forced_blocks(400))


LAYOUTS = {
    "sink-first": TokenLayout(sink_kv=((0, 1),)),
    "sink-last": TokenLayout(sink_kv=((4479, 4480),)),
    "sinks-both-ends": TokenLayout(sink_kv=((0, 100), (4400, 4480))),
    "block-edges": TokenLayout(sink_kv=((64, 128), (639, 641))),
    "four-ranges": TokenLayout(sink_kv=((700, 701), (0, 1), (4000, 4200), (2000, 2001))),
    "overlapping": TokenLayout(sink_kv=((0, 70), (60, 300), (250, 260), (300, 320), (900, 901))),
    "dense-ends": TokenLayout(dense_q=((0, 65), (4479, 4480))),
    "dense-four": TokenLayout(dense_q=((64, 65), (4000, 4200), (700, 800), (2000, 2001))),
    "both": TokenLayout(sink_kv=((0, 130),), dense_q=((100, 130), (4200, 4480))),
    "all": TokenLayout(sink_kv=((0, 4480),)),
    "all-dense": TokenLayout(dense_q=((0, 4480),)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout(layout):
    q, k = means(70, seed=4)
    options = {"tau": 2.0, "layout": layout}
    used = assert_routed(run(q, k, 4480, **options), q, k, 4480, **options)
    assert used.all() == (layout in (LAYOUTS["all"], LAYOUTS["all-dense"]))


def test_block_ranges_merge_what_touches():
    ranges = LAYOUTS["overlapping"].sink_kv
    assert block_ranges(ranges) == [(0, 5), (14, 15)]
    assert block_ranges(((640, 704), (0, 1), (64, 65))) == [(0, 2), (10, 11)]
    assert block_ranges(((0, 64), (128, 192))) == [(0, 1), (2, 3)]
    assert block_ranges(()) == []
    for layout in LAYOUTS.values():
        for given in (layout.sink_kv, layout.dense_q):
            touched = {j for start, stop in given for j in range(start // 64, num_blocks(stop))}
            made = [j for start, stop in block_ranges(given) for j in range(start, stop)]
            assert made == sorted(touched)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("blocks", [5, 64, 130, 200])
def test_splits(blocks, splits):
    """Whole groups of 64 blocks; with 1 and 3 groups some splits have none."""
    q, k = means(blocks, seed=blocks)
    layout = TokenLayout(sink_kv=((0, 1),), dense_q=((70, 80),))
    tokens = 64 * blocks - 1
    got = run(q, k, tokens, layout=layout, splits=splits)
    assert got.counts.shape[0] == splits
    assert_routed(got, q, k, tokens, layout=layout)
    one = run(q, k, tokens, layout=layout)
    assert same_bits(got.words, one.words)
    assert torch.equal(got.counts.sum(0), one.counts[0])


def test_given_mask():
    q, k = means(66, heads=2, batch=2)
    mask = torch.rand(2, 2, 66, 66, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[0, 0, 3], mask[0, 0, 4], mask[:, :, 10, 65] = False, True, False
    # Neither forced blocks nor the layout count: the mask replaces the decision.
    layout = TokenLayout(sink_kv=((0, 100),), dense_q=((0, 100),))
    for splits in (1, 2):
        got = run(q, k, 66 * 64, layout=layout, exact_mask=mask, splits=splits)
        assert torch.equal(decoded(got.words, 66), mask)
        assert_lists(got, mask)
    strided = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert same_bits(run(q, k, 66 * 64, exact_mask=strided).words, got.words)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("blocks", [1, 65])
def test_without_routing(blocks, splits):
    q, k = means(blocks)
    got = run(q * float("nan"), k, blocks * 64, routing=False, tau=8.0, splits=splits)
    assert decoded(got.words, blocks).all()
    assert_lists(got, torch.ones(1, 1, blocks, blocks, dtype=torch.bool))


def test_a_head_of_nan_stays_alone():
    q, k = means(66, heads=2, batch=2)
    clean = run(q, k, 66 * 64)
    k[1, 0, 7, 3] = q[1, 0, 9, 3] = float("nan")
    spoilt = run(q, k, 66 * 64)
    for b, h in ((0, 0), (0, 1), (1, 1)):
        assert same_bits(spoilt.words[b, h], clean.words[b, h])
        assert same_bits(spoilt.counts[:, b, h], clean.counts[:, b, h])
    # Nothing is above a threshold that is not a number: the forced blocks stay.
    used = decoded(spoilt.words, 66)[1, 0]
    assert torch.equal(used, forced_blocks(66 * 64))


def test_repeatable():
    q, k = means(130)
    first, second = run(q, k, 8320, estimator="exact"), run(q, k, 8320, estimator="exact")
    assert all(same_bits(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("blocks", [1, 65, 130])
def test_words_of_a_given_mask(blocks):
    q, k = means(blocks, heads=2)
    mask = torch.rand(1, 2, blocks, blocks, generator=torch.Generator().manual_seed(blocks)) < 0.3
    words = run_words(q, k, exact_mask=mask)
    assert torch.equal(decoded(words, blocks), mask)


# --- Thresholds for a kernel that decides itself


def run_thresholds(q_mean, k_mean, *, tau=1.0, estimator="diag", layout=None):
    with poisoned_memory():
        return route_thresholds(
            q_mean,
            k_mean,
            tau=tau,
            estimator=estimator,
            scale_log2=SCALE * LOG2E,
            layout=layout or TokenLayout(),
        )


def assert_limits(got, q_mean, k_mean, *, tau, estimator):
    q, k = (x.double().transpose(1, 2) for x in (q_mean, k_mean))
    want = route_threshold(q, k, tau=tau, estimator=estimator, scale=SCALE)
    # As in ``expected``: the mean score from the mean key, a sum over blocks and one over channels,
    # and the spread, a root of sums of positive terms.
    mu = k.mean(1, keepdim=True)
    shift = torch.einsum("bihd,bxhd->bhi", q**2, mu**2).sqrt() * (k.shape[1] ** 0.5 + 2)
    mean = route_threshold(q, k, tau=0.0, estimator=estimator, scale=SCALE)
    noise = 8 * UNIT * shift * (SCALE * LOG2E) + 100 * UNIT * (want - mean).abs()
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert ((got - want).abs() <= noise).all()


@pytest.mark.parametrize("tau", [-0.5, 0.0, 1.0, 8.0])
@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("blocks", [1, 2, 64, 65, 130])
def test_thresholds(blocks, estimator, tau):
    for mean in (0.0, 100.0):
        q, k = means(blocks, heads=3, batch=2, mean=mean, seed=blocks)
        got = run_thresholds(q, k, tau=tau, estimator=estimator)
        assert_limits(got.limits, q, k, tau=tau, estimator=estimator)
        want = forced_blocks(64 * blocks)
        assert torch.equal(decoded(got.forced, blocks), want)


@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_lowest_tau_takes_everything(estimator):
    """Whatever rounding does to a score: no number lies below the limit."""
    q, k = means(65, heads=2)
    got = run_thresholds(q, k, tau=-1000.0, estimator=estimator)
    assert (got.limits == -math.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_forced_bits(layout):
    q, k = means(70, heads=2, seed=4)
    got = run_thresholds(q, k, layout=layout)
    assert torch.equal(decoded(got.forced, 70), forced_blocks(4480, layout.sink_kv, layout.dense_q))


def test_thresholds_of_a_head_of_nan():
    q, k = means(66, heads=2)
    clean = run_thresholds(q, k)
    k[0, 0, 7, 3] = float("nan")
    spoilt = run_thresholds(q, k)
    assert spoilt.limits[0, 0].isnan().all() and same_bits(spoilt.limits[0, 1], clean.limits[0, 1])
    assert same_bits(spoilt.forced, clean.forced)
