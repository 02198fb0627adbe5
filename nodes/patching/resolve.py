"""A request with every "auto" filled in from the model family, checked against the model."""

from dataclasses import asdict, dataclass, replace

from ...kernels import SolAttnConfig
from ..models import ModelAdapter
from .layers import parse_layers
from .plan import SolAttentionRequest
from .presets import PRESETS, overridden

# The article's words -> (k_smoothing, v_smoothing)
SMOOTHING = {
    "none": ("none", "none"),
    "k": ("mean", "none"),
    "kv": ("mean", "mean"),
    "block": ("block", "none"),
}


@dataclass(frozen=True)
class AttentionSettings:
    """What Sol Attention does on one model, before a run is known.

    Attributes:
        request: the node's inputs with their "auto" filled in, layer texts as given.
        sparse: settings of a layer outside fp8_layers; fp8: inside.
        sinks: what conditioning tokens are, "auto" filled in; the request keeps what was asked for.
        dense_layers, fp8_layers: block indices.
        notes: options that have nothing to act on here, in words.
    """

    request: SolAttentionRequest
    sparse: SolAttnConfig
    fp8: SolAttnConfig
    sinks: str
    dense_layers: frozenset[int]
    fp8_layers: frozenset[int]
    notes: tuple[str, ...] = ()

    def config(self, layer: int | None) -> SolAttnConfig:
        """Settings for the attention of block ``layer``."""
        return self.fp8 if layer in self.fp8_layers else self.sparse


# What ComfyUI checks for typed widgets but not for values that come through a link.
CHOICES = {
    "estimator": ("auto", "diag", "exact"),
    "precision": ("auto", "fp8", "bf16"),
    "smoothing": ("auto", *SMOOTHING),
    "sinks": ("auto", "off", "kv", "kv_and_rows", "audio_rows"),
    "token_order": ("auto", "none", "morton_3d", "morton_2d"),
    "on_decline": ("fallback", "error"),
    "kv_splits": ("auto", "1", "2", "4"),
    "preset": tuple(PRESETS),
}
RANGES = {
    "tau": (-1000.0, 8.0),
    "dense_steps": (-1, 1000),
    "dense_last_steps": (0, 1000),
    "start_percent": (0.0, 1.0),
    "end_percent": (0.0, 1.0),
    "min_tokens": (0, 1_000_000),
}


def check_request(request: SolAttentionRequest) -> None:
    """Raise ValueError for a value that the node does not offer."""
    for name, choices in CHOICES.items():
        value = getattr(request, name)
        if value not in choices:
            raise ValueError(f"{name}: got {value!r}, need one of {', '.join(choices)}")
    for name, (low, high) in RANGES.items():
        value = getattr(request, name)
        kinds, what = (
            ((int,), "a whole number") if isinstance(low, int) else ((int, float), "a number")
        )
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # NaN is not in any range
            raise ValueError(f"{name}: got {value!r}, need {what} in {low} .. {high}")
    for name in ("dense_layers", "fp8_layers"):
        if not isinstance(getattr(request, name), str):
            raise ValueError(
                f"{name}: got {getattr(request, name)!r}, need a text such as '0-2,-1'"
            )


def resolve(request: SolAttentionRequest, adapter: ModelAdapter) -> AttentionSettings:
    """Fill in and check; raises ValueError or TypeError naming the input."""
    check_request(request)
    if request.start_percent > request.end_percent:
        raise ValueError(
            f"start_percent: got {request.start_percent:g}, need at most end_percent "
            f"{request.end_percent:g}"
        )
    notes = []
    if other := overridden(request.preset, asdict(request)):
        given = ", ".join(f"{name} {getattr(request, name)} (not {other[name]})" for name in other)
        notes.append(f"preset {request.preset}: these inputs were given and win: {given}")
    request = replace(
        request,
        estimator=_auto(request.estimator, adapter.default_estimator),
        smoothing=_auto(request.smoothing, adapter.default_smoothing),
        token_order=_auto(request.token_order, adapter.default_token_order),
        dense_layers=_auto(request.dense_layers, adapter.default_dense_layers),
        fp8_layers=_auto(request.fp8_layers, adapter.default_fp8_layers()),
    )
    k_smoothing, v_smoothing = SMOOTHING[request.smoothing]
    splits = request.kv_splits
    config = SolAttnConfig(
        tau=request.tau,
        estimator=request.estimator,
        precision="bf16",
        k_smoothing=k_smoothing,
        v_smoothing=v_smoothing,
        v_bias_correction=request.v_bias_correction and v_smoothing == "mean",
        kv_splits=splits if splits == "auto" else int(splits),
    )
    fp8 = {"auto": None, "fp8": "fp8", "bf16": "bf16"}[request.precision]
    if not adapter.prefix_words and request.sinks not in ("auto", "off"):
        notes.append(
            f"sinks {request.sinks}: {adapter.family} has no conditioning tokens in its sequence"
        )
    return AttentionSettings(
        request=request,
        sparse=config,
        fp8=replace(config, precision=fp8),
        sinks=_auto(request.sinks, adapter.default_sinks),
        dense_layers=parse_layers("dense_layers", request.dense_layers, adapter.num_blocks),
        fp8_layers=parse_layers("fp8_layers", request.fp8_layers, adapter.num_blocks),
        notes=tuple(notes),
    )


def _auto(value: str, default: str) -> str:
    return default if value.strip().lower() == "auto" else value
