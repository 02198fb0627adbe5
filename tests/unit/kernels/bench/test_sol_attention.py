"""The parity gate of ``sol_attention`` and the rows behind it, run end to end on a CPU."""

import math
import sys
import types

import pytest
import torch

from hopper_sol.kernels.bench.ops import sol_attention as bench_op
from hopper_sol.kernels.bench.ops.sol_attention import CASES, Case, parity_heads, read_config
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference
from hopper_sol.kernels.sol_attn.token_order import morton_order, span_order

TINY = ("sol_attention", "--case", "tiny", "--backend")


def dense(q, k, v, **ignored):
    return sol_attention_reference(q, k, v, routing=False).out


def test_cases_are_the_models():
    shapes = {name: case.shape for name, case in CASES.items()}
    assert shapes["wan1.3b-480p"] == (1, 32760, 12, 128)
    assert shapes["wan14b-480p"] == (1, 32760, 40, 128)
    assert shapes["wan14b-720p"] == (1, 75600, 40, 128)
    assert shapes["h3-768p"] == (1, 32626, 56, 128)
    assert CASES["h3-768p"].prefix == 370 and shapes["tiny"][1] % 64


def test_reference_end_to_end(bench, speeds):
    # At tau 8 only forced blocks are exact: FP8 can't route differently, so no pair may mismatch.
    options = ("--precision", "bf16,fp8", "--generator", "iid,structured", "--tau", "8")
    run = bench(*TINY, "reference", *options)
    assert run.status == 0 and len(run.rows) == 4, run.out
    for row in run.rows:
        assert row["error"] is None and row["parity_ok"] is True
        assert row["shape"] == [1, 300, 2, 128] and row["sinks"] == "kv"
        assert row["mask_mismatch"] == 0.0 and row["gate"] == "same mask"
        assert set(speeds(row)) == {"total_ms", "p25_ms", "p75_ms", "exact_tflops"}
        assert row["p25_ms"] <= row["total_ms"] <= row["p75_ms"] and row["iterations"] == 3
        assert 1 <= row["union_ratio_2"] <= 2 and 1 <= row["union_ratio_3"] <= 3
        assert row["prep_ms"] is None and row["peak_extra_mb"] is None
        # 4 B H T^2 D density FLOP in total_ms, rounded to 4 places.
        flop = 4 * 2 * 300**2 * 128 * row["density"]
        assert row["exact_tflops"] == pytest.approx(flop / row["total_ms"] * 1e-9, abs=6e-5)
    assert [row["token_order"] for row in run.rows] == ["raster", "raster", "morton", "morton"]
    bf16, fp8 = run.rows[0]["rel_l2"], run.rows[1]["rel_l2"]
    assert 5e-4 < bf16 < 5e-3 < fp8 < 6e-2
    header = run.out.splitlines()[0].split()
    assert header == list(bench_op.SolAttentionBench.table) and len(run.out.splitlines()) == 5


def test_density_is_looked_up(bench):
    run = bench(*TINY, "reference", "--density", "0.7,0.8")
    assert [round(row["density"], 2) for row in run.rows] == [0.7, 0.8]
    assert run.rows[0]["tau"] > run.rows[1]["tau"]


def test_sinks_can_be_switched_off(bench):
    on, off = (bench(*TINY, "reference", "--sinks", value).rows[0] for value in ("auto", "off"))
    assert (on["sinks"], off["sinks"]) == ("kv", "off") and on["density"] > off["density"]


def test_settings_reach_the_backend(bench, add_backend):
    seen = {}

    def spy(q, k, v, *, config, layout, scale, with_lse, order):
        seen.update(config=config, layout=layout, scale=scale, q=q)
        result = sol_attention_reference(q, k, v, tau=config.tau, estimator=config.estimator)
        return result.out, result.lse, result.exact_mask.sum(-1).int()

    add_backend("spy", spy)
    options = ("--tau", "0.3", "--estimator", "exact", "--sinks", "off", "--seed", "7")
    run = bench(*TINY, "spy", *options, "--config", "kv_splits=2", "--config", "v_smoothing=mean")
    assert run.rows[0]["parity_ok"] is True, run.rows
    config, layout = seen["config"], seen["layout"]
    assert (config.tau, config.estimator, config.precision) == (0.3, "exact", "bf16")
    assert (config.kv_splits, config.v_smoothing) == (2, "mean")
    assert run.rows[0]["config"] == {"kv_splits": 2, "v_smoothing": "mean"}
    assert layout.sink_kv == () and layout.video == (44, 300) and layout.grid == (2, 8, 16)
    assert seen["scale"] == 128**-0.5 and seen["q"].dtype == torch.bfloat16


def test_inputs_are_made_once_for_each_kind(bench, monkeypatch):
    made = []
    original = bench_op.make_inputs

    def spy(case, generator, seed, order, device):
        made.append((generator, seed, order))
        return original(case, generator, seed, order, device)

    monkeypatch.setattr(bench_op, "make_inputs", spy)
    options = ("--generator", "iid,structured", "--seed", "0,1", "--tau", "0.5,1")
    rows = bench(*TINY, "reference", *options, "--token-order", "morton,raster").rows
    kinds = [("iid", seed, "raster") for seed in (0, 1)]  # random tokens have no order
    kinds += [("structured", seed, order) for seed in (0, 1) for order in ("morton", "raster")]
    assert made == kinds and len(rows) == 16
    seen = {(row["rel_l2"], row["union_ratio_2"]) for row in rows if row["tau"] == 0.5}
    assert len(seen) == len(kinds)


@pytest.mark.parametrize("case", [CASES["tiny"], Case(2, (2, 8, 16), 0, "morton", "no prefix")])
def test_morton_inputs_are_the_raster_ones_in_another_order(case):
    device = torch.device("cpu")
    raster = bench_op.make_inputs(case, "structured", 0, "raster", device)
    morton = bench_op.make_inputs(case, "structured", 0, "morton", device)
    start = case.prefix
    for a, b in zip(raster, morton, strict=True):
        assert torch.equal(a[:, :start], b[:, :start]) and not torch.equal(a, b)
        rows = [{tuple(row) for row in x[0, start:, 0].tolist()} for x in (a, b)]
        assert rows[0] == rows[1]


def test_same_mask_gate(bench, add_backend, with_mask):
    masks = []

    def spy(out, counts, exact_mask):
        masks.append(exact_mask)
        return out, counts

    add_backend("good", with_mask(spy))
    (row,) = bench(*TINY, "good", "--tau", "0.7").rows
    given = [mask for mask in masks if mask is not None]
    q, k, v = bench_op.make_inputs(CASES["tiny"], "structured", 0, "morton", torch.device("cpu"))
    want = sol_attention_reference(q, k, v, tau=0.7, sink_kv=((0, 44),)).exact_mask
    assert len(given) == 1 and torch.equal(given[0], want)
    assert row["error"] is None and row["gate"] == "same mask"
    assert 5e-4 < row["rel_l2"] < 5e-3 and row["rel_l2_own_routing"] == row["rel_l2"]


def everything(out, counts, exact_mask):
    """Right when told the mask, all-exact by itself."""
    return out, counts if exact_mask is not None else torch.full_like(counts, 5)


def noise_by_itself(out, counts, exact_mask):
    return (out if exact_mask is not None else out * 1.3), counts


def nan_at(out, token, head):
    out = out.clone()
    out[0, token, head, 3] = math.nan
    return out


BROKEN = {
    "scaled": (lambda out, counts, mask: (out * 1.01, counts), "rel_l2 0.010"),
    "nan": (lambda out, counts, mask: (nan_at(out, 299, 1), counts), "rel_l2 inf"),
    "route": (everything, "mask_mismatch 0.3, need <= 0.002"),
    "own": (noise_by_itself, "rel_l2_own_routing 0.3, need <= 0.2"),
    "shape": (lambda out, counts, mask: (out[:, :64], counts), "output: got shape"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_speed_for_a_broken_backend(bench, add_backend, with_mask, speeds, name):
    spoil, reason = BROKEN[name]
    add_backend("good", with_mask())
    add_backend("broken", with_mask(spoil))
    run = bench(*TINY, "broken,good")
    broken, good = run.rows
    assert reason in broken["error"] and speeds(broken) == []
    assert good["error"] is None and good["total_ms"] is not None
    if name != "shape":  # that one is a crash, not a wrong value
        assert broken["parity_ok"] is False and run.status == 1
    line = next(line for line in run.out.splitlines() if "broken" in line)
    assert "[1]" in line and reason in run.out


def test_gate_without_a_mask(bench, add_backend, with_mask, speeds):
    inner = with_mask(lambda out, counts, mask: (out * 1.02, counts))

    def own_routing_only(q, k, v, **arguments):
        return inner(q, k, v, **arguments)

    add_backend("broken", own_routing_only)
    (row,) = bench(*TINY, "broken").rows
    assert row["parity_ok"] is False and row["gate"] == "own routing" and speeds(row) == []
    assert "rel_l2 0.02" in row["error"]


def test_uncompared_heads_must_be_finite(bench, add_backend, with_mask, monkeypatch):
    monkeypatch.setitem(CASES, "tiny", Case(6, (2, 8, 16), 44, "raster", "six heads"))
    assert parity_heads(6) == [0, 2, 4, 5]
    add_backend("broken", with_mask(lambda out, counts, mask: (nan_at(out, 0, 1), counts)))
    add_backend("good", with_mask())
    broken, good = bench(*TINY, "broken,good").rows
    assert "rel_l2 inf" in broken["error"] and good["error"] is None


@pytest.mark.parametrize(("heads", "some"), [(1, [0]), (4, [0, 1, 2, 3]), (40, [0, 13, 26, 39])])
def test_parity_heads(heads, some):
    assert parity_heads(heads) == some


def test_steps_of_a_backend(bench, add_backend, with_mask, monkeypatch):
    """``Steps`` beside the implementation fills prep, route and main; the rate is of main."""
    implementation, called = with_mask(), []
    module = types.ModuleType("backend_with_steps")

    class Steps:
        def __init__(self, q, k, v, *, config, layout, scale):
            assert config.precision == "bf16" and layout.grid and q.shape == k.shape == v.shape

        def prepare(self):
            called.append("prepare")
            return "operands"

        def route(self, operands):
            called.append(f"route {operands}")
            return "chosen"

        def attend(self, operands, chosen, *, with_lse):
            called.append(f"attend {operands} {chosen} {with_lse}")

    module.Steps = Steps
    implementation.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add_backend("steps", implementation)
    (row,) = bench(*TINY, "steps").rows
    assert row["error"] is None
    assert None not in (row["prep_ms"], row["route_ms"], row["main_ms"], row["total_ms"])
    once, main = ["prepare", "route operands"], ["attend operands chosen False"]
    assert called == once + [*once, "route operands", *main] * 3
    derived = bench_op.SolAttentionBench().derived({**row, "main_ms": 0.5})
    flop = 4 * 2 * 300**2 * 128 * row["density"]
    assert derived["exact_tflops"] == pytest.approx(flop / 0.5e-3 / 1e12)


def test_morton_in_op(bench, add_backend, add_peer, with_mask):
    """Raster inputs and a permutation give what permuted inputs give; times are of the op alone."""
    orders = []

    def spy(q, k, v, **arguments):
        orders.append(arguments["order"])
        return implementation(q, k, v, **arguments)

    implementation = with_mask()
    add_backend("spy", spy)
    add_backend("masked", with_mask())
    add_peer("peer:dense", lambda: dense)
    add_peer("peer:sparse", lambda: dense, sparse=True)
    names = "spy,masked,peer:dense,peer:sparse"
    before, inside = (
        bench(*TINY, names, "--token-order", order, "--tau", "0.5").rows
        for order in ("morton", "morton_in_op")
    )
    want = span_order(morton_order((2, 8, 16)), 44, 300)
    assert {order is None for order in orders[:4]} == {True} and len(orders) == 8
    assert all(torch.equal(order, want) for order in orders[4:])
    for a, b in zip(before[:3], inside[:3], strict=True):
        assert a["error"] is None and b["error"] is None
        for name in ("rel_l2", "density", "mask_mismatch", "union_ratio_2", "tau"):
            assert a[name] == (b[name] and pytest.approx(b[name], rel=0.02)), name
    assert inside[0]["token_order"] == "morton_in_op"
    # A sparse peer on raster inputs would not be what stands beside it.
    assert before[3]["error"] is None
    assert inside[3]["error"].startswith("takes no token order")


def test_a_backend_that_declines(bench, speeds):
    (row,) = bench(*TINY, "reference", "--config", "block_skip=0.5").rows
    assert row["error"] == "declined: block_skip is not in the reference"
    assert row["parity_ok"] is None and speeds(row) == []


@pytest.mark.parametrize(
    ("generator", "asked", "case", "has"),
    [
        ("structured", "auto", "wan14b-480p", "morton"),
        ("structured", "auto", "h3-768p", "raster"),
        ("structured", "morton", "h3-768p", "morton"),
        ("iid", "auto", "wan14b-480p", "raster"),
        ("iid", "morton", "wan14b-480p", "raster"),
        ("iid", "morton_in_op", "wan14b-480p", "morton_in_op"),
    ],
)
def test_token_order(generator, asked, case, has):
    settings = {"generator": generator, "token_order": asked}
    assert bench_op.token_order(settings, CASES[case]) == has


# -- peers -------------------------------------------------------------------------------------


def test_dense_peer(bench, add_peer):
    add_peer("peer:dense", lambda: dense)
    (row,) = bench(*TINY, "peer:dense", "--precision", "fp8").rows
    assert row["error"] is None and row["gate"] == "all exact" and row["precision"] == "bf16"
    assert row["density"] == 1.0 and row["mask_mismatch"] is None
    assert row["rel_l2_own_routing"] is None


def test_sparse_peer_is_gated_all_exact_and_timed_at_tau(bench, add_peer):
    seen = []

    def sparse(q, k, v, *, tau, scale, sink_blocks):
        seen.append((tau, scale, sink_blocks))
        return sol_attention_reference(q, k, v, tau=tau, sink_kv=((0, 64),)).out

    add_peer("peer:sparse", lambda: sparse, sparse=True)
    run = bench(*TINY, "peer:sparse", "--tau", "0.5,1.0")
    assert [row["error"] for row in run.rows] == [None, None]
    assert all(row["rel_l2"] < 5e-3 and row["rel_l2_own_routing"] < 5e-3 for row in run.rows)
    taus = [tau for tau, *_ in seen]
    # The gate once for both; a comparison and three rounds for each.
    assert taus[0] == -1000.0 and taus.count(-1000.0) == 1
    assert taus.count(0.5) == taus.count(1.0) == 4
    assert {(scale, sinks) for _, scale, sinks in seen} == {(128**-0.5, (0, 1))}
    assert run.rows[0]["density"] > run.rows[1]["density"]


def test_wrong_peer_has_no_speed(bench, add_peer, speeds):
    add_peer("peer:wrong", lambda: lambda q, k, v, **ignored: v)
    run = bench(*TINY, "peer:wrong")
    (row,) = run.rows
    assert row["parity_ok"] is False and "need <= 0.01" in row["error"] and speeds(row) == []
    assert run.status == 1


def test_sparse_peer_that_breaks_at_its_tau(bench, add_peer, speeds):
    def sparse(q, k, v, *, tau, **ignored):
        return dense(q, k, v) if tau == -1000 else torch.full_like(q, math.nan)

    add_peer("peer:nan", lambda: sparse, sparse=True)
    (row,) = bench(*TINY, "peer:nan").rows
    assert row["parity_ok"] is False and "not finite at tau 1" in row["error"] and not speeds(row)


# -- settings ----------------------------------------------------------------------------------


def test_read_config():
    text = {"kv_splits": "2", "routing": "false", "block_skip": "0.5", "k_smoothing": "none"}
    read = {"kv_splits": 2, "routing": False, "block_skip": 0.5, "k_smoothing": "none"}
    assert read_config(text) == read == read_config(read)


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"tau": 1.0}, "config: got 'tau', need one of routing"),
        ({"kv_splits": 3}, "kv_splits: got 3"),
        ({"probability_scale": "x"}, "probability_scale: got 'x', need a number"),
    ],
)
def test_read_config_says_what_is_wrong(extra, what):
    with pytest.raises(ValueError, match=what):
        read_config(extra)
