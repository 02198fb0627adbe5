"""Order and number of launches, and what becomes of one that fails. Nothing is compared with time."""

import pytest
import torch

from hopper_sol.kernels.bench.timing import (
    LEAST_ROUNDS,
    Rounds,
    Timing,
    interleaved,
    peak_extra_mb,
    summary,
)

CPU = torch.device("cpu")


def test_launches_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = interleaved(calls, CPU, Rounds(warmup=1, most=4, budget_s=60))
    assert "".join(order) == "abc" * 5
    assert {name: t.samples for name, t in timings.items()} == {"a": 4, "b": 4, "c": 4}


def test_budget_and_limit_leave_the_fewest_rounds():
    calls = []
    none = Rounds(warmup=0, most=50, budget_s=-1.0)
    assert interleaved({"a": lambda: calls.append(1)}, CPU, none)["a"].samples == LEAST_ROUNDS
    limit = interleaved({"a": lambda: None}, CPU, Rounds(0, 50, 60), lambda: True)
    assert limit["a"].samples == LEAST_ROUNDS
    assert interleaved({"a": lambda: None}, CPU, Rounds(0, 2, 60), lambda: True)["a"].samples == 2


def test_a_failing_call_leaves_the_round():
    order = []

    def fails():
        order.append("f")
        if order.count("f") == 2:
            raise RuntimeError("second call")

    timings = interleaved({"f": fails, "a": lambda: order.append("a")}, CPU, Rounds(0, 4, 60))
    assert "".join(order) == "fafaaa"
    assert str(timings["f"]) == "second call" and timings["a"].samples == 4


def test_no_calls():
    assert interleaved({}, CPU, Rounds(0, 1, 1)) == {}


def test_summary_is_median_and_quartiles():
    assert summary([4.0, 1.0, 3.0, 2.0, 10.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert summary([1.0, 2.0]) == Timing(1.5, 1.25, 1.75, 2)
    assert summary([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_peak_memory_is_a_gpu_figure():
    def never():
        pytest.fail("called")

    assert peak_extra_mb(never, CPU) is None
