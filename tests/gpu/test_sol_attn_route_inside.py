"""The SM90 kernel that decides in its main loop which blocks are exact (route_source "kernel").

What it decides is looked at as bits, against scores of the operands that it read; what it computes
then has to be, bit for bit, what it computes when the same bits are given to it.
"""

import random

import pytest
import torch

from hopper_sol.kernels import (
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    describe_call,
    sol_attention,
    why_not,
)
from hopper_sol.kernels.sol_attn.config import num_blocks
from hopper_sol.kernels.sol_attn.reference import (
    block_mean,
    block_scores,
    forced_blocks,
    route_threshold,
)
from hopper_sol.kernels.testing import fused_qkv_views, iid_qkv, poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
SCALE = 128**-0.5
PRECISIONS = ["bf16", "fp8"]
# One group of 64 blocks; some; as many as BF16 and as FP8 have slots; more than either.
TOKENS = [1, 63, 64, 65, 130, 4171, 8_200, 16_000, 28_000, 32_760, 75_600]


@pytest.fixture(autouse=True)
def sm90():
    """The specification must not be computed in TF32; and there must be a Hopper GPU."""
    config = SolAttnConfig(precision="fp8", route_source="kernel")
    q = torch.empty(1, 64, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    reason = why_not(describe_call(q, config, TokenLayout()), "sm90")
    if reason:
        pytest.skip(reason)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Inside:
    """One call that decides inside.

    Attributes:
        results: out, lse, counts.
        mask: (B, H, NT, NT) bool, what was decided.
        operands: what the kernel read.
        given: what the call with this mask gives.
    """

    def __init__(self, q, k, v, *, layout=None, order=None, **options):
        from hopper_sol.kernels.sol_attn.sm90_backend import Steps

        self.layout = layout or TokenLayout()
        self.config = SolAttnConfig(**{"route_source": "kernel", **options})
        steps = Steps(q, k, v, config=self.config, layout=self.layout, scale=SCALE, order=order)
        with poisoned_memory():
            self.operands = steps.prepare()
            thresholds = steps.route(self.operands)
            batch, tokens, heads, _ = q.shape
            blocks = num_blocks(tokens)
            words = torch.empty(
                *(batch, heads, blocks, 2 * num_blocks(blocks)), dtype=torch.int32, device=DEVICE
            )
            self.results = steps.attend(self.operands, thresholds, with_lse=True, decided=words)
            # The variant that keeps no bits is the one that runs.
            again = steps.attend(self.operands, thresholds, with_lse=True)
        assert same(again, self.results)
        bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=DEVICE)) & 1
        self.mask = bits.flatten(-2)[..., :blocks].bool()
        with poisoned_memory():
            route = steps.route(self.operands, exact_mask=self.mask)
            self.given = steps.attend(self.operands, route, with_lse=True)


def same(got, want):
    """Equal bits: NaN is as good as any other value, where a test is about it or nobody computes."""
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(got, want, strict=True)
    )


def specification(operands, *, tau, estimator, layout):
    """Mask in FP64 from the operands as they were read, and the pairs that rounding may decide
    otherwise."""
    q, k, _ = operands.dequant()
    if operands.k_offset is not None:
        k = k - operands.k_offset.unsqueeze(1)
    mean_k = operands.dequant_mean_k().transpose(1, 2).double()
    tokens = operands.tokens
    means = (x.transpose(1, 2).double() for x in (operands.q_mean, operands.k_mean))
    threshold = route_threshold(*means, tau=tau, estimator=estimator, scale=SCALE).unsqueeze(-1)
    score = block_scores(block_mean(q.double()), mean_k, SCALE)
    magnitude = block_scores(block_mean(q.double().abs()), mean_k.abs(), SCALE)
    forced = forced_blocks(tokens, layout.sink_kv, layout.dense_q, DEVICE)
    # A tensor core adds E4M3 products with 13 bits or more, cut off, so that a mean over rows is as
    # far off as each of them; FP32 sums of BF16 products and of thresholds as random walks.
    unit = 2**-13 if operands.precision == "fp8" else 64 * 2**-22
    fine = 64 * 2**-22 * magnitude.amax(-1, keepdim=True)
    unsure = ((score - threshold).abs() <= unit * magnitude + fine) & ~forced
    return (score > threshold) | forced, unsure


def check(q, k, v, *, tau=1.0, estimator="diag", layout=None, unsure_share=0.01, **options):
    layout = layout or TokenLayout()
    got = Inside(q, k, v, tau=tau, estimator=estimator, layout=layout, **options)
    assert same(got.results, got.given)
    assert got.results[0].isfinite().all()
    assert torch.equal(got.results[2], got.mask.sum(-1, dtype=torch.int32))
    mask, unsure = specification(got.operands, tau=tau, estimator=estimator, layout=layout)
    assert (got.mask == mask)[~unsure].all()
    assert unsure.float().mean() <= unsure_share
    return got


@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_decisions(tokens, precision, estimator):
    heads = 2 if tokens < 50_000 else 1
    q, k, v = iid_qkv((1, tokens, heads, 128), tokens, DEVICE)
    ends = ((0, min(tokens, 70)), (tokens - 1, tokens))
    layout = TokenLayout(sink_kv=ends, dense_q=((tokens // 2, tokens // 2 + 1),))
    got = check(q, k, v, precision=precision, estimator=estimator, layout=layout)
    if tokens >= 4171:
        assert 0.1 < got.mask.float().mean() < 0.4
        assert got.mask[:, :, tokens // 2 // 64].all()


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [130, 8_200, 20_000])
def test_splits(tokens, precision, splits):
    """Every split decides for its own groups; with one group some have none."""
    check(*iid_qkv((1, tokens, 2, 128), 3, DEVICE), precision=precision, kv_splits=splits)


@pytest.mark.parametrize("tau", [-1000.0, -1.0, 0.0, 2.0, 8.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tau(precision, tau):
    q, k, v = iid_qkv((1, 4171, 2, 128), 0, DEVICE)
    got = check(q, k, v, precision=precision, tau=tau)
    if tau == -1000.0:
        assert got.mask.all()
    if tau == 8.0:
        assert torch.equal(got.mask, forced_blocks(4171, device=DEVICE).expand_as(got.mask))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_everything_is_exact_at_the_lowest_tau(precision):
    """Equal keys, so that no score spreads: rounding moves them by more than a thousand floors."""
    q, k, v = iid_qkv((1, 4171, 1, 128), 0, DEVICE)
    k = (1000 * k[:, :1]).expand_as(k).contiguous()
    assert Inside(q, k, v, precision=precision, tau=-1000.0).mask.all()
    if precision == "fp8":
        assert not Inside(q, k, v, precision=precision, tau=-999.0).mask.all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sinks", [((0, 4480),), ((0, 4096),), ((4096, 4480),)], ids=str)
def test_groups_without_a_decision(precision, sinks):
    """Nothing to summarise in both groups, in the last and in the first."""
    layout = TokenLayout(sink_kv=sinks, dense_q=((64, 65), (4200, 4300)))
    check(*iid_qkv((2, 4480, 2, 128), 1, DEVICE), precision=precision, tau=2.0, layout=layout)


@pytest.mark.parametrize("smoothing", ["none", "mean"])
def test_keys_with_a_mean(smoothing):
    """Of which a threshold knows, and a rounded mean key does not know as much."""
    q, k, v = iid_qkv((1, 4171, 2, 128), 5, DEVICE)
    k = (k.float() + 3 * torch.randn(1, 1, 2, 128, device=DEVICE)).to(torch.bfloat16)
    options = {"k_smoothing": smoothing, "v_smoothing": smoothing}
    # Magnitudes are those of the mean where it stays: ten times as many pairs are unsure.
    share = {"none": 0.2, "mean": 0.02}[smoothing]
    check(q, k, v, precision="fp8", unsure_share=share, **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_close_to_the_prepass(precision):
    """Rounding to E4M3 moves a score by 0.05 standard deviations, BF16 by a hundredth of that."""
    q, k, v = iid_qkv((1, 16_384, 2, 128), 7, DEVICE)
    inside = Inside(q, k, v, precision=precision).mask
    stats = SolAttnStats()
    sol_attention(
        q, k, v, config=SolAttnConfig(precision=precision, route_source="prepass"), stats=stats
    )
    assert stats.backend == "sm90"
    moved = (inside.sum(-1) - stats.exact_blocks).abs().sum() / inside.numel()
    assert moved <= {"bf16": 2e-3, "fp8": 2e-2}[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_order_and_skipped_queries(precision):
    inputs = iid_qkv((2, 1000, 2, 128), 2, DEVICE)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = Inside(*(x[:, order] for x in inputs), precision=precision)
    got = Inside(*fused_qkv_views(*inputs), precision=precision, order=order)
    assert same(got.results, got.given) and torch.equal(got.mask, want.mask)
    assert torch.equal(got.results[0][:, order], want.results[0])
    part = Inside(*inputs, precision=precision, layout=TokenLayout(skip_q=500))
    whole = Inside(*inputs, precision=precision)
    assert torch.equal(part.results[0][:, 448:], whole.results[0][:, 448:])
    assert torch.equal(part.results[2][..., 7:], whole.results[2][..., 7:])
    assert (part.results[2][..., :7] == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_head_of_nan_stays_alone(precision):
    clean = iid_qkv((1, 1000, 3, 128), 0, DEVICE)
    spoilt = [x.clone() for x in clean]
    for x in spoilt:
        x[0, 500, 1, 7] = float("nan")
    want, got = (Inside(*x, precision=precision) for x in (clean, spoilt))
    for head in (0, 2):
        assert torch.equal(got.mask[:, head], want.mask[:, head])
        assert torch.equal(got.results[0][:, :, head], want.results[0][:, :, head])
    # A threshold that is not a number is not exceeded: the forced blocks stay.
    assert torch.equal(got.mask[0, 1], forced_blocks(1000, device=DEVICE))
    assert got.results[0][0, :, 1].isnan().any(-1).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_traced_variant_and_repetition(monkeypatch, precision):
    from hopper_sol.kernels.sol_attn import sm90_fwd

    inputs = iid_qkv((1, 9000, 2, 128), 4, DEVICE)
    first = Inside(*inputs, precision=precision)
    for _ in range(3):
        assert same(Inside(*inputs, precision=precision).results, first.results)
    monkeypatch.setenv(sm90_fwd.TRACED_SWITCH, "1")
    assert same(Inside(*inputs, precision=precision).results, first.results)


def cases():
    found = []
    draw = random.Random(21)
    for index in range(100):
        tokens = draw.choice([draw.randint(1, 300), draw.randint(300, 6000)])
        ranges = []
        for _ in range(2):
            starts = sorted(draw.randrange(tokens) for _ in range(draw.randint(0, 4)))
            ranges.append(tuple((s, min(tokens, s + draw.randint(1, 150))) for s in starts))
        options = {
            "tau": draw.choice([-1000.0, -0.5, 0.0, 0.7, 1.3, 3.0]),
            "estimator": draw.choice(["diag", "exact"]),
            "precision": draw.choice(PRECISIONS),
            "layout": TokenLayout(sink_kv=ranges[0], dense_q=ranges[1]),
            "kv_splits": draw.choice(["auto", 1, 2, 4]),
        }
        found.append(pytest.param(draw.randint(1, 8), options, tokens, id=str(index)))
    return found


@pytest.mark.parametrize(("heads", "options", "tokens"), cases())
def test_sweep(heads, options, tokens):
    q, k, v = iid_qkv((1, tokens, heads, 128), tokens, DEVICE)
    if heads % 2:
        q, k, v = fused_qkv_views(q, k, v)
    # With few pairs a single unsure one is a large part.
    check(q, k, v, unsure_share=0.01 + 3 / num_blocks(tokens) ** 2 / heads, **options)
