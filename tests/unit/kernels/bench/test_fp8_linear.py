"""Rows of ``fp8_linear``, run end to end on a CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from hopper_sol.kernels import quantize_rowwise
from hopper_sol.kernels.bench.ops import fp8_block, fp8_producers
from hopper_sol.kernels.bench.ops import fp8_linear as bench_op
from hopper_sol.kernels.bench.ops.fp8_linear import CASES, FP8LinearBench
from hopper_sol.kernels.bench.ops.fp8_producers import PRODUCERS
from hopper_sol.kernels.bench.plan import expand, read_plan

PLANS = Path(bench_op.__file__).resolve().parents[1] / "plans"

TINY = ("fp8_linear", "--case", "tiny", "--backend")


def test_cases_are_the_layers_of_the_models():
    def layer(name):
        case = CASES[name]
        return (*case.shape, case.outputs, case.producer)

    assert layer("wan1.3b-480p-qkv") == (32760, 1536, 1536, 3, "")
    assert layer("wan1.3b-480p-qkv_fused") == (32760, 1536, 4608, 1, "")
    assert layer("wan14b-480p-qkv") == (32760, 5120, 5120, 3, "")
    assert layer("wan14b-480p-norm_qkv") == (32760, 5120, 5120, 3, "wan_norm")
    assert layer("wan14b-720p-ffn_up") == (75600, 5120, 13824, 1, "")
    assert layer("wan14b-480p-ffn_down") == (32760, 13824, 5120, 1, "")
    assert layer("wan14b-480p-gelu_ffn_down") == (32760, 13824, 5120, 1, "gelu")
    assert layer("h3-768p-qkv") == (32626, 5376, 21504, 1, "")
    assert layer("h3-768p-norm_qkv") == (32626, 5376, 21504, 1, "h3_norm")
    assert layer("h3-768p-o") == (32626, 7168, 5376, 1, "")
    assert layer("h3-768p-fc1") == (32626, 5376, 28672, 1, "")
    assert layer("h3-768p-fc2") == (32626, 14336, 5376, 1, "")
    assert layer("h3-768p-swiglu_fc2") == (32626, 14336, 5376, 1, "swiglu")


def test_the_plan_names_cases_that_exist():
    plan = read_plan(PLANS / "fp8_linear.json")
    device = torch.device("cpu")
    jobs = [job for entry in plan for job in expand(entry, FP8LinearBench(), device)]
    assert {job.settings["case"] for job in jobs} <= set(CASES)
    fused = {(job.settings["case"], job.settings["fused"]) for job in jobs}
    for case in ("wan14b-480p-block", "wan14b-480p-gelu_ffn_down", "h3-768p-swiglu_fc2"):
        assert {(case, "on"), (case, "off")} <= fused


def test_rows(bench, speeds):
    run = bench(*TINY, "reference,peer:f_linear_bf16", "--generator", "iid,structured")
    assert run.status == 0 and [row["error"] for row in run.rows] == [None] * 4
    for ours, peer in (run.rows[:2], run.rows[2:]):
        assert set(speeds(ours)) == {
            "quant_ms",
            "gemm_ms",
            "total_ms",
            "p25_ms",
            "p75_ms",
            "tflops",
        }
        assert set(speeds(peer)) == {"total_ms", "p25_ms", "p75_ms", "tflops"}
        assert 0.02 < ours["rel_l2"] < 0.04 and 5e-4 < peer["rel_l2"] < 5e-3
        assert peer["precision"] == "bf16" and ours["precision"] == "fp8"
        assert ours["shape"] == [65, 128, 96] and ours["outputs"] == 3
        assert ours["fused"] is None and ours["quant_tb_s"] is not None
    assert run.rows[0]["rel_l2"] != run.rows[2]["rel_l2"]


def test_rates():
    def derived(**row):
        return FP8LinearBench().derived({"fused": None, "quant_ms": None, **row})

    flop = 2 * 65 * 128 * 96 * 3
    found = derived(case="tiny", total_ms=0.001, quant_ms=0.002)
    assert found["tflops"] == pytest.approx(flop / 1e-6 / 1e12)
    # BF16 in, E4M3 and one FP32 scale out.
    assert found["quant_tb_s"] == pytest.approx(65 * (128 * 3 + 4) / 2e-6 / 1e12)
    gated = derived(case="tiny-swiglu", total_ms=1.0, quant_ms=0.002, fused="on")
    assert gated["quant_tb_s"] == pytest.approx(65 * (256 * 2 + 128 + 4) / 2e-6 / 1e12)
    # Passes of the model's own operations are in the time then.
    assert "quant_tb_s" not in derived(case="tiny-gelu", total_ms=1.0, quant_ms=1.0, fused="off")
    block = derived(case="tiny-block", total_ms=0.001, fused="on")
    square, ffn = 128 * 128 * (6 * 65 + 2 * 7), 2 * 65 * 128 * 192
    assert block == {"tflops": pytest.approx(2 * (square + ffn) / 1e-6 / 1e12)}


@pytest.mark.parametrize("producer", sorted(PRODUCERS))
@pytest.mark.parametrize("generator", ["iid", "structured"])
def test_rows_with_a_producer(bench, speeds, producer, generator):
    case = ("fp8_linear", "--case", f"tiny-{producer}", "--generator", generator)
    run = bench(*case, "--fused", "on,off", "--backend", "reference,peer:f_linear_bf16")
    assert run.status == 0 and [row["error"] for row in run.rows] == [None] * 4
    fused, _, apart, peer = run.rows
    assert (fused["fused"], apart["fused"]) == ("on", "off")
    assert 0.02 < fused["rel_l2"] < 0.04 and peer["rel_l2"] < 1e-2
    assert "gemm_ms" in speeds(fused) and "quant_ms" in speeds(apart)
    assert fused["quant_tb_s"] is not None and apart["quant_tb_s"] is None


def test_fused_and_apart_take_different_ways(bench, monkeypatch):
    used = []
    fused = fp8_producers.quantize_gelu

    def spy(x, *, backend):
        used.append(tuple(x.shape))
        return fused(x, backend=backend)

    monkeypatch.setattr(fp8_producers, "quantize_gelu", spy)
    tiny = ("fp8_linear", "--case", "tiny-gelu", "--backend", "reference", "--fused")
    bench(*tiny, "off")
    assert used == []
    bench(*tiny, "on")
    assert set(used) == {(65, 128)}


@pytest.mark.parametrize("producer", sorted(PRODUCERS))
def test_a_wrong_producer_has_no_speed(bench, monkeypatch, speeds, producer):
    right = PRODUCERS[producer].bind

    def bind(m, k, draw):
        bound = right(m, k, draw)
        wrong = lambda x, backend: quantize_rowwise(bound.eager(x) + 0.2, backend=backend)
        return dataclasses.replace(bound, fused=wrong)

    changed = dataclasses.replace(PRODUCERS[producer], bind=bind)
    monkeypatch.setitem(PRODUCERS, producer, changed)
    (row,) = bench("fp8_linear", "--case", f"tiny-{producer}", "--backend", "reference").rows
    assert row["parity_ok"] is False and speeds(row) == []


@pytest.mark.parametrize("generator", ["iid", "structured"])
def test_block(bench, speeds, generator):
    case = ("fp8_linear", "--case", "tiny-block", "--generator", generator)
    run = bench(*case, "--fused", "on,off", "--backend", "reference,peer:f_linear_bf16")
    assert run.status == 0 and [row["error"] for row in run.rows] == [None] * 4
    fused, peer, apart, _ = run.rows
    assert set(speeds(fused)) == {"total_ms", "p25_ms", "p75_ms", "tflops"}
    assert 0.04 < fused["rel_l2"] <= bench_op.BLOCK_BOUND and peer["rel_l2"] < 1e-2
    assert (fused["fused"], apart["fused"]) == ("on", "off")


def test_block_is_wans_without_attention():
    """Written out a second time, in FP64: ComfyUI's WanAttentionBlock with stand-ins."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape, size=1.0: size * torch.randn(shape, generator=generator)
    w = fp8_block.Weights(32, 48, draw)
    x, text = draw((5, 32)), draw((3, 32))
    got = fp8_block.run_block(x, text, w, fp8_block.Plain(w))[-1]

    def linear(name, y):
        weight, bias = (t.double() for t in w.linears[name])
        return y @ weight.t() + bias

    def layer(y):
        y = y - y.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = w.modulation.double()
    want = x.double()
    want = want + gate * linear("o", linear("v", layer(want) * (1 + scale) + shift))
    y = layer(want) * w.norms["norm3"].double() + w.norms["norm3_bias"].double()
    q = linear("cross_q", y)
    q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.norms["norm_cross_q"].double()
    want = want + linear("cross_o", q)
    inner = linear("up", layer(want) * (1 + ffn_scale) + ffn_shift)
    inner = torch.nn.functional.gelu(inner, approximate="tanh")
    want = want + ffn_gate * linear("down", inner)
    # FP32 sums of at most 48 terms, some ten operations in a row.
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


LINEARS = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o", "up", "down")


@pytest.mark.parametrize("name", LINEARS)
def test_every_linear_of_a_block_is_gated(bench, monkeypatch, speeds, name):
    prepared = fp8_block.Quantized.__init__

    def wrong_bias(self, *arguments):
        prepared(self, *arguments)
        codes, scale, bias = self._linears[name]
        self._linears[name] = (codes, scale, -5 * bias)

    monkeypatch.setattr(fp8_block.Quantized, "__init__", wrong_bias)
    (row,) = bench("fp8_linear", "--case", "tiny-block", "--backend", "reference").rows
    assert row["parity_ok"] is False and speeds(row) == []


def test_wrong_values_have_no_speed(bench, add_peer, speeds):
    linear = torch.nn.functional.linear

    def transposed_bias(x, weight, bias):
        return linear(x, weight, bias.flip(0))

    add_peer("peer:wrong", lambda: transposed_bias, op="fp8_linear", bound=5e-3)
    run = bench(*TINY, "peer:wrong")
    (row,) = run.rows
    assert row["parity_ok"] is False and speeds(row) == [] and run.status == 1
    assert "need <= 0.005" in row["error"]


def test_every_output_and_every_row_counts(bench, add_peer, monkeypatch):
    monkeypatch.setattr(bench_op, "ROWS", 16)
    calls = []

    def last_row_of_the_third(x, weight, bias):
        out = torch.nn.functional.linear(x, weight, bias)
        calls.append(1)
        if len(calls) == 3:
            out[-1, -1] = float("nan")
        return out

    add_peer("peer:nan", lambda: last_row_of_the_third, op="fp8_linear")
    (row,) = bench(*TINY, "peer:nan").rows
    assert row["parity_ok"] is False and "rel_l2 inf" in row["error"]


def test_a_backend_that_declines(bench, speeds):
    (row,) = bench(*TINY, "triton").rows
    assert row["error"].startswith("declined: needs a cuda device") and speeds(row) == []


def test_rows_of_the_activation_are_quantised_once(bench, monkeypatch):
    quantised = []
    original = bench_op.quantize_rowwise

    def spy(x, **options):
        quantised.append(tuple(x.shape))
        return original(x, **options)

    monkeypatch.setattr(bench_op, "quantize_rowwise", spy)
    bench(*TINY, "reference")
    weights, activations = quantised.count((96, 128)), quantised.count((65, 128))
    assert weights == 3
    # Gate, "gemm" (once for all rounds), and 3 rounds of "quant" and "total".
    assert activations == 1 + 1 + 3 + 3
