"""FP8 Linear calls: computed, handed back with a reason, counted."""

import logging
import threading

import pytest
import torch
import torch.nn.functional as F

from hopper_sol.kernels import BackendUnavailable, fp8_linear, quantize_rowwise
from hopper_sol.nodes.patching import linear_run
from hopper_sol.nodes.patching.linear_run import LinearRun, compute, counting


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, WEIGHT, BIAS = normal(20, 48), normal(32, 48, seed=1), normal(32, seed=2)


@pytest.fixture
def run():
    run = LinearRun()
    with counting(run):
        yield run


@pytest.fixture
def logs(caplog):
    caplog.set_level(logging.INFO, logger="hopper_sol")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelno == level]


def test_computes_and_counts(run):
    out = compute(X, WEIGHT, BIAS, None)
    assert torch.equal(out, fp8_linear(X, *quantize_rowwise(WEIGHT), BIAS))
    assert run.seal() == {
        "calls": 1,
        "fp8_calls": 1,
        "backend": {"torch": 1},
        "fallbacks": {},
        "fused": {},
        "unfused": {},
        "declined_backends": {"triton": "needs a cuda device, tensors are on cpu"},
        "notes": [],
    }


@pytest.mark.parametrize("grid", [None, 0.02])
def test_grid_reaches_the_weight_only(run, grid, monkeypatch):
    seen = []
    original = linear_run.quantize_rowwise
    monkeypatch.setattr(
        linear_run, "quantize_rowwise", lambda w, **kw: seen.append((w, kw)) or original(w, **kw)
    )
    compute(X, WEIGHT, None, grid)
    ((quantized, options),) = seen
    assert quantized is WEIGHT and options == {"backend": "torch", "grid": grid}


@pytest.mark.parametrize(
    ("shape", "fp8"), [((16, 48), 1), ((15, 48), 0), ((2, 8, 48), 1), ((48,), 0)]
)
def test_few_rows_stay(run, logs, shape, fp8):
    x = normal(*shape)
    out = compute(x, WEIGHT, BIAS, None)
    assert run.fp8_calls == fp8
    if not fp8:
        assert torch.equal(out, F.linear(x, WEIGHT, BIAS))
        assert run.seal()["fallbacks"] == {"fewer than 16 rows": 1}
        assert logs(logging.WARNING) == []  # expected, nothing to warn about


def test_no_rows(run):
    assert compute(X[:0], WEIGHT, BIAS, None).shape == (0, 32)


def test_no_backend_gives_the_models_own_and_warns_once(run, logs, monkeypatch):
    def none(call, exclude):
        raise BackendUnavailable("fp8_linear", "auto", {"torch": "too old"})

    monkeypatch.setattr(linear_run, "choose_linear_backend", none)
    for _ in range(3):
        assert torch.equal(compute(X, WEIGHT, BIAS, None), F.linear(X, WEIGHT, BIAS))
    assert run.seal()["fallbacks"] == {"torch: too old": 3}
    (line,) = logs(logging.WARNING)
    assert "own precision: torch: too old" in line


def broken(monkeypatch, error, backend="torch"):
    attempts = []
    original = linear_run.fp8_linear

    def failing(*args, **kwargs):
        attempts.append(kwargs["backend"])
        if kwargs["backend"] == backend:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(linear_run, "fp8_linear", failing)
    return attempts


def test_failure_switches_the_backend_off_for_the_run(run, logs, monkeypatch):
    attempts = broken(monkeypatch, RuntimeError("no such instruction\nsecond line"))
    outputs = [compute(X, WEIGHT, BIAS, None) for _ in range(5)]
    assert attempts == ["torch", *["reference"] * 4]
    assert torch.equal(outputs[0], F.linear(X, WEIGHT, BIAS))
    sealed = run.seal()
    assert sealed["fallbacks"] == {"backend 'torch' failed": 1}
    assert sealed["backend"] == {"reference": 4} and sealed["calls"] == 5
    assert sealed["declined_backends"]["torch"] == "switched off after it failed"
    assert sealed["notes"] == [
        "backend 'torch' failed and was switched off: RuntimeError: no such instruction"
    ]
    (record,) = logs(logging.ERROR)
    assert "FP8 Linear: backend 'torch' failed and is off" in record and "second line" in record


def test_failure_in_two_threads_is_reported_once(logs):
    run = LinearRun()
    threads = [
        threading.Thread(target=run.failure, args=("torch", RuntimeError("x"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.notes) == 1 and len(logs(logging.ERROR)) == 1


def test_the_next_run_tries_again(monkeypatch):
    attempts = broken(monkeypatch, RuntimeError("x"))
    for _ in range(2):
        with counting(LinearRun()):
            compute(X, WEIGHT, BIAS, None)
    assert attempts == ["torch", "torch"]


def test_cancel_is_no_failure(run, interrupt, monkeypatch):
    broken(monkeypatch, interrupt())
    with pytest.raises(interrupt):
        compute(X, WEIGHT, BIAS, None)
    assert run.seal()["calls"] == 0 and run.failed == frozenset()


def test_counting_is_per_run_and_ends():
    outer, inner = LinearRun(), LinearRun()
    with counting(outer):
        compute(X, WEIGHT, None, None)
        with counting(inner):
            compute(X, WEIGHT, None, None)
            compute(X, WEIGHT, None, None)
    compute(X, WEIGHT, None, None)  # nobody's
    assert (outer.fp8_calls, inner.fp8_calls) == (1, 2)


def test_counting_ends_with_an_error():
    with pytest.raises(RuntimeError), counting(LinearRun()):
        raise RuntimeError
    assert linear_run._runs == []
