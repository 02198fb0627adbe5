"""Generated inputs have what they promise; measures agree with hand counts and the reference."""

import math

import pytest
import torch

from hopper_sol.kernels import testing
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference
from hopper_sol.kernels.sol_attn.token_order import morton_order, span_order
from hopper_sol.kernels.testing import (
    fused_qkv_views,
    iid_qkv,
    poisoned_memory,
    routing,
    structured_qkv,
    tau_for_density,
    union_ratio,
)

GRID = (12, 24, 24)  # 108 blocks: the band of 3 forced ones is 2.8 %, far below density 0.16
SHAPE = (1, math.prod(GRID), 2, 128)
SMALL = (4, 8, 10)


def small(heads=2, batch=1, prefix=0, **options):
    shape = (batch, prefix + math.prod(SMALL), heads, 128)
    return structured_qkv(shape, SMALL, prefix=prefix, **options)


# -- iid ---------------------------------------------------------------------------------------


def test_iid_is_standard_normal_bfloat16():
    for x in iid_qkv((2, 1000, 2, 128), seed=3):
        assert x.shape == (2, 1000, 2, 128) and x.dtype == torch.bfloat16 and x.is_contiguous()
        # 512,000 samples: the mean is off by 0.0014, the deviation by 0.001; 5 of those.
        assert abs(x.double().mean()) < 0.007 and abs(x.double().std() - 1) < 0.005


@pytest.mark.parametrize("make", [lambda **o: iid_qkv((1, 320, 2, 128), **o), small])
def test_seed_decides_the_values(make):
    first, again, other = make(seed=5), make(seed=5), make(seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in zip(first, other, strict=True):
        assert (a != b).float().mean() > 0.9
    q, k, v = first
    assert not torch.equal(q, k) and not torch.equal(k, v)
    assert not torch.equal(q[:, :, 0], q[:, :, 1])


@pytest.mark.parametrize(
    "make", [lambda batch, heads: iid_qkv((batch, 320, heads, 128)), lambda b, h: small(h, b)]
)
def test_a_head_does_not_depend_on_the_others(make):
    many, few = make(2, 3), make(1, 2)
    assert all(torch.equal(a[:1, :, :2], b) for a, b in zip(many, few, strict=True))
    assert not torch.equal(many[0][0], many[0][1])


@pytest.mark.parametrize("shape", [(1, 64, 2, 64), (1, 0, 2, 128), (64, 2, 128), (1, 64, 0, 128)])
def test_shape_is_checked(shape):
    with pytest.raises(ValueError, match=r"shape: got .*, need \(B, T, H, 128\)"):
        iid_qkv(shape)


def test_negative_seed():
    with pytest.raises(ValueError, match="seed: got -1"):
        iid_qkv((1, 64, 1, 128), seed=-1)


# -- structured --------------------------------------------------------------------------------


def test_structured_is_finite_bfloat16():
    for x in small(batch=2, prefix=20):
        assert x.shape == (2, 340, 2, 128) and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert x.isfinite().all()


def test_order_permutes_tokens_and_nothing_else():
    order = span_order(morton_order(SMALL), 20, 340)
    raster, ordered = small(prefix=20), small(prefix=20, order=order)
    assert all(torch.equal(a[:, order], b) for a, b in zip(raster, ordered, strict=True))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shape": (1, 321, 1, 128)}, r"shape: got 321 tokens, need prefix 0 \+ grid"),
        ({"prefix": 1}, r"shape: got 320 tokens, need prefix 1 \+ grid .* = 321"),
        ({"order": torch.arange(319)}, r"order: got torch.int64 of shape \(319,\)"),
        ({"order": torch.arange(320.0)}, r"order: got torch.float32"),
    ],
)
def test_structured_rejects_what_does_not_fit(options, what):
    with pytest.raises(ValueError, match=what):
        structured_qkv(**{"shape": (1, 320, 1, 128), "grid": SMALL, **options})


def channel_peak(x):
    """Largest channel RMS over the median one, for every head."""
    rms = x[0].double().square().mean(0).sqrt()  # (H, D)
    return (rms.amax(-1) / rms.median(-1).values).tolist()


def test_heavy_channels():
    # The common vector of a head makes channels unequal too, but not fourfold.
    q, k, _ = small(heads=4, sinks=0)
    assert min(channel_peak(q) + channel_peak(k)) > 3.2
    q, k, _ = small(heads=4, sinks=0, heavy_channels=0)
    assert max(channel_peak(q) + channel_peak(k)) < 2.8


def test_heavy_tokens_in_v():
    # 8 added to values of about unit variance; 41,000 normal ones reach 5 standard deviations.
    spread = small(heavy_tokens=0.0)[2].double().std()
    assert small(heavy_tokens=0.0)[2].abs().max() < 6.5 * spread
    v = small(heavy_tokens=0.01)[2]
    heavy = (v.abs() > 6.5 * spread).any(-1).float().mean(1)  # share of tokens, (B, H)
    assert heavy.min() >= 0.008 and heavy.max() <= 0.0126  # ceil(3.2) of 320


def sink_mass(q, k, tokens):
    logits = torch.einsum("bthd,bshd->bhts", q.float(), k.float()) * 128**-0.5
    return logits.softmax(-1)[..., :tokens].sum(-1).mean().item()


def test_sinks_draw_attention():
    q, k, v = small(sinks=4)
    assert sink_mass(q, k, 4) > 4 * sink_mass(*small(sinks=0)[:2], 4)
    assert v[:, :4].float().square().mean() < 0.1 * v[:, 4:].float().square().mean()


@pytest.mark.parametrize("index", [1, 2])
def test_k_and_v_have_a_mean(index):
    x = structured_qkv(SHAPE, GRID)[index][0].double()
    # Of n independent tokens it would be about spread / sqrt(n), 0.012 spread.
    assert (x.mean(0).norm(dim=-1) > 0.3 * x.std(0).norm(dim=-1)).all()


def test_prefix_has_its_own_content_and_the_video_stays_the_video():
    """Tokens in front have no neighbour that resembles them; video tokens have."""
    v = structured_qkv((1, 400 + SHAPE[1], 1, 128), GRID, prefix=400, heavy_tokens=0.0)[2][0, :, 0]
    v = v.double() - v.double().mean(0)
    neighbours = torch.cosine_similarity(v[:-1], v[1:], dim=-1)
    assert neighbours[4:399].mean() < 0.1 < 0.15 < neighbours[400:].mean()


def test_rotation_depends_on_distance_alone():
    x, y = torch.randn(2, 1, 128, dtype=torch.float64)
    position = torch.tensor([[3.0, 5.0, 7.0], [4.0, 9.0, 2.0]], dtype=torch.float64)

    def score(shift):
        cos, sin = testing._rotary_table(position + torch.tensor(shift, dtype=torch.float64))
        a, b = testing._rotate(x, cos[:1], sin[:1]), testing._rotate(y, cos[1:], sin[1:])
        assert a.norm() == pytest.approx(x.norm())
        return (a * b).sum().item()

    still = score([0.0, 0.0, 0.0])
    assert score([11.0, -3.0, 6.0]) == pytest.approx(still)
    cos, sin = testing._rotary_table(position)
    moved = testing._rotate(x, cos[:1], sin[:1]) * testing._rotate(y, cos[:1], sin[:1])
    assert moved.sum().item() != pytest.approx(still, rel=1e-3)


def test_attention_is_local():
    """Without content, sinks and heavy channels, closer keys score higher on each axis."""
    t, h, w = GRID
    q, k, _ = structured_qkv(SHAPE, GRID, objects=1, sinks=0, heavy_channels=0)
    q, k = (x[0].float().view(t, h, w, 2, 128) for x in (q, k))

    def mean_score(dt, dh, dw):
        a = q[: t - dt, : h - dh, : w - dw]
        return (a * k[dt:, dh:, dw:]).sum(-1).mean().item()

    assert mean_score(0, 0, 0) > mean_score(0, 0, 4) > mean_score(0, 12, 12) + 1
    assert mean_score(0, 0, 0) > mean_score(4, 0, 0)


@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_union_ratios_of_structured_and_iid(estimator):
    order = morton_order(GRID)
    ratios = {}
    for name, (q, k, _) in {
        "structured": structured_qkv(SHAPE, GRID, order=order),
        "iid": iid_qkv(SHAPE),
    }.items():
        tau, density = tau_for_density(q, k, 0.16, estimator=estimator)
        assert abs(density - 0.16) <= 0.002
        mask = routing(q, k, tau, estimator=estimator)
        ratios[name] = union_ratio(mask, 2), union_ratio(mask, 3)
    two, three = ratios["structured"]
    assert 1.25 <= two <= 1.55 and 1.5 <= three <= 1.9
    # Independent rows of density d share d of theirs: 2 - d = 1.84 and 3 - 3 d + d^2 = 2.55 but
    # for the band of 3 blocks that neighbours share by force (2.8 of 16 %).
    two, three = ratios["iid"]
    assert 1.70 <= two <= 1.84 and 2.3 <= three <= 2.55


# -- routing -----------------------------------------------------------------------------------


def test_union_ratio_by_hand():
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    for row, columns in enumerate([(0, 1), (1, 2), (3,), (3,), (0, 1, 2, 3, 4)]):
        mask[0, 0, row, list(columns)] = True
    # n = 2: rows 0, 1: 3 of 2; rows 2, 3: 1 of 1; row 4 is left out.
    assert union_ratio(mask, 2) == pytest.approx((3 / 2 + 1) / 2)
    # n = 3: rows 0 - 2: {0, 1, 2, 3} of 5 / 3.
    assert union_ratio(mask, 3) == pytest.approx(4 / (5 / 3))
    assert union_ratio(mask, 1) == 1.0
    assert union_ratio(torch.eye(6, dtype=torch.bool).view(1, 1, 6, 6), 3) == 3.0
    assert union_ratio(torch.ones(2, 3, 6, 6, dtype=torch.bool), 2) == 1.0


@pytest.mark.parametrize("n", [0, 6])
def test_union_ratio_needs_a_group(n):
    with pytest.raises(ValueError, match=rf"n: got {n}, need 1 \.\. 5"):
        union_ratio(torch.ones(1, 1, 5, 5, dtype=torch.bool), n)


@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("sink_kv", [(), ((0, 70),)])
@pytest.mark.parametrize("density", [0.1, 0.3, 0.8])
def test_tau_for_density_is_what_the_reference_does(estimator, sink_kv, density):
    q, k, v = structured_qkv((1, math.prod((6, 16, 24)), 2, 128), (6, 16, 24))  # 36 blocks
    found = tau_for_density(q, k, density, estimator=estimator, sink_kv=sink_kv)
    options = {"tau": found[0], "estimator": estimator, "sink_kv": sink_kv}
    want = sol_attention_reference(q, k, v, **options).exact_mask
    # FP32 sums in another order may flip a pair that lies on its threshold.
    assert (routing(q, k, **options) != want).sum() <= 2
    assert abs(found[1] - want.double().mean().item()) <= 2 / want.numel()
    floor = sol_attention_reference(q, k, v, **{**options, "tau": 8.0}).exact_mask
    floor = floor.double().mean().item()
    assert abs(found[1] - max(density, floor)) <= 0.002


def test_tau_for_density_ends():
    q, k, _ = small()
    assert tau_for_density(q, k, 1.0) == (-1000.0, 1.0)
    zero = torch.zeros(1, 640, 1, 128)  # equal scores: forced blocks or everything
    tau, density = tau_for_density(zero, zero, 0.5)
    assert density == pytest.approx(28 / 100) and tau > 0  # band of 10 blocks: 3 * 10 - 2
    assert tau_for_density(zero, zero, 0.9)[1] == 1.0
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="density: got"):
            tau_for_density(q, k, wrong)


def test_tau_for_density_knows_the_scale():
    q, k, _ = small()
    # Without the floor under sigma, tau would not depend on the scale at all.
    assert tau_for_density(q, k, 0.6, scale=1e-6)[0] != tau_for_density(q, k, 0.6)[0]


def test_routing_all_exact_and_dense_rows():
    q, k, _ = small()
    assert routing(q, k, -1000.0).all()
    mask = routing(q, k, 8.0, sink_kv=((130, 131),), dense_q=((64, 65),))
    assert mask[..., 2].all() and mask[:, :, 1].all()
    assert not mask[:, :, 4, 0].any()


# -- poison ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_fused_views_hold_the_values_and_nothing_else(per_head):
    q, k, v = iid_qkv((2, 65, 2, 128))
    views = fused_qkv_views(q, k, v, per_head=per_head, gap=40, tail=2)
    for view, x in zip(views, (q, k, v), strict=True):
        assert torch.equal(view, x) and not view.is_contiguous()
        assert view.stride(-1) == 1 and view.stride(1) == 3 * 2 * 128 + 40
        assert view.stride(2) == (3 * 128 if per_head else 128)
    base = views[0]._base
    assert all(view._base is base for view in views)
    assert base.isnan().sum() == base.numel() - 3 * q.numel()
    # What stands behind the last token, and in front of the first, is poison.
    ahead = views[0].as_strided((128,), (1,), views[0].storage_offset() - views[0].stride(1))
    last = views[2].storage_offset() + 64 * views[2].stride(1)
    behind = views[2].as_strided((128,), (1,), last + views[2].stride(1))
    assert ahead.isnan().all() and behind.isnan().all()


def test_poisoned_memory():
    before = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(KeyError), poisoned_memory():
        assert torch.empty(100).isnan().all()
        assert torch.ones(100).new_empty(7, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.ones(3, 3)).isnan().all()
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is before
