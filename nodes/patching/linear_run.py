"""What the FP8 Linears of one sampler run do: compute, fall back, count.

A layer's weight knows neither its model nor its run, so the run that is in progress is found here.
"""

import logging
import os
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
from .linear_deferred import NORM, computed, fused_kind, mark
from .linear_rows import dequantize_rows, stochastic_rows
from .linear_share import SharedRows

log = logging.getLogger("hopper_sol")
# Below it a GEMM is bound by reading the weight, and quantising that costs another two reads.
MIN_ROWS = 16
FEW_ROWS = f"fewer than {MIN_ROWS} rows"
# The others would sum a norm in another order than PyTorch does, and save no pass over memory.
NORM_BACKENDS = frozenset({"triton"})
# "0" computes activations and norms apart, as the model does: to find out what is to blame.
FUSED_SWITCH = "HOPPER_SOL_FUSED"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class LinearRun:
    """Counters of a run. Safe to call from several threads at once; touches no device.

    fuses: whether activations and norms are computed along with the rounding of their results.
    """

    def __init__(self):
        self.fp8_calls = 0
        self.backends: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.fuses = os.environ.get(FUSED_SWITCH, "1") != "0"
        self.fused: Counter[str] = Counter()
        self.unfused: Counter[str] = Counter()
        self.declined: dict[str, str] = {}
        self.notes: list[str] = []
        self.failed: frozenset[str] = frozenset()
        self._failed_fused: frozenset[tuple[str, str]] = frozenset()
        self._shared = SharedRows()
        self._lock = threading.Lock()

    def converted(self, backend: str, declined: dict[str, str], fused: str = "") -> None:
        """A call ran in FP8; ``fused``: what was computed along with its input's rounding."""
        with self._lock:
            self.fp8_calls += 1
            if fused:
                self.fused[fused] += 1
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
        """(``x`` as an operand of fp8_linear, what was fused with its rounding or "").

        Rows, if other layers may have a use for them or if something was fused.
        """
        fused = self._fused(x, backend)
        if fused:
            try:
                return self._rows(x, share, backend, lambda: x.quantize(backend)), fused
            except Exception as error:
                if is_interrupt(error):
                    raise
                raise_if_sticky("FP8 Linear", f"{backend} {fused}", error, x.device)
                self._fused_failure(fused, backend, error)
        x = computed(x)
        if share:
            rows = self._rows(x, share, backend, lambda: quantize_rowwise(x, backend=backend))
            return rows, ""
        self._shared.clear(x.device)
        return x, ""

    def _rows(self, x, share: str, backend: str, make) -> QuantizedRows:
        if share:
            return self._shared.rows(x, share, backend, make)
        self._shared.clear(x.device)
        return make()

    def _fused(self, x: torch.Tensor, backend: str) -> str:
        """``fused_kind`` of ``x`` if ``backend`` is to compute it."""
        fused = fused_kind(x)
        if fused == NORM and backend not in NORM_BACKENDS:
            return ""
        if (fused, backend) in self._failed_fused:
            with self._lock:
                self.unfused[f"{fused} failed"] += 1
            return ""
        return fused

    def _fused_failure(self, fused: str, backend: str, error: Exception) -> None:
        """Compute ``fused`` apart for the rest of the run."""
        with self._lock:
            self.unfused[f"{fused} failed"] += 1
            first = (fused, backend) not in self._failed_fused
            self._failed_fused |= {(fused, backend)}
            if first:
                what = describe_failure("FP8 Linear", f"{backend} {fused}", error)
                self.notes.append(
                    f"{fused} along with rounding failed in backend {backend!r}, and is computed "
                    f"apart since: {what}"
                )

    def seal(self) -> dict:
        """The counts as plain data."""
        with self._lock:
            return {
                "calls": self.fp8_calls + sum(self.fallbacks.values()),
                "fp8_calls": self.fp8_calls,
                "backend": dict(self.backends),
                "fallbacks": dict(self.fallbacks.most_common()),
                "fused": dict(self.fused),
                "unfused": dict(self.unfused),
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


def handed_out(out: torch.Tensor, activation: str) -> torch.Tensor:
    """``out`` of a Linear that ``activation`` follows, marked where that can be put off.

    "" for a layer that nothing of the kind follows. Never while torch.compile traces: the compiler
    knows no such tensors, and makes one pass of what it sees.
    """
    if not activation or torch.compiler.is_compiling() or not _defers(out):
        return out
    return mark(out, activation)


def defers_norm(x: torch.Tensor) -> bool:
    """Whether the norm of ``x`` can be put off."""
    if torch.compiler.is_compiling():
        return False
    return x.dim() > 1 and _defers(x)


def _defers(x: torch.Tensor) -> bool:
    """In a run that fuses, for an ordinary tensor that neither training nor autocast looks at."""
    if not _runs or not _runs[-1].fuses or type(x) is not torch.Tensor or x.dtype not in _FLOATS:
        return False
    # Autocast decides about dtypes when an operation runs.
    if torch.is_autocast_enabled(x.device.type):
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


def compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grid: float | None,
    share: str = "",
) -> torch.Tensor:
    """F.linear in FP8 where a backend takes it, else as it is. Always a new tensor.

    Args:
        x: (..., K) bfloat16, float16 or float32; Pending only with a ``fused_kind``.
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
            operand, fused = run.quantized(x, share, backend)
            out = fp8_linear(operand, *rows(backend), bias, backend=backend)
            out = out.to(x.dtype)
        except Exception as error:
            if is_interrupt(error):
                raise
            raise_if_sticky("FP8 Linear", backend, error, x.device)
            reason = run.failure(backend, error)
        else:
            run.converted(backend, declined, fused)
            return out
    run.fell_back(reason)
    return torch.nn.functional.linear(computed(x), plain(), bias)
