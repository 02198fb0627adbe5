"""What the FP8 Linears of one sampler run do: compute, fall back, count.

A layer's weight knows neither its model nor its run, so the run that is in progress is found here.
"""

import logging
import threading
from collections import Counter
from contextlib import contextmanager

import torch

from ...kernels import (
    BackendUnavailable,
    QuantizedRows,
    choose_linear_backend,
    describe_linear,
    fp8_linear,
    quantize_rowwise,
)
from .failures import describe_failure, is_interrupt, raise_if_sticky
from .linear_rows import dequantize_rows, stochastic_rows
from .linear_share import SharedRows

log = logging.getLogger("hopper_sol")
# Below it a GEMM is bound by reading the weight, and quantising that costs another two reads.
MIN_ROWS = 16
FEW_ROWS = f"fewer than {MIN_ROWS} rows"


class LinearRun:
    """Counters of a run. Safe to call from several threads at once; touches no device."""

    def __init__(self):
        self.fp8_calls = 0
        self.backends: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.declined: dict[str, str] = {}
        self.notes: list[str] = []
        self.failed: frozenset[str] = frozenset()
        self._shared = SharedRows()
        self._lock = threading.Lock()

    def converted(self, backend: str, declined: dict[str, str]) -> None:
        """A call ran in FP8."""
        with self._lock:
            self.fp8_calls += 1
            self.backends[backend] += 1
            self.declined.update(declined)

    def fell_back(self, reason: str) -> None:
        """A call ran as the model's own Linear."""
        with self._lock:
            first = reason not in self.fallbacks
            self.fallbacks[reason] += 1
        if first and reason != FEW_ROWS:
            log.warning("FP8 Linear: calls run in the model's own precision: %s", reason)

    def failure(self, backend: str, error: Exception) -> str:
        """Switch ``backend`` off for the rest of the run; the reason to count."""
        with self._lock:
            first = backend not in self.failed
            self.failed |= {backend}
            if first:
                what = describe_failure("FP8 Linear", backend, error)
                self.notes.append(f"backend {backend!r} failed and was switched off: {what}")
        return f"backend {backend!r} failed"

    def quantized(self, x: torch.Tensor, share: str, backend: str):
        """``x`` as an operand of fp8_linear: its rows, if other layers may have a use for them."""
        if not share:
            self._shared.clear(x.device)
            return x
        return self._shared.rows(x, share, backend, lambda: quantize_rowwise(x, backend=backend))

    def seal(self) -> dict:
        """The counts as plain data."""
        with self._lock:
            return {
                "calls": self.fp8_calls + sum(self.fallbacks.values()),
                "fp8_calls": self.fp8_calls,
                "backend": dict(self.backends),
                "fallbacks": dict(self.fallbacks.most_common()),
                "declined_backends": dict(self.declined),
                "notes": list(self.notes),
            }


_runs: list[LinearRun] = []


@contextmanager
def counting(run: LinearRun | None):
    """Context in which FP8 Linear calls count into ``run``; None counts nowhere new."""
    if run is None:
        yield
        return
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)


def compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grid: float | None,
    share: str = "",
) -> torch.Tensor:
    """F.linear in FP8 where a backend takes it, else as it is. Always a new tensor.

    Args:
        x: (..., K) bfloat16, float16 or float32.
        weight: (N, K), quantised here; grid: see ``quantize_rowwise``.
        bias: (N,) or None.
        share: key of ``share_keys``, for a layer whose input others have as well.
    """
    return _compute(
        x,
        weight,
        bias,
        share,
        rows=lambda backend: quantize_rowwise(weight, backend=backend, grid=grid),
        plain=lambda: weight,
        reason=_few_rows(x, weight),
    )


def compute_patched(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seed: int, share: str = ""
) -> torch.Tensor:
    """As ``compute``, with the weight rounded as ComfyUI rounds one that it merges a LoRA into.

    For a weight that consists of E4M3 numbers plus a LoRA: see ``stochastic_rows``.
    """
    return _compute(
        x,
        weight,
        bias,
        share,
        rows=lambda backend: stochastic_rows(weight, seed),
        plain=lambda: weight,
        reason=_few_rows(x, weight),
    )


def compute_rows(
    x: torch.Tensor, weight: QuantizedRows, bias: torch.Tensor | None, share: str = ""
) -> torch.Tensor:
    """As ``compute`` for a weight that is kept in FP8: codes (N, K), scale (N, 1).

    With few rows as well: nothing is quantised but the activations, and half as much is read.
    """
    return _compute(
        x,
        weight.codes,
        bias,
        share,
        rows=lambda backend: weight,
        plain=lambda: dequantize_rows(weight.codes, weight.scale, x.dtype),
    )


def _few_rows(x, weight) -> str | None:
    return FEW_ROWS if describe_linear(x, weight).m < MIN_ROWS else None


def _compute(x, weight, bias, share, *, rows, plain, reason=None):
    """``rows(backend)`` and ``plain()`` make the weight; ``reason`` rules FP8 out from the start."""
    # Outside a sampler run nobody reads the counts.
    run = _runs[-1] if _runs else LinearRun()
    if reason is None:
        try:
            backend, declined = choose_linear_backend(
                describe_linear(x, weight), exclude=run.failed
            )
        except BackendUnavailable as unavailable:
            reason = unavailable.listed
    if reason is None:
        try:
            out = fp8_linear(
                run.quantized(x, share, backend), *rows(backend), bias, backend=backend
            )
            out = out.to(x.dtype)
        except Exception as error:
            if is_interrupt(error):
                raise
            raise_if_sticky("FP8 Linear", backend, error, x.device)
            reason = run.failure(backend, error)
        else:
            run.converted(backend, declined)
            return out
    run.fell_back(reason)
    return torch.nn.functional.linear(x, plain(), bias)
