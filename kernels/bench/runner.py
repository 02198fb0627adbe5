"""Jobs -> rows: inputs, parity gate, interleaved times, in this order and never without the gate."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .base import Declined, Gate, Job, Op
from .timing import Rounds, Timing, interleaved, peak_extra_mb

PENDING = "not measured: the run ended before its times"
TIMES = ("_ms", "tflops")  # ends of the names of fields that speak of speed


class Clock:
    """Says when the time limit is over. ``limit_s`` None is no limit."""

    def __init__(self, limit_s: float | None):
        self.limit_s = limit_s
        self.start = time.monotonic()

    def over(self) -> bool:
        return self.limit_s is not None and time.monotonic() - self.start >= self.limit_s

    def reason(self) -> str:
        return f"not measured: the time limit of {self.limit_s:g} s was over"


def empty_rows(job: Job, op: Op) -> list[dict[str, Any]]:
    """Rows of a job before anything ran, with every field."""
    rows = []
    for backend, precision in job.contenders:
        known = {"op": op.name, "backend": backend, "precision": precision, "error": PENDING}
        known.update(op.base_row(job))
        rows.append({name: known.get(name) for name in op.fields})
    return rows


def run_job(
    job: Job,
    op: Op,
    rows: Sequence[dict[str, Any]],
    device: torch.device,
    rounds: Rounds,
    clock: Clock,
    saved: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Fill ``rows`` (from ``empty_rows``); ``saved`` is called whenever one has changed."""

    def fail(row, text):
        row["error"] = text
        saved(row)

    if clock.over():
        for row in rows:
            fail(row, clock.reason())
        return
    try:
        shared = op.describe_inputs(job, device)
    except Exception as error:
        for row in rows:
            fail(row, f"inputs: {described(error)}")
        return

    stages: dict[int, Mapping[str, Callable[[], Any]]] = {}
    for index, (row, (backend, precision)) in enumerate(zip(rows, job.contenders, strict=True)):
        row.update({name: value for name, value in shared.items() if row.get(name) is None})
        if clock.over():
            fail(row, clock.reason())
            continue
        try:
            contender = op.contender(job, backend, precision, device)
            gate = contender.check()
            apply_gate(row, gate)
            if gate.ok:
                stages[index] = contender.stages()
                row["peak_extra_mb"] = rounded(peak_extra_mb(stages[index]["total"], device))
        except Exception as error:
            stages.pop(index, None)
            fail(row, described(error))
            continue
        saved(row)

    calls = {(i, name): call for i, parts in stages.items() for name, call in parts.items()}
    timings = interleaved(calls, device, rounds, clock.over)
    for index in stages:
        row = rows[index]
        parts = {name: timings[index, name] for name in stages[index]}
        errors = [t for t in parts.values() if isinstance(t, Exception)]
        if errors:
            fail(row, described(errors[0]))
            continue
        fill_times(row, parts, op)
        row["error"] = None
        saved(row)


def apply_gate(row: dict[str, Any], gate: Gate) -> None:
    """Write the outcome of the gate; a red one is also the row's error."""
    row.update({name: rounded(value, 6) for name, value in gate.fields.items() if name in row})
    row["parity_ok"] = gate.ok
    if not gate.ok:
        row["error"] = f"parity failed: {gate.reason}"


def fill_times(row: dict[str, Any], parts: Mapping[str, Timing], op: Op) -> None:
    """Write medians, the quartiles of the total, and what follows from them."""
    total = parts["total"]
    measured = {f"{name}_ms": timing.median for name, timing in parts.items()}
    measured.update(p25_ms=total.p25, p75_ms=total.p75, iterations=total.samples)
    measured.update(op.derived({**row, **measured}))
    row.update({name: rounded(value) for name, value in measured.items() if name in row})


def check_no_speed_without_parity(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError if a row shows a speed that its gate did not allow."""
    for row in rows:
        shown = [n for n, value in row.items() if n.endswith(TIMES) and value is not None]
        if shown and row["parity_ok"] is not True:
            raise RuntimeError(f"{row['backend']} ({row['case']}): {shown} without parity")


def described(error: BaseException) -> str:
    """An exception in one line, short enough for a table's footnote."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, Declined) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:400]


def rounded(value: Any, digits: int = 4) -> Any:
    """Floats to ``digits`` places, anything else as it is."""
    return round(value, digits) if isinstance(value, float) else value
