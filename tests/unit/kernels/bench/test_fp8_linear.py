"""Rows of ``fp8_linear``, run end to end on a CPU."""

import pytest
import torch

from hopper_sol.kernels.bench.ops import fp8_linear as bench_op
from hopper_sol.kernels.bench.ops.fp8_linear import CASES, FP8LinearBench

TINY = ("fp8_linear", "--case", "tiny", "--backend")


def test_cases_are_the_layers_of_the_models():
    shapes = {name: (c.m, c.k, c.n, c.outputs) for name, c in CASES.items()}
    assert shapes["wan1.3b-480p-qkv"] == (32760, 1536, 1536, 3)
    assert shapes["wan14b-480p-qkv"] == (32760, 5120, 5120, 3)
    assert shapes["wan14b-720p-ffn_up"] == (75600, 5120, 13824, 1)
    assert shapes["wan14b-480p-ffn_down"] == (32760, 13824, 5120, 1)
    assert shapes["h3-768p-qkv"] == (32626, 5376, 21504, 1)
    assert shapes["h3-768p-o"] == (32626, 7168, 5376, 1)
    assert shapes["h3-768p-fc1"] == (32626, 5376, 28672, 1)
    assert shapes["h3-768p-fc2"] == (32626, 14336, 5376, 1)


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
    assert run.rows[0]["rel_l2"] != run.rows[2]["rel_l2"]


def test_rate_counts_all_outputs():
    row = {"shape": [65, 128, 96], "outputs": 3, "total_ms": 0.001}
    flop = 2 * 65 * 128 * 96 * 3
    assert FP8LinearBench().derived(row)["tflops"] == pytest.approx(flop / 1e-6 / 1e12)


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
