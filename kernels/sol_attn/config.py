"""What a Sol-Attn call computes: algorithm settings, token layout, and what it reports.

Everything here is plain data. Settings that change generated code are the ones in
``SolAttnConfig.variant``; tau, the scale and all token ranges are run-time values.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import torch

from ..arch import DeviceFacts

BLOCK_SIZE = 64  # tokens of a query block and of a key/value block
HEAD_DIM = 128
TAU_RANGE = (-1000.0, 8.0)

_CHOICES = {
    "estimator": ("diag", "exact"),
    "precision": ("bf16", "fp8", None),
    "qk_dtype": ("e4m3", "int8"),
    "k_smoothing": ("none", "mean", "block"),
    "v_smoothing": ("none", "mean"),
    "exp_mode": ("exp2", "expcast", "mixed"),
    "kv_splits": ("auto", 1, 2, 4),
    "routing": (True, False),
    "route_source": ("auto", "prepass", "kernel"),
    "v_bias_correction": (True, False, None),
}


@dataclass(frozen=True)
class SolAttnConfig:
    """Algorithm settings of Sol-Attn, validated.

    Attributes:
        tau: strictness of the route threshold in standard deviations, -1000 .. 8. Higher is
            sparser; -1000 makes every block exact. Run-time.
        estimator: spread of the block scores, "diag" (per channel) or "exact" (full second moment).
        precision: "bf16", "fp8", or None for FP8 where the chosen backend has it.
        routing: False computes every block exactly, whatever tau says.
        route_source: what decides which blocks are exact: "prepass", a kernel of its own on unrounded
            FP32 means; "kernel", the attention kernel on scores of rounded operands, which may decide
            otherwise close to the threshold; "auto", the chosen backend's own: "prepass" of the GPU
            kernels, "kernel" of the FP8 emulation.
        qk_dtype: element type of Q and K on the FP8 path.
        k_smoothing: "mean" subtracts a mean of the sequence from K before quantising (over a
            sample: any vector would do, see README.md), "block" the mean of each block. FP8 only; without quantisation the result is the same.
        v_smoothing: "mean" does so for V, and adds what it subtracted to the output.
        v_bias_correction: also corrects the mean that rounding V leaves. None means on exactly
            when v_smoothing is "mean"; True without it is a ValueError.
        exp_mode: how probabilities become E4M3 on the FP8 path.
        probability_scale: probabilities are cast to E4M3 at this scale, 1 .. 256.
        kv_splits: how many parts of the KV range are computed apart and merged.
        block_skip: BLASST-style threshold in (0, 1), or None.
    """

    tau: float = 1.0
    estimator: str = "diag"
    precision: str | None = None
    routing: bool = True
    route_source: str = "auto"
    qk_dtype: str = "e4m3"
    k_smoothing: str = "none"
    v_smoothing: str = "none"
    v_bias_correction: bool | None = None
    exp_mode: str = "exp2"
    probability_scale: float = 256.0
    kv_splits: str | int = "auto"
    block_skip: float | None = None
    # All fields but tau as one canonical string: equal strings mean equal generated code. Built
    # once, because torch.compile can read an attribute but can't trace the making of it.
    variant: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            # 1 == True in Python; a split count must not pass as a flag, nor the other way round.
            if not any(value == a and type(value) is type(a) for a in allowed):
                raise ValueError(f"{name}: got {value!r}, need one of {allowed}")
        _check_number("tau", self.tau, *TAU_RANGE)
        _check_number("probability_scale", self.probability_scale, 1.0, 256.0)
        if self.block_skip is not None:
            _check_number("block_skip", self.block_skip, 0.0, 1.0)
            if self.block_skip in (0.0, 1.0):
                raise ValueError(
                    f"block_skip: got {self.block_skip!r}, need more than 0, less than 1"
                )
        if self.v_bias_correction and self.v_smoothing != "mean":
            raise ValueError(
                f"v_bias_correction: got True with v_smoothing {self.v_smoothing!r}, "
                "need v_smoothing 'mean' (there is no mean to correct otherwise)"
            )
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        del settings["tau"]
        # 256 and 256.0 are equal settings, and must not make two variants.
        settings["probability_scale"] = float(self.probability_scale)
        object.__setattr__(self, "variant", json.dumps(settings, sort_keys=True))

    @property
    def corrects_v_bias(self) -> bool:
        """v_bias_correction with its default filled in."""
        if self.v_bias_correction is None:
            return self.v_smoothing == "mean"
        return self.v_bias_correction

    @classmethod
    def from_variant(cls, variant: str, tau: float) -> "SolAttnConfig":
        """Inverse of ``variant``."""
        return cls(tau=tau, **json.loads(variant))

    def filled(self, defaults: Iterable[tuple[str, object]]) -> "SolAttnConfig":
        """The same settings with ``defaults`` in the fields that are None."""
        missing = {name: value for name, value in defaults if getattr(self, name) is None}
        return replace(self, **missing) if missing else self


def _check_number(name: str, value, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r}, need a number in {low:g} .. {high:g}")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, need {low:g} .. {high:g}")


TokenRange = tuple[int, int]


@dataclass(frozen=True)
class TokenLayout:
    """Which tokens are special. Ranges are half-open (start, stop) in tokens.

    A range acts on every block it touches: blocks are the unit of sparsity.

    Attributes:
        sink_kv: keys and values computed exactly for every query.
        dense_q: queries computed exactly against every key.
        skip_q: so many queries in front are computed by the caller. A backend may leave out blocks
            that lie wholly among them (SM90 does): their rows of the output and of the LSE are
            undefined, and their exact blocks counted as 0.
        video: span of the video tokens; None means the whole sequence.
        grid: (t, h, w) of the video span in tokens, or None where unknown.
    """

    sink_kv: tuple[TokenRange, ...] = ()
    dense_q: tuple[TokenRange, ...] = ()
    video: TokenRange | None = None
    grid: tuple[int, int, int] | None = None
    skip_q: int = 0

    def __post_init__(self):
        for name in ("sink_kv", "dense_q"):
            for token_range in getattr(self, name):
                _check_range(name, token_range)
        if isinstance(self.skip_q, bool) or not isinstance(self.skip_q, int) or self.skip_q < 0:
            raise ValueError(f"skip_q: got {self.skip_q!r}, need a number of tokens, 0 or more")
        if self.video is not None:
            _check_range("video", self.video)
        if self.grid is not None:
            if not _are_ints(self.grid, 3) or any(n < 1 for n in self.grid):
                raise ValueError(f"grid: got {self.grid}, need three sizes (t, h, w) of at least 1")
            if self.video is not None and math.prod(self.grid) != self.video[1] - self.video[0]:
                raise ValueError(
                    f"grid: {self.grid} holds {math.prod(self.grid)} tokens, "
                    f"the video span {self.video} {self.video[1] - self.video[0]}"
                )

    def check_tokens(self, tokens: int) -> None:
        """Raise ValueError if a range reaches past ``tokens``."""
        ranges = [*self.sink_kv, *self.dense_q, *([self.video] if self.video else [])]
        for token_range in ranges:
            if token_range[1] > tokens:
                raise ValueError(f"layout: range {token_range} ends past the {tokens} tokens of q")
        if self.skip_q >= tokens:
            raise ValueError(
                f"layout: skip_q is {self.skip_q}, need less than the {tokens} tokens of q"
            )

    @property
    def skipped_blocks(self) -> int:
        """Query blocks in front that a backend may leave out."""
        return self.skip_q // BLOCK_SIZE


def _check_range(name: str, token_range: TokenRange) -> None:
    if not _are_ints(token_range, 2) or not 0 <= token_range[0] < token_range[1]:
        raise ValueError(f"{name}: got {token_range}, need (start, stop) with 0 <= start < stop")


def _are_ints(values, count: int) -> bool:
    if not isinstance(values, (tuple, list)) or len(values) != count:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) for n in values)


def num_blocks(tokens: int) -> int:
    """Blocks of ``tokens`` tokens; the last one may be partial."""
    return (tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


def resolve_kv_splits(kv_splits: str | int, tokens: int, precision: str) -> int:
    """Number of KV splits; an explicit one wins.

    The automatic choice is the published one, until our own kernel is measured: FP8 takes 2 from
    16,384 tokens, BF16 takes 4 from 65,536.
    """
    if kv_splits != "auto":
        return kv_splits
    if precision == "fp8":
        return 2 if tokens >= 16_384 else 1
    return 4 if tokens >= 65_536 else 1


@dataclass(frozen=True)
class SolAttnCall:
    """What backends look at when they accept or decline.

    Attributes:
        shape: (B, T, H, D).
        dtype: of q, k and v.
        device: facts of the device the tensors are on.
        config, layout: as given to the op.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: DeviceFacts
    config: SolAttnConfig
    layout: TokenLayout = field(default_factory=TokenLayout)

    @property
    def head_dim(self) -> int:
        return self.shape[3]

    @property
    def tokens(self) -> int:
        return self.shape[1]


@dataclass
class SolAttnStats:
    """What one ``sol_attention`` call did; filled in without a device sync.

    Attributes:
        backend: name of the backend that computed the call.
        precision: "fp8", or the dtype that was computed in: "bfloat16", "float32", "float16".
        exact_blocks: (B, H, NT) int32 on the device, exact key blocks of each query block.
        num_kv_blocks: NT.
        cast_from: input dtype that a backend cast to BF16, or None.
        declined: preferred backends that declined, with reasons.
    """

    backend: str | None = None
    precision: str | None = None
    exact_blocks: torch.Tensor | None = None
    num_kv_blocks: int = 0
    cast_from: torch.dtype | None = None
    declined: dict[str, str] = field(default_factory=dict)

    def density(self) -> torch.Tensor:
        """(B, NT, H) FP32 on the device: exact blocks / all blocks, per query block and head."""
        return self.exact_blocks.transpose(1, 2).float() / self.num_kv_blocks
