"""Interleaved timing with a cold L2."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # above the L2 of any GPU here (H200: 50-60 MB)
# About half a millisecond of writes on an H200: longer than a host needs to enqueue an op, so that
# launch overhead hides behind it, as it does inside a model.
FLUSH_WRITES = 8
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable: median, quartiles, number of samples."""

    median: float
    p25: float
    p75: float
    samples: int


@dataclass(frozen=True)
class Rounds:
    """How long to measure.

    Attributes:
        warmup: rounds that are not counted (compilation and autotuning fall in the parity gate).
        most: rounds after which it ends.
        budget_s: seconds after which it ends, once ``LEAST_ROUNDS`` are done.
    """

    warmup: int = 2
    most: int = 30
    budget_s: float = 4.0


class Stopwatch:
    """Times one call on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.buffer = (
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.cuda else None
        )

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """One call; errors of the device surface here, with the call that made them."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(FLUSH_WRITES):
                self.buffer.fill_(1)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)


def interleaved(
    calls: Mapping[Hashable, Callable[[], Any]],
    device: torch.device,
    rounds: Rounds,
    out_of_time: Callable[[], bool] = lambda: False,
) -> dict[Hashable, "Timing | Exception"]:
    """Time all ``calls``, one launch each per round.

    Returns:
        For every key its timing, or the exception that it raised (the others go on).
    """
    stopwatch = Stopwatch(device)
    samples: dict[Hashable, list[float]] = {key: [] for key in calls}
    failed: dict[Hashable, Exception] = {}

    def one_round(keep: bool) -> None:
        for key, call in calls.items():
            if key in failed:
                continue
            try:
                took = stopwatch.milliseconds(call)
            except Exception as error:  # a peer that crashes must not cost the others their row
                failed[key] = error
                continue
            if keep:
                samples[key].append(took)

    for _ in range(rounds.warmup):
        one_round(keep=False)
    start = time.monotonic()
    for done in range(1, rounds.most + 1):
        one_round(keep=True)
        over = time.monotonic() - start > rounds.budget_s or out_of_time()
        if over and done >= LEAST_ROUNDS:
            break
    return {key: failed.get(key) or summary(values) for key, values in samples.items()}


def summary(milliseconds: list[float]) -> Timing:
    """Median and quartiles (linear between samples)."""
    values = torch.tensor(milliseconds, dtype=torch.float64)
    p25, median, p75 = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return Timing(median, p25, p75, len(milliseconds))


def peak_extra_mb(call: Callable[[], Any], device: torch.device) -> float | None:
    """MiB that one call holds beyond what was allocated before, its result included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
