"""Bench of ``fp8_linear``: the Linears of a transformer block, quantisation of x included.

A case is one layer group: an activation (M, K) that ``outputs`` Linears (K -> N) share. Ours
quantises it once, the BF16 peer runs the Linears as they are. Times are of all Linears together.

Gate: the first ROWS rows of every output against the FP32 product of the unquantised operands, rel
L2 <= BOUND; the whole output must be finite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ... import registry
from ...fp8_linear import describe_linear, fp8_linear, quantize_rowwise, why_not_linear
from ...fp8_linear.op import OP
from ..base import Contender, Declined, Gate, Job, Option
from ..measures import all_finite, rel_l2
from ..peers import PEER_PREFIX, PEERS

# E4M3 has 3 mantissa bits: a value is off by 2^-4 at most and 0.026 in the mean square; both
# operands together 0.037. Columns that are much larger than others push the rest of their row
# towards subnormal codes.
BOUND = 4e-2
ROWS = 256


@dataclass(frozen=True)
class Case:
    """(M, K) -> ``outputs`` times (M, N)."""

    m: int
    k: int
    n: int
    outputs: int
    origin: str


def _block(model: str, tokens: int, hidden: int, inner: int) -> dict[str, Case]:
    """Layers of a Wan block: q, k and v are three Linears that share x."""
    origin = f"Wan, hidden {hidden}, feed-forward {inner}"
    return {
        f"{model}-qkv": Case(tokens, hidden, hidden, 3, origin),
        f"{model}-o": Case(tokens, hidden, hidden, 1, origin),
        f"{model}-ffn_up": Case(tokens, hidden, inner, 1, origin),
        f"{model}-ffn_down": Case(tokens, inner, hidden, 1, origin),
    }


H3 = "MiniMax H3, hidden 5376, 56 heads of 128"
CASES = {
    **_block("wan1.3b-480p", 32760, 1536, 8960),
    **_block("wan14b-480p", 32760, 5120, 13824),
    **_block("wan14b-720p", 75600, 5120, 13824),
    "h3-768p-qkv": Case(32626, 5376, 21504, 1, H3),
    "h3-768p-o": Case(32626, 7168, 5376, 1, H3),
    "h3-768p-fc1": Case(32626, 5376, 28672, 1, H3),
    "h3-768p-fc2": Case(32626, 14336, 5376, 1, H3),
    "tiny": Case(65, 128, 96, 3, "for tests on a CPU"),
}

OPTIONS = {
    "case": Option("wan14b-480p-qkv", str, "model, video and layer", tuple(CASES)),
    "generator": Option("iid", str, "kind of activations", ("iid", "structured")),
    "seed": Option(0, int, "of the inputs", limits=(0, 2**31)),
}


class _Inputs:
    """Activations, BF16 weights with biases, and the reference's first rows."""

    def __init__(self, key, case: Case, generator: str, seed: int, device: torch.device):
        self.key = key
        draw = torch.Generator(device).manual_seed(seed)
        self.x = _activations(case, generator, draw, device)
        self.weights = [
            _normal((case.n, case.k), draw, device, case.k**-0.5) for _ in range(case.outputs)
        ]
        # Small against the products, which are of unit variance: the gate is to see those.
        self.biases = [_normal((case.n,), draw, device, 0.1) for _ in range(case.outputs)]
        rows = self.x[:ROWS].float()
        self.want = [
            torch.nn.functional.linear(rows, w.float(), b.float())
            for w, b in zip(self.weights, self.biases, strict=True)
        ]

    def gate(self, outputs: list[torch.Tensor], bound: float) -> Gate:
        """Worst of the outputs."""
        worst = max(
            rel_l2(out[:ROWS], want) if all_finite(out) else float("inf")
            for out, want in zip(outputs, self.want, strict=True)
        )
        ok = worst <= bound
        return Gate(ok, {"rel_l2": worst}, None if ok else f"rel_l2 {worst:.3g}, need <= {bound:g}")


def _normal(shape, draw, device, scale: float = 1.0) -> torch.Tensor:
    out = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
    return out.mul_(scale)


def _activations(case: Case, generator: str, draw, device) -> torch.Tensor:
    """(M, K) BF16; "structured" has a few large columns and rows of unequal size."""
    x = _normal((case.m, case.k), draw, device)
    if generator == "structured":
        columns = torch.argsort(torch.rand(case.k, generator=draw, device=device))[:4]
        x[:, columns] *= 16.0
        x *= torch.rand((case.m, 1), generator=draw, device=device).mul(4).exp2().bfloat16()
    return x


class FP8LinearBench:
    """Bench of ``fp8_linear``; keeps the inputs of the last job."""

    name = OP
    options: Mapping[str, Option] = OPTIONS
    precisions = ("fp8",)
    fields = (
        *("op", "case", "shape", "outputs", "backend", "precision", "config", "generator", "seed"),
        *("quant_ms", "gemm_ms", "total_ms", "p25_ms", "p75_ms", "iterations", "tflops"),
        *("rel_l2", "parity_ok", "peak_extra_mb", "error"),
    )
    table = (
        *("case", "generator", "backend", "precision", "quant_ms", "gemm_ms", "total_ms"),
        *("p25_ms", "p75_ms", "tflops", "rel_l2", "parity_ok"),
    )

    def __init__(self):
        self._inputs: _Inputs | None = None

    def known_backends(self) -> tuple[str, ...]:
        return registry.list_backends(OP)

    def backends(self, device: torch.device) -> tuple[str, ...]:
        names = self.known_backends()
        return names if device.type == "cpu" else tuple(n for n in names if n != "reference")

    def read_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        if extra:
            raise ValueError(f"config: got {', '.join(extra)}, {OP} has no further settings")
        return {}

    def base_row(self, job: Job) -> dict[str, Any]:
        case = CASES[job.settings["case"]]
        shape = [case.m, case.k, case.n]
        return {**job.settings, "shape": shape, "outputs": case.outputs, "config": {}}

    def describe_inputs(self, job: Job, device: torch.device) -> dict[str, Any]:
        settings = job.settings
        key = (settings["case"], settings["generator"], settings["seed"], str(device))
        if self._inputs is None or self._inputs.key != key:
            self._inputs = None
            self._inputs = _Inputs(
                key, CASES[settings["case"]], settings["generator"], settings["seed"], device
            )
        return {}

    def contender(self, job: Job, backend: str, precision: str, device: torch.device) -> Contender:
        if backend.startswith(PEER_PREFIX):
            return peer_contender(self._inputs, PEERS[OP][backend])
        return own_contender(self._inputs, backend)

    def derived(self, row: Mapping[str, Any]) -> dict[str, Any]:
        m, k, n = row["shape"]
        flop = 2.0 * m * k * n * row["outputs"]
        return {"tflops": flop / row["total_ms"] * 1e-9 if row["total_ms"] else None}


def own_contender(inputs: _Inputs, backend: str) -> Contender:
    """A registered backend; raises Declined with its reason."""
    x = inputs.x
    reason = why_not_linear(describe_linear(x, inputs.weights[0]), backend)
    if reason:
        raise Declined(f"declined: {reason}")
    quantized = [quantize_rowwise(w, backend=backend) for w in inputs.weights]

    def gemms(rows) -> list[torch.Tensor]:
        return [
            fp8_linear(rows, w.codes, w.scale, bias, backend=backend)
            for w, bias in zip(quantized, inputs.biases, strict=True)
        ]

    def quantize():
        return quantize_rowwise(x, backend=backend)

    def total() -> list[torch.Tensor]:
        return gemms(quantize())

    def stages() -> dict[str, Callable[[], Any]]:
        rows = quantize()
        return {"quant": quantize, "gemm": lambda: gemms(rows), "total": total}

    return Contender(lambda: inputs.gate(total(), BOUND), stages)


def peer_contender(inputs: _Inputs, peer) -> Contender:
    """F.linear and what looks like it."""
    linear = peer.load()

    def total() -> list[torch.Tensor]:
        pairs = zip(inputs.weights, inputs.biases, strict=True)
        return [linear(inputs.x, weight, bias) for weight, bias in pairs]

    return Contender(lambda: inputs.gate(total(), peer.bound), lambda: {"total": total})
