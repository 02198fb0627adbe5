"""What one sampler run did: counted while it runs, sealed when it ends, small, without tensors."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext

import torch

SCHEMA_VERSION = 1


def outliving():
    """Context for tensors that outlive a forward.

    Newer ComfyUI runs a forward inside an allocation graph whose memory is reused by the next one.
    """
    try:
        from comfy.model_prefetch import pause_malloc_graph
    except ImportError:
        return nullcontext()
    return pause_malloc_graph()


class RunRecorder:
    """Counters of a run in progress. Safe to call from several threads at once."""

    def __init__(self, *, num_steps: int, num_blocks: int, check_finite: bool, header: dict):
        self.header = header
        self.num_steps = num_steps
        self.num_blocks = num_blocks
        self.check_finite = check_finite
        self.notes: list[str] = []
        self.evaluations = 0
        self.forwards = 0
        self.tokens: Counter[int] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.sparse_calls = 0
        self.fp8_calls = 0
        self.row_calls = 0
        self.dense_calls: Counter[str] = Counter()
        self.other_calls: Counter[str] = Counter()
        self.backends: Counter[str] = Counter()
        self.precisions: Counter[str] = Counter()
        self.casts: Counter[str] = Counter()
        self.declined: dict[str, str] = {}
        self._dense_at: Counter[tuple[int, int]] = Counter()  # (step, layer)
        # Per device: (steps, blocks, 3) sums of density, calls and calls with non-finite output.
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._started = time.time()
        self._clock = time.perf_counter()

    def evaluation(self) -> None:
        """The sampler asks for an evaluation; a cache of another node may answer it."""
        with self._lock:
            self.evaluations += 1

    def forward(self, tokens: int, batch: int) -> None:
        """A forward of the diffusion model has come to its first attention call."""
        with self._lock:
            self.forwards += 1
            self.tokens[tokens] += 1
            self.batch_sizes[batch] += 1

    def other(self, kind: str) -> None:
        """An attention call that is not self-attention of the video tokens."""
        with self._lock:
            self.other_calls[kind] += 1

    def dense(self, reason: str, step: int, layer: int | None) -> None:
        """A self-attention call went to the next in the chain."""
        with self._lock:
            self.dense_calls[reason] += 1
            if layer is not None:
                self._dense_at[self._cell(step, layer)] += 1

    def note_declined(self, reasons: Mapping[str, str]) -> None:
        """Backends that were passed over, with reasons."""
        with self._lock:
            self.declined.update(reasons)

    def sparse(self, stats, out: torch.Tensor, step: int, layer: int, rows: int = 0) -> None:
        """A self-attention call was computed by us; ``stats`` is its SolAttnStats.

        rows: queries of it that the model's own attention computed.
        """
        fp8 = stats.precision == "fp8"
        with self._lock:
            self.sparse_calls += 1
            self.fp8_calls += fp8
            self.row_calls += rows > 0
            self.backends[stats.backend] += 1
            self.precisions[stats.precision] += 1
            if stats.cast_from is not None:
                self.casts[str(stats.cast_from).removeprefix("torch.")] += 1
            sums = self._sums.get(out.device)
            if sums is None:
                with outliving():
                    sums = torch.zeros(self.num_steps, self.num_blocks, 3, device=out.device)
                self._sums[out.device] = sums
            # In place and on the device: nothing here waits for the GPU or outlives the call.
            cell = sums[self._cell(step, layer)]
            cell[0] += stats.exact_blocks.float().mean() / stats.num_kv_blocks
            cell[1] += 1
            if self.check_finite:
                # A NaN or infinity anywhere survives the sum; one read of the output.
                cell[2] += ~torch.isfinite(out.sum(dtype=torch.float32))

    def seal(self, status: str, error: str | None = None) -> dict:
        """The finished record as plain JSON-able data."""
        with self._lock:
            sums = torch.zeros(self.num_steps, self.num_blocks, 3)
            try:
                for on_device in self._sums.values():
                    sums += on_device.cpu()
            except RuntimeError as lost:  # a device in an error state must not hide the run's error
                self.notes.append(f"densities are lost: {lost}".splitlines()[0])
            self._sums.clear()
        density, calls, nonfinite = sums.unbind(-1)
        total_calls = float(calls.sum())
        return {
            **self.header,
            "status": status,
            "error": error,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self._started)),
            "seconds": round(time.perf_counter() - self._clock, 3),
            "steps": self.num_steps,
            "num_blocks": self.num_blocks,
            "evaluations": self.evaluations,
            "forwards": self.forwards,
            "tokens": _single(self.tokens),
            "batch": _single(self.batch_sizes),
            "self_attention_calls": self.sparse_calls + sum(self.dense_calls.values()),
            "sparse_calls": self.sparse_calls,
            "fp8_calls": self.fp8_calls,
            "row_calls": self.row_calls,
            "dense_calls": dict(self.dense_calls.most_common()),
            "other_calls": dict(self.other_calls.most_common()),
            "backend": dict(self.backends),
            "precision": dict(self.precisions),
            "cast_from": dict(self.casts),
            "declined_backends": dict(self.declined),
            "density": float(density.sum()) / total_calls if total_calls else None,
            "density_by_step": _means(density.sum(1), calls.sum(1)),
            "density_by_layer": _means(density.sum(0), calls.sum(0)),
            "map": self._map(density, calls),
            "nonfinite": [
                {"step": int(s), "layer": int(b), "calls": int(nonfinite[s, b])}
                for s, b in nonfinite.nonzero().tolist()
            ],
            "notes": list(self.notes),
        }

    def _cell(self, step: int, layer: int) -> tuple[int, int]:
        return min(step, self.num_steps - 1), layer

    def _map(self, density: torch.Tensor, calls: torch.Tensor) -> list[list]:
        """[step][layer]: mean density of its calls, dense ones counted as 1; None where unseen."""
        rows = []
        for step in range(self.num_steps):
            row = []
            for layer in range(self.num_blocks):
                dense = self._dense_at[step, layer]
                seen = dense + float(calls[step, layer])
                mean = (dense + float(density[step, layer])) / seen if seen else None
                row.append(None if mean is None else round(mean, 4))
            rows.append(row)
        return rows


def _single(counter: Counter) -> int | list[int] | None:
    """The value every forward had, a list where they differed, None where there was none."""
    values = sorted(counter)
    return values[0] if len(values) == 1 else values or None


def _means(total: torch.Tensor, calls: torch.Tensor) -> list[float | None]:
    pairs = zip(total.tolist(), calls.tolist(), strict=True)
    return [round(t / n, 4) if n else None for t, n in pairs]


def summary_line(run: dict) -> str:
    """The attention of a sealed run in one line: counts, density, tokens, backend."""
    total = run["self_attention_calls"]
    dense = ", ".join(f"{n} x {reason}" for reason, n in run["dense_calls"].items())
    tokens = "no" if run["tokens"] is None else run["tokens"]
    density = "" if run["density"] is None else f", density {run['density']:.1%}"
    backend = ", ".join(run["backend"]) or "none"
    return (
        f"{run['status']}: {total} self-attention calls, {run['sparse_calls']} sparse"
        f"{f' ({n} FP8)' if (n := run['fp8_calls']) else ''}, "
        f"{total - run['sparse_calls']} dense{f' ({dense})' if dense else ''}{density}; "
        f"{tokens} tokens, backend {backend}, {run['seconds']:.1f} s"
    )


def linear_words(section: dict) -> str:
    """The "linear" section of a sealed run in one line: layers, calls, backend."""
    calls, fp8 = section["calls"], section["fp8_calls"]
    other = ", ".join(f"{n} x {reason}" for reason, n in section["fallbacks"].items())
    backend = ", ".join(section["backend"]) or "none"
    return (
        f"{section['converted']} Linears converted, {calls} calls, {fp8} FP8, {calls - fp8} not"
        f"{f' ({other})' if other else ''}; backend {backend}"
    )
