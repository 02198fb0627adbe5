"""Bench of ``sol_attention``: cases, parity gates, halves of a backend.

Gates. ``out`` is compared with the FP32 reference on the same inputs:

* own backends that take ``exact_mask``: with the reference's mask on both sides ("same mask"), rel
  L2 <= BOUNDS; then with their own routing: the exact blocks of every query block may differ from
  the reference's by MISMATCH_BOUNDS of all pairs in sum, and the output may be off by
  OWN_ROUTING_BOUND, which is only to catch an output that has nothing to do with the mask;
* other own backends: with their own routing ("own routing"), the same bounds;
* peers ("all exact"): their routing, thresholds and summaries are their own, so what is comparable is
  attention itself. Sparse peers run at tau -1000, dense ones as they are, against the all-exact
  reference, rel L2 <= the peer's bound. That says that the kernel computes attention, not that its
  sparse result is as good as ours. The distance of a sparse peer at the job's own tau from our
  reference at the same tau is in the row (rel_l2_own_routing) and has no bound but being finite.

Backends always run on the whole input, so large addresses are tested; only the heads of
``parity_heads`` are compared, since the reference costs seconds and heads are independent. The whole
output must be finite.

A backend shows its parts by a class ``Steps`` beside its implementation, in the same module:
``Steps(q, k, v, *, config, layout, scale, order)`` with ``prepare() -> operands``, ``route(operands) ->
chosen`` and ``attend(operands, chosen, with_lse)``. "prep" is prepare and route, "route" the second of
them alone, "main" is attend on what they made. The total is always the public op, without LSE, and
with it whatever lies between the steps.

Token order "morton" permutes the inputs before anything is measured, as a model does that keeps its
tokens in that order through all blocks. "morton_in_op" leaves them in raster order and hands the
permutation to the op, whose times then include it; sparse peers have no such argument.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ... import registry
from ...sol_attn import (
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    describe_call,
    sol_attention,
    why_not,
)
from ...sol_attn.config import HEAD_DIM, num_blocks
from ...sol_attn.op import OP
from ...sol_attn.reference import sol_attention_reference
from ...sol_attn.token_order import morton_order, span_order
from ...testing import iid_qkv, routing, structured_qkv, tau_for_density, union_ratio
from ..base import Contender, Declined, Gate, Job, Option
from ..measures import all_finite, rel_l2
from ..peers import PEER_PREFIX, PEERS, Peer

SCALE = HEAD_DIM**-0.5
# Rel L2 against FP32 with the same mask. BF16 probabilities and a BF16 output, each rounded by at
# most 2^-9 of its value, leave about 0.0026; FP8 leaves 0.051 on normal data, nearly all of it the
# rounding of Q, K and V (kernels/sol_attn/README.md).
BOUNDS = {"bf16": 5e-3, "fp8": 6e-2}
# Pairs that route differently, net per query block. Relative rounding of a score by u standard
# deviations moves about pdf(tau) * u of all pairs across the threshold, pdf <= 0.4: BF16 operands
# give u <= 2^-8, E4M3 operands sqrt(2) 2^-4 / sqrt(3) = 0.05.
MISMATCH_BOUNDS = {"bf16": 2e-3, "fp8": 2e-2}
OWN_ROUTING_BOUND = 0.2
PARITY_HEADS = 4


@dataclass(frozen=True)
class Case:
    """A model's self-attention: (1, tokens, heads, 128).

    Attributes:
        heads: of the model.
        grid: (t, h, w) of the video tokens.
        prefix: conditioning tokens in front, exact for every query.
        token_order: order that the model's adapter uses.
        origin: which model and which video.
    """

    heads: int
    grid: tuple[int, int, int]
    prefix: int
    token_order: str
    origin: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (1, self.prefix + math.prod(self.grid), self.heads, HEAD_DIM)


CASES = {
    "wan1.3b-480p": Case(12, (21, 30, 52), 0, "morton", "Wan 1.3B, 832x480, 81 frames"),
    "wan14b-480p": Case(40, (21, 30, 52), 0, "morton", "Wan 14B, 832x480, 81 frames"),
    "wan14b-720p": Case(40, (21, 45, 80), 0, "morton", "Wan 14B, 1280x720, 81 frames"),
    # 32 latent frames of 24 x 42 tokens; the remaining 370 stand for text and audio in front.
    "h3-768p": Case(56, (32, 24, 42), 370, "raster", "MiniMax H3, 1344x768, 32,626 tokens"),
    # Where sparse attention begins to pay.
    "short-2k": Case(40, (2, 32, 32), 0, "morton", "40 heads, 2,048 tokens"),
    "short-4k": Case(40, (4, 32, 32), 0, "morton", "40 heads, 4,096 tokens"),
    "short-8k": Case(40, (8, 32, 32), 0, "morton", "40 heads, 8,192 tokens"),
    "short-16k": Case(40, (16, 32, 32), 0, "morton", "40 heads, 16,384 tokens"),
    "tiny": Case(2, (2, 8, 16), 44, "morton", "for tests on a CPU"),
}

OPTIONS = {
    "case": Option("wan14b-480p", str, "model and video", tuple(CASES)),
    "generator": Option("structured", str, "kind of inputs", ("iid", "structured")),
    "seed": Option(0, int, "of the inputs", limits=(0, 2**31)),
    "token_order": Option(
        "auto", str, "auto: the model's", ("auto", "raster", "morton", "morton_in_op")
    ),
    "sinks": Option("auto", str, "auto: the prefix is exact for all", ("auto", "off")),
    "estimator": Option("diag", str, "spread of the block scores", ("diag", "exact")),
    "tau": Option(1.0, float, "route threshold", limits=(-1000.0, 8.0)),
    "density": Option(None, float, "instead of tau: exact blocks of all", limits=(0.001, 1.0)),
}


# Fields of a row.
WHAT = (
    *("op", "case", "shape", "backend", "precision", "config", "generator", "seed"),
    *("tau", "density", "estimator", "token_order", "sinks"),
)
TIMES = (
    *("prep_ms", "route_ms", "main_ms", "total_ms", "p25_ms", "p75_ms", "iterations"),
    "exact_tflops",
)
PARITY = ("gate", "rel_l2", "rel_l2_own_routing", "mask_mismatch", "parity_ok")


class _Inputs:
    """q, k, v of one (case, generator, seed, token order), and the dense reference on them.

    Attributes:
        order: (T,) int64 that the op is to lay the tokens out in, or None; blocks, masks and the
            layout count positions in it.
    """

    def __init__(self, key, q, k, v, layout, order=None):
        self.key = key
        self.q, self.k, self.v = q, k, v
        self.layout = layout
        self.order = order
        self._dense = None
        self.peer_gates: dict[str, Gate] = {}

    def reference(self, exact_mask: torch.Tensor | None = None) -> torch.Tensor:
        """FP32 output of ``parity_heads``, laid out; without a mask all-exact, computed once."""
        if exact_mask is None and self._dense is not None:
            return self._dense
        heads = parity_heads(self.q.shape[2])
        q, k, v = (self.laid_out(x[:, :, heads]).float() for x in (self.q, self.k, self.v))
        if exact_mask is not None:
            exact_mask = exact_mask[:, heads]
        out = sol_attention_reference(
            q, k, v, routing=False, scale=SCALE, exact_mask=exact_mask
        ).out
        if exact_mask is None:
            self._dense = out
        return out

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (B, T, ...) in the order of the blocks."""
        return x if self.order is None else x.index_select(1, self.order)

    def op_arguments(self) -> dict[str, Any]:
        """What every call of the op gets beside q, k, v and the config."""
        arguments = {"layout": self.layout, "scale": SCALE}
        return arguments if self.order is None else {**arguments, "order": self.order}

    def distance(self, out: torch.Tensor, want: torch.Tensor) -> float:
        """Rel L2 over the compared heads; infinite if anything in ``out`` is not finite."""
        if out.shape != self.q.shape:
            raise ValueError(f"output: got shape {tuple(out.shape)}, need {tuple(self.q.shape)}")
        if not all_finite(out):
            return math.inf
        return rel_l2(self.laid_out(out[:, :, parity_heads(out.shape[2])]), want)


class _Problem:
    """Inputs with one routing: tau, estimator, the reference's mask and output under it."""

    def __init__(self, inputs: _Inputs, tau: float, estimator: str):
        self.inputs, self.tau, self.estimator = inputs, tau, estimator
        self.mask = routing(
            inputs.laid_out(inputs.q),
            inputs.laid_out(inputs.k),
            tau,
            estimator=estimator,
            scale=SCALE,
            sink_kv=inputs.layout.sink_kv,
        )
        self.counts = self.mask.sum(-1, dtype=torch.int32)
        self.density = self.counts.double().mean().item() / self.mask.shape[-1]
        self._want = None

    def want(self) -> torch.Tensor:
        """The reference's output under the mask, for the compared heads."""
        if self._want is None:
            self._want = self.inputs.reference(self.mask)
        return self._want


class SolAttentionBench:
    """Bench of ``sol_attention``; keeps the inputs and the problem of the last job."""

    name = OP
    options: Mapping[str, Option] = OPTIONS
    precisions = ("bf16", "fp8")
    fields = (*WHAT, *TIMES, *PARITY, "union_ratio_2", "union_ratio_3", "peak_extra_mb", "error")
    table = (
        *("case", "generator", "tau", "density", "backend", "precision"),
        *("prep_ms", "main_ms", "total_ms", "p25_ms", "p75_ms", "exact_tflops"),
        *("rel_l2", "mask_mismatch", "parity_ok", "union_ratio_2", "union_ratio_3"),
    )

    def __init__(self):
        self._inputs: _Inputs | None = None
        self._problem: _Problem | None = None

    def known_backends(self) -> tuple[str, ...]:
        return registry.list_backends(OP)

    def backends(self, device: torch.device) -> tuple[str, ...]:
        # The reference is a specification; on a GPU it takes seconds a call and is no news.
        names = self.known_backends()
        return names if device.type == "cpu" else tuple(n for n in names if n != "reference")

    def read_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        return read_config(extra)

    def base_row(self, job: Job) -> dict[str, Any]:
        settings, case = job.settings, CASES[job.settings["case"]]
        row = {name: settings[name] for name in settings if name != "density"}
        row["shape"] = list(case.shape)
        row["config"] = dict(job.extra)
        row["token_order"] = token_order(settings, case)
        row["sinks"] = "off" if settings["sinks"] == "off" or not case.prefix else "kv"
        return row

    def describe_inputs(self, job: Job, device: torch.device) -> dict[str, Any]:
        problem = self._make(job, device)
        blocks = problem.mask.shape[-1]
        return {
            "tau": problem.tau,
            **{f"union_ratio_{n}": union_ratio(problem.mask, n) for n in (2, 3) if n <= blocks},
        }

    def contender(self, job: Job, backend: str, precision: str, device: torch.device) -> Contender:
        problem = self._problem
        if backend.startswith(PEER_PREFIX):
            return peer_contender(problem, PEERS[OP][backend])
        config = SolAttnConfig(
            tau=problem.tau, estimator=problem.estimator, precision=precision, **job.extra
        )
        return own_contender(problem, backend, config)

    def derived(self, row: Mapping[str, Any]) -> dict[str, Any]:
        batch, tokens, heads, dim = row["shape"]
        flop = 4.0 * batch * heads * tokens**2 * dim * row["density"]
        milliseconds = row["total_ms"] if row.get("main_ms") is None else row["main_ms"]
        return {"exact_tflops": flop / milliseconds * 1e-9 if milliseconds else None}

    def _make(self, job: Job, device: torch.device) -> _Problem:
        settings, case = job.settings, CASES[job.settings["case"]]
        order = token_order(settings, case)
        sinks = settings["sinks"] != "off" and case.prefix > 0
        key = (settings["case"], settings["generator"], settings["seed"], order, sinks, str(device))
        if self._inputs is None or self._inputs.key != key:
            self._inputs = self._problem = None  # free the old ones before making new ones
            q, k, v = make_inputs(case, settings["generator"], settings["seed"], order, device)
            in_op = permutation(case).to(device) if order == "morton_in_op" else None
            video = (case.prefix, case.shape[1])
            sink_kv = ((0, case.prefix),) if sinks else ()
            layout = TokenLayout(sink_kv=sink_kv, video=video, grid=case.grid)
            self._inputs = _Inputs(key, q, k, v, layout, in_op)
        inputs, tau, estimator = self._inputs, settings["tau"], settings["estimator"]
        if settings["density"] is not None:
            tau, _ = tau_for_density(
                inputs.laid_out(inputs.q),
                inputs.laid_out(inputs.k),
                settings["density"],
                estimator=estimator,
                scale=SCALE,
                sink_kv=inputs.layout.sink_kv,
            )
        old = self._problem
        if old is None or old.inputs is not inputs or (old.tau, old.estimator) != (tau, estimator):
            self._problem = old = None
            self._problem = _Problem(inputs, tau, estimator)
        return self._problem


def parity_heads(heads: int) -> list[int]:
    """Heads that are compared: all of a few, else first, last and two between."""
    if heads <= PARITY_HEADS:
        return list(range(heads))
    return [0, heads // 3, 2 * heads // 3, heads - 1]


def token_order(settings: Mapping[str, Any], case: Case) -> str:
    """The order that a job really has. Random tokens have none, but permuting them costs as much."""
    asked = settings["token_order"]
    if settings["generator"] == "iid" and asked != "morton_in_op":
        return "raster"
    return case.token_order if asked == "auto" else asked


def make_inputs(case: Case, generator: str, seed: int, order: str, device: torch.device):
    """(q, k, v) of a case."""
    if generator == "iid":
        return iid_qkv(case.shape, seed, device)
    before = permutation(case) if order == "morton" else None
    return structured_qkv(case.shape, case.grid, seed, device, prefix=case.prefix, order=before)


def permutation(case: Case) -> torch.Tensor:
    """(T,) Morton order of the video behind its prefix."""
    return span_order(morton_order(case.grid), case.prefix, case.shape[1])


def read_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further ``SolAttnConfig`` fields; text becomes what the field holds. Raises ValueError."""
    own = ("tau", "estimator", "precision")
    known = {f.name: f for f in fields(SolAttnConfig) if f.init and f.name not in own}
    read = {}
    for name, value in extra.items():
        if name not in known:
            raise ValueError(f"config: got {name!r}, need one of {', '.join(known)}")
        read[name] = _value(value) if isinstance(value, str) else value
    try:
        SolAttnConfig(**read)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return read


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": "none", "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- own backends ------------------------------------------------------------------------------


def own_contender(problem: _Problem, backend: str, config: SolAttnConfig) -> Contender:
    """A registered backend; raises Declined with its reason."""
    inputs = problem.inputs
    q, k, v, arguments = inputs.q, inputs.k, inputs.v, inputs.op_arguments()
    reason = why_not(describe_call(q, config, inputs.layout), backend)
    if reason:
        raise Declined(f"declined: {reason}")
    implementation = registry.loaded(registry.get(OP, backend))

    def total():
        return sol_attention(q, k, v, config=config, backend=backend, **arguments)

    def stages() -> dict[str, Callable[[], Any]]:
        kind = getattr(sys.modules.get(implementation.__module__), "Steps", None)
        if kind is None:
            return {"total": total}
        steps = kind(q, k, v, config=config, **arguments)
        operands = steps.prepare()
        chosen = steps.route(operands)
        return {
            "prep": lambda: steps.route(steps.prepare()),
            "route": lambda: steps.route(operands),
            "main": lambda: steps.attend(operands, chosen, with_lse=False),
            "total": total,
        }

    def check() -> Gate:
        return own_gate(problem, backend, implementation, config)

    return Contender(check, stages)


def own_gate(problem: _Problem, backend: str, implementation, config: SolAttnConfig) -> Gate:
    """Same mask where it can be given, then own routing."""
    inputs, arguments = problem.inputs, problem.inputs.op_arguments()
    q, k, v = inputs.q, inputs.k, inputs.v
    bound, mismatch_bound = BOUNDS[config.precision], MISMATCH_BOUNDS[config.precision]
    want = problem.want()
    measured: dict[str, Any] = {}
    wrong = []

    def must(name: str, value: float, most: float) -> None:
        measured[name] = value
        if not value <= most:  # NaN is wrong as well
            wrong.append(f"{name} {value:.3g}, need <= {most:g}")

    takes_mask = "exact_mask" in inspect.signature(implementation).parameters
    if takes_mask:
        out = implementation(q, k, v, config=config, exact_mask=problem.mask, **arguments)[0]
        must("rel_l2", inputs.distance(out, want), bound)
        del out
    stats = SolAttnStats()
    out = sol_attention(q, k, v, config=config, backend=backend, stats=stats, **arguments)
    own = inputs.distance(out, want)
    if takes_mask:
        must("rel_l2_own_routing", own, OWN_ROUTING_BOUND)
    else:
        must("rel_l2", own, bound)
    # Both counts are the same in total: pairs that route differently, at least.
    moved = (stats.exact_blocks - problem.counts).abs().sum(dtype=torch.int64).item()
    must("mask_mismatch", moved / problem.mask.numel(), mismatch_bound)
    measured["density"] = stats.exact_blocks.double().mean().item() / num_blocks(q.shape[1])
    measured["gate"] = "same mask" if takes_mask else "own routing"
    return Gate(not wrong, measured, "; ".join(wrong) or None)


# -- peers -------------------------------------------------------------------------------------


def peer_contender(problem: _Problem, peer: Peer) -> Contender:
    """A peer; importing it may raise anything."""
    inputs = problem.inputs
    if inputs.order is not None and peer.sparse:
        raise Declined("takes no token order, and these inputs are in raster order")
    run = peer.load()
    sink_stop = max((stop for _, stop in inputs.layout.sink_kv), default=0)
    sinks = (0, num_blocks(sink_stop) if sink_stop else 0)

    def at(tau: float):
        return run(inputs.q, inputs.k, inputs.v, tau=tau, scale=SCALE, sink_blocks=sinks)

    def check() -> Gate:
        # At tau -1000 a peer's result does not depend on the job's tau: once per inputs.
        if peer.name not in inputs.peer_gates:
            inputs.peer_gates[peer.name] = peer_gate(inputs, peer, at(-1000.0))
        gate = inputs.peer_gates[peer.name]
        if not peer.sparse:
            return Gate(gate.ok, {**gate.fields, "density": 1.0}, gate.reason)
        # Theirs is not known; at the same tau and estimator it is close to ours.
        fields = {**gate.fields, "density": problem.density}
        if not gate.ok:
            return Gate(False, fields, gate.reason)
        fields["rel_l2_own_routing"] = inputs.distance(at(problem.tau), problem.want())
        if math.isinf(fields["rel_l2_own_routing"]):
            return Gate(False, {**gate.fields}, f"not finite at tau {problem.tau:g}")
        return Gate(True, fields)

    return Contender(check, lambda: {"total": lambda: at(problem.tau)})


def peer_gate(inputs: _Inputs, peer: Peer, out: torch.Tensor) -> Gate:
    """All-exact attention of a peer against the reference."""
    distance = inputs.distance(out, inputs.reference())
    ok = distance <= peer.bound
    reason = None if ok else f"rel_l2 {distance:.3g}, need <= {peer.bound:g}"
    return Gate(ok, {"rel_l2": distance, "gate": "all exact"}, reason)
