"""Bench of ``fp8_linear``: the Linears of a transformer block, quantisation of x included.

A layer case is an activation (M, K) that ``outputs`` Linears (K -> N) share, and what produces it in
the model, if that is measured too. Ours quantises it once, the BF16 peer runs the Linears as they
are. Times are of all of it together. A block case is a whole Wan block (``fp8_block.py``).

Gate: the first ROWS rows of every output against the same in FP32 with unquantised operands, rel
L2 <= BOUND, of a block BLOCK_BOUND; the whole output must be finite.
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
from .fp8_block import Plain, Quantized, Weights, run_block
from .fp8_producers import PRODUCERS

# E4M3 has 3 mantissa bits: a value is off by 2^-4 at most and 0.026 in the mean square; both
# operands together 0.037. Columns that are much larger than others push the rest of their row
# towards subnormal codes.
BOUND = 4e-2
# In a block two Linears follow one another: 0.037 2^(1/2) = 0.052. The later ones also see an x to
# which the earlier ones have added their errors.
BLOCK_BOUND = 7e-2
ROWS = 256


@dataclass(frozen=True)
class Layer:
    """(M, K) -> ``outputs`` times (M, N); ``producer`` makes the (M, K), a key of PRODUCERS or ""."""

    m: int
    k: int
    n: int
    outputs: int
    origin: str
    producer: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n

    @property
    def flop(self) -> float:
        """Of the Linears."""
        return 2.0 * self.m * self.k * self.n * self.outputs

    @property
    def quantized_bytes(self) -> int:
        """What quantising has to read and write: BF16 values, codes, scales."""
        width = PRODUCERS[self.producer].width if self.producer else 1
        return self.m * (2 * width * self.k + self.k + 4)


@dataclass(frozen=True)
class Block:
    """A Wan block of ``m`` tokens with ``context`` tokens of text."""

    m: int
    hidden: int
    inner: int
    context: int
    origin: str
    producer: str = "block"
    outputs: int = 1
    quantized_bytes: None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.hidden, self.inner

    @property
    def flop(self) -> float:
        """Of the Linears: six of (hidden, hidden), two more on the context, and the feed-forward."""
        square = (6 * self.m + 2 * self.context) * self.hidden**2
        return 2.0 * (square + 2 * self.m * self.hidden * self.inner)


def _block(model: str, tokens: int, hidden: int, inner: int) -> dict[str, Layer | Block]:
    """Layers of a Wan block: q, k and v are three Linears that share x."""
    origin = f"Wan, hidden {hidden}, feed-forward {inner}"
    return {
        f"{model}-qkv": Layer(tokens, hidden, hidden, 3, origin),
        f"{model}-qkv_fused": Layer(tokens, hidden, 3 * hidden, 1, f"{origin}, one weight"),
        f"{model}-norm_qkv": Layer(tokens, hidden, hidden, 3, origin, "wan_norm"),
        f"{model}-o": Layer(tokens, hidden, hidden, 1, origin),
        f"{model}-ffn_up": Layer(tokens, hidden, inner, 1, origin),
        f"{model}-norm_ffn_up": Layer(tokens, hidden, inner, 1, origin, "wan_norm"),
        f"{model}-ffn_down": Layer(tokens, inner, hidden, 1, origin),
        f"{model}-gelu_ffn_down": Layer(tokens, inner, hidden, 1, origin, "gelu"),
        f"{model}-block": Block(tokens, hidden, inner, 512, f"{origin}, attention excluded"),
    }


H3 = "MiniMax H3, hidden 5376, 56 heads of 128"
CASES: dict[str, Layer | Block] = {
    **_block("wan1.3b-480p", 32760, 1536, 8960),
    **_block("wan14b-480p", 32760, 5120, 13824),
    **_block("wan14b-720p", 75600, 5120, 13824),
    "h3-768p-qkv": Layer(32626, 5376, 21504, 1, H3),
    "h3-768p-norm_qkv": Layer(32626, 5376, 21504, 1, H3, "h3_norm"),
    "h3-768p-o": Layer(32626, 7168, 5376, 1, H3),
    "h3-768p-fc1": Layer(32626, 5376, 28672, 1, H3),
    "h3-768p-fc2": Layer(32626, 14336, 5376, 1, H3),
    "h3-768p-swiglu_fc2": Layer(32626, 14336, 5376, 1, H3, "swiglu"),
    "tiny": Layer(65, 128, 96, 3, "for tests on a CPU"),
    **{f"tiny-{name}": Layer(65, 128, 96, 2, "for tests on a CPU", name) for name in PRODUCERS},
    "tiny-block": Block(65, 128, 192, 7, "for tests on a CPU"),
}

OPTIONS = {
    "case": Option("wan14b-480p-qkv", str, "model, video and layer", tuple(CASES)),
    "generator": Option("iid", str, "kind of activations", ("iid", "structured")),
    "seed": Option(0, int, "of the inputs", limits=(0, 2**31)),
    "fused": Option("on", str, "what stands before the Linear and quantisation", ("on", "off")),
}


class _Layers:
    """Activations, BF16 weights with biases, and the reference's first rows."""

    def __init__(self, case: Layer, generator: str, seed: int, device: torch.device):
        draw = torch.Generator(device).manual_seed(seed)

        def normal(shape, size=1.0):
            return _normal(shape, draw, device, size)

        producer = PRODUCERS[case.producer] if case.producer else None
        width = producer.width if producer else 1
        self.x = _activations(case.m, case.k * width, generator, draw, device)
        self.weights = [normal((case.n, case.k), case.k**-0.5) for _ in range(case.outputs)]
        # Small against the products, which are of unit variance: the gate is to see those.
        self.biases = [normal((case.n,), 0.1) for _ in range(case.outputs)]
        self.producer = producer.bind(case.m, case.k, normal) if producer else None
        rows = self.produced(self.x[:ROWS].float())
        self.want = [
            torch.nn.functional.linear(rows, w.float(), b.float())
            for w, b in zip(self.weights, self.biases, strict=True)
        ]

    def produced(self, x: torch.Tensor) -> torch.Tensor:
        return self.producer.eager(x) if self.producer else x

    def gate(self, outputs: list[torch.Tensor], bound: float) -> Gate:
        """Worst of the outputs."""
        return _worst(
            [
                rel_l2(out[:ROWS], want) if all_finite(out) else float("inf")
                for out, want in zip(outputs, self.want, strict=True)
            ],
            bound,
        )

    def own(self, backend: str, fused: bool) -> Contender:
        """A registered backend; raises Declined with its reason."""
        _check(self.x[:, : self.weights[0].shape[1]], self.weights[0], backend)
        quantized = [quantize_rowwise(w, backend=backend) for w in self.weights]

        def gemms(rows) -> list[torch.Tensor]:
            return [
                fp8_linear(rows, w.codes, w.scale, bias, backend=backend)
                for w, bias in zip(quantized, self.biases, strict=True)
            ]

        def quantize():
            if self.producer and fused:
                return self.producer.fused(self.x, backend)
            return quantize_rowwise(self.produced(self.x), backend=backend)

        def total() -> list[torch.Tensor]:
            return gemms(quantize())

        def stages() -> dict[str, Callable[[], Any]]:
            rows = quantize()
            return {"quant": quantize, "gemm": lambda: gemms(rows), "total": total}

        return Contender(lambda: self.gate(total(), BOUND), stages)

    def peer(self, peer) -> Contender:
        """F.linear and what looks like it."""
        linear = peer.load()

        def total() -> list[torch.Tensor]:
            x = self.produced(self.x)
            return [linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]

        # A producer rounds its steps as well, up to four times.
        bound = 2 * peer.bound if self.producer else peer.bound
        return Contender(lambda: self.gate(total(), bound), lambda: {"total": total})


class _Blocks:
    """Inputs and weights of one Wan block, and the reference's first rows."""

    def __init__(self, case: Block, generator: str, seed: int, device: torch.device):
        draw = torch.Generator(device).manual_seed(seed)
        self.x = _activations(case.m, case.hidden, generator, draw, device)
        self.context = _normal((case.context, case.hidden), draw, device)
        self.weights = Weights(
            case.hidden, case.inner, lambda shape, size: _normal(shape, draw, device, size)
        )
        # Nothing in it looks at another token.
        rows = self.x[:ROWS].float()
        self.want = run_block(rows, self.context.float(), self.weights, Plain(self.weights))

    def gate(self, outputs: list[torch.Tensor], bound: float) -> Gate:
        """Worst of the results of ``run_block``."""
        errors = [
            rel_l2(out[: len(want)], want) if all_finite(out) else float("inf")
            for out, want in zip(outputs, self.want, strict=True)
        ]
        return _worst(errors, bound)

    def own(self, backend: str, fused: bool) -> Contender:
        """A registered backend; raises Declined with its reason."""
        _check(self.x, self.weights.linears["q"][0], backend)
        return self._contender(Quantized(self.weights, backend, fused), BLOCK_BOUND)

    def peer(self, peer) -> Contender:
        """F.linear and what looks like it."""
        # Some ten roundings in a row, each as large as that of a Linear's result.
        return self._contender(Plain(self.weights, peer.load()), 3 * peer.bound)

    def _contender(self, compute, bound) -> Contender:
        def total() -> list[torch.Tensor]:
            return run_block(self.x, self.context, self.weights, compute)

        return Contender(lambda: self.gate(total(), bound), lambda: {"total": total})


def _check(x: torch.Tensor, weight: torch.Tensor, backend: str) -> None:
    reason = why_not_linear(describe_linear(x, weight), backend)
    if reason:
        raise Declined(f"declined: {reason}")


def _worst(errors: list[float], bound: float) -> Gate:
    worst = max(errors)
    ok = worst <= bound
    return Gate(ok, {"rel_l2": worst}, None if ok else f"rel_l2 {worst:.3g}, need <= {bound:g}")


def _normal(shape, draw, device, scale: float = 1.0) -> torch.Tensor:
    out = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
    return out.mul_(scale)


def _activations(m: int, columns: int, generator: str, draw, device) -> torch.Tensor:
    """(m, columns) BF16; "structured" has a few large columns and rows of unequal size."""
    x = _normal((m, columns), draw, device)
    if generator == "structured":
        large = torch.argsort(torch.rand(columns, generator=draw, device=device))[:4]
        x[:, large] *= 16.0
        x *= torch.rand((m, 1), generator=draw, device=device).mul(4).exp2().bfloat16()
    return x


class FP8LinearBench:
    """Bench of ``fp8_linear``; keeps the inputs of the last job."""

    name = OP
    options: Mapping[str, Option] = OPTIONS
    precisions = ("fp8",)
    fields = (
        *("op", "case", "shape", "outputs", "fused", "backend", "precision", "config"),
        *("generator", "seed", "quant_ms", "quant_tb_s", "gemm_ms", "total_ms", "p25_ms", "p75_ms"),
        *("iterations", "tflops", "rel_l2", "parity_ok", "peak_extra_mb", "error"),
    )
    table = (
        *("case", "fused", "generator", "backend", "precision", "quant_ms", "quant_tb_s"),
        *("gemm_ms", "total_ms", "p25_ms", "p75_ms", "tflops", "rel_l2", "parity_ok"),
    )

    def __init__(self):
        self._inputs: _Layers | _Blocks | None = None
        self._key = None

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
        # Nothing stands before a bare Linear.
        fused = job.settings["fused"] if case.producer else None
        known = {"shape": list(case.shape), "outputs": case.outputs, "config": {}, "fused": fused}
        return {**job.settings, **known}

    def describe_inputs(self, job: Job, device: torch.device) -> dict[str, Any]:
        settings = job.settings
        key = (settings["case"], settings["generator"], settings["seed"], str(device))
        if self._key != key:
            self._inputs = self._key = None
            case = CASES[settings["case"]]
            kind = _Blocks if isinstance(case, Block) else _Layers
            self._inputs = kind(case, settings["generator"], settings["seed"], device)
            self._key = key
        return {}

    def contender(self, job: Job, backend: str, precision: str, device: torch.device) -> Contender:
        if backend.startswith(PEER_PREFIX):
            return self._inputs.peer(PEERS[OP][backend])
        return self._inputs.own(backend, job.settings["fused"] == "on")

    def derived(self, row: Mapping[str, Any]) -> dict[str, Any]:
        case = CASES[row["case"]]
        found = {"tflops": case.flop / row["total_ms"] * 1e-9 if row["total_ms"] else None}
        # With "off" a producer's passes over memory are in it.
        if row.get("quant_ms") and case.quantized_bytes and row["fused"] != "off":
            found["quant_tb_s"] = case.quantized_bytes / row["quant_ms"] * 1e-9
        return found
