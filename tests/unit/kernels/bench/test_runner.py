"""Rows survive crashes, limits and a killed run; a speed never stands without parity."""

import json

import pytest

from hopper_sol.kernels.bench import runner
from hopper_sol.kernels.bench.base import Declined
from hopper_sol.kernels.bench.runner import PENDING, Clock, check_no_speed_without_parity, described
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference

TINY = ("sol_attention", "--case", "tiny", "--backend")


def dense(q, k, v, **ignored):
    return sol_attention_reference(q, k, v, routing=False).out


def missing():
    raise ModuleNotFoundError("No module named 'nothing'")


def crashing(q, k, v, **ignored):
    raise RuntimeError("kernel\nfault")


def crash_after(calls):
    left = iter(range(calls))

    def run(q, k, v, **ignored):
        if next(left, None) is None:
            raise RuntimeError("late")
        return dense(q, k, v)

    return run


def test_crashing_peers_are_rows(bench, add_peer, speeds):
    add_peer("peer:missing", missing)
    add_peer("peer:crash", lambda: crashing)
    # Passes its gate and two rounds; the third fails.
    add_peer("peer:late", lambda: crash_after(3))
    add_peer("peer:good", lambda: dense)
    run = bench(*TINY, "peer:missing,peer:crash,peer:late,peer:good")
    assert [row["error"] for row in run.rows] == [
        "ModuleNotFoundError: No module named 'nothing'",
        "RuntimeError: kernel fault",
        "RuntimeError: late",
        None,
    ]
    assert [bool(speeds(row)) for row in run.rows] == [False, False, False, True]
    assert [row["parity_ok"] for row in run.rows] == [None, None, True, True]
    assert run.status == 0  # a crash is reported, but is not a wrong result


def test_inputs_that_cannot_be_made(bench, monkeypatch):
    def out_of_memory(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hopper_sol.kernels.bench.ops.sol_attention.make_inputs", out_of_memory)
    (row,) = bench(*TINY, "reference").rows
    assert row["error"] == "inputs: RuntimeError: out of memory"


def test_the_file_is_written_after_every_row(bench, add_peer, tmp_path):
    seen = []

    def looking():
        seen.append(json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"])
        return dense

    add_peer("peer:look", looking)
    run = bench(*TINY, "reference,peer:look", "--tau", "1.0,0.5")
    first, second = seen
    # All four rows are there from the start; the gate of the first is already written.
    assert [row["error"] for row in first] == [PENDING] * 4
    assert [row["parity_ok"] for row in first] == [True, None, None, None]
    assert [row["error"] for row in second] == [None, None, PENDING, PENDING]
    assert second[:2] == run.rows[:2]


def test_planned_rows_are_written_before_anything_runs(bench, monkeypatch, tmp_path):
    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("hopper_sol.kernels.bench.ops.sol_attention.make_inputs", killed)
    with pytest.raises(KeyboardInterrupt):
        bench(*TINY, "reference", "--tau", "0.5,1")
    rows = json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"]
    assert [row["error"] for row in rows] == [PENDING] * 2


def test_a_killed_run_keeps_its_rows(bench, add_peer, tmp_path):
    def killed():
        raise KeyboardInterrupt

    add_peer("peer:killed", killed)
    plan = tmp_path / "plan.json"
    entry = {"op": "sol_attention", "case": "tiny"}
    plan.write_text(
        json.dumps([{**entry, "backend": "reference"}, {**entry, "backend": "peer:killed"}])
    )
    with pytest.raises(KeyboardInterrupt):
        bench("--plan", str(plan))
    rows = json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"]
    assert rows[0]["total_ms"] is not None and rows[1]["error"] == PENDING
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out.json"]


def test_time_limit_before_the_first_row(bench, speeds, monkeypatch):
    def no_inputs(*arguments):
        pytest.fail("inputs made after the time limit")

    monkeypatch.setattr("hopper_sol.kernels.bench.ops.sol_attention.make_inputs", no_inputs)
    run = bench(*TINY, "reference", "--tau", "0.5,1", "--time-limit", "0")
    assert [row["error"] for row in run.rows] == [
        "not measured: the time limit of 0 s was over"
    ] * 2
    assert not any(speeds(row) for row in run.rows) and run.status == 0
    assert [row["tau"] for row in run.rows] == [0.5, 1.0]


def test_time_limit_between_rows(bench, add_peer, monkeypatch, speeds):
    over = []
    monkeypatch.setattr(Clock, "over", lambda self: bool(over))

    def slow():
        over.append(True)
        return dense

    add_peer("peer:slow", slow)
    add_peer("peer:next", lambda: dense)
    run = bench(*TINY, "peer:slow,peer:next", "--tau", "0.5,1", "--time-limit", "99")
    limit = "not measured: the time limit of 99 s was over"
    # What had passed its gate gets the fewest rounds that make a median.
    assert [row["error"] for row in run.rows] == [None, limit, limit, limit]
    assert run.rows[0]["iterations"] == 3 and not any(speeds(row) for row in run.rows[1:])


def test_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    clock, endless = Clock(5.0), Clock(None)
    now[0] = 104.9
    assert not clock.over()
    now[0] = 105.0
    assert clock.over() and not endless.over()


@pytest.mark.parametrize("parity", [False, None])
@pytest.mark.parametrize("field", ["total_ms", "p25_ms", "exact_tflops", "tflops", "quant_ms"])
def test_speed_without_parity_is_refused(parity, field):
    row = {"backend": "b", "case": "c", "parity_ok": parity, "total_ms": None, field: 1.0}
    with pytest.raises(RuntimeError, match=field):
        check_no_speed_without_parity([row])
    check_no_speed_without_parity([{**row, "parity_ok": True}, {**row, field: None}])


def test_described():
    assert described(Declined("declined: no GPU")) == "declined: no GPU"
    assert described(KeyError("a\n b")) == "KeyError: 'a\\n b'"
    assert len(described(ValueError("x" * 9999))) == 400
