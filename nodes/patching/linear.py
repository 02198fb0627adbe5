"""Which Linears of a model run in FP8, and how they are told to.

ComfyUI keeps a list of functions for each weight and applies them whenever a layer uses it, in
whatever way that weight came to the device. Ours goes on that list, under the weight's name: it
belongs to one clone of the model, and ComfyUI takes it off with the rest.
"""

import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..models import ATTENTION, FFN, LinearLayer, ModelAdapter
from .layers import describe_layers, parse_layers
from .linear_formats import (
    NO_LINEAR,
    RAW_FP8,
    WeightFormat,
    stored_scales_were_ignored,
    weight_format,
    why_not_shape,
)
from .linear_fused import activations, defer_norms
from .linear_share import share_keys
from .linear_weight import is_weight_function, weight_function
from .plan import FP8LinearRequest

SCOPES = ("all", ATTENTION, FFN)
PREFIX = "diffusion_model."
# Settings that are equal give weights that are equal, so ComfyUI need not load the model again.
_NAMESPACE = uuid.UUID("0b3d6f0a-6f0e-5c55-9d0c-5f1c5f0e8f11")


@dataclass(frozen=True)
class LinearSettings:
    """What FP8 Linear does on one model.

    Attributes:
        request: the node's inputs.
        converted: (layer, scale of the E4M3 numbers it is stored as, or None), in order.
        formats: (format, layers converted from it).
        skipped: (reason, names of the layers left alone).
        notes: inputs that have nothing to act on here, in words.
    """

    request: FP8LinearRequest
    converted: tuple[tuple[LinearLayer, float | None], ...]
    formats: tuple[tuple[str, int], ...]
    skipped: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()

    def section(self) -> dict:
        """For the report, as plain data."""
        return {
            "settings": {
                "scope": self.request.scope,
                "layers": self.request.layers,
                "skip": self.request.skip,
            },
            "converted": len(self.converted),
            "converted_layers": describe_names(layer.name for layer, _ in self.converted),
            "formats": dict(self.formats),
            "skipped": [
                {"reason": reason, "count": len(names), "layers": describe_names(names)}
                for reason, names in self.skipped
            ],
        }


def check_request(request: FP8LinearRequest) -> None:
    """Raise ValueError for a value that the node does not offer."""
    if request.scope not in SCOPES:
        raise ValueError(f"scope: got {request.scope!r}, need one of {', '.join(SCOPES)}")
    for name in ("layers", "skip"):
        value = getattr(request, name)
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {value!r}, need a text")


def resolve_linear(request: FP8LinearRequest, adapter: ModelAdapter, model) -> LinearSettings:
    """Decide for every Linear of ``model``, a ComfyUI ModelPatcher; reads almost no weights.

    Raises:
        ValueError: an input out of range, a checkpoint that this ComfyUI can't read, or nothing
            left to convert.
    """
    check_request(request)
    blocks = parse_layers("layers", request.layers, adapter.num_blocks)
    patterns = skip_patterns(request.skip)
    converted: list[tuple[LinearLayer, float | None]] = []
    formats: Counter[str] = Counter()
    skipped: dict[str, list[str]] = {}
    unscaled = []
    for layer in adapter.linears:
        reason, grid = _not_asked_for(layer, request, blocks, patterns), None
        if reason is None:
            module = find_module(model, layer.name)
            found = weight_format(module) if module is not None else WeightFormat("", NO_LINEAR)
            reason, grid = found.skip or why_not_shape(module), found.grid
            if reason is None:
                formats[found.name] += 1
                if not found.scaled:
                    unscaled.append(module)
        if reason is None:
            converted.append((layer, grid))
        else:
            skipped.setdefault(reason, []).append(layer.name)
    if stored_scales_were_ignored(unscaled):
        raise ValueError(
            "FP8 Linear: this file keeps its FP8 weights with scales (comfy_quant) that this "
            "ComfyUI does not read, so the model computes with wrong weights; it needs ComfyUI "
            "0.3.76 or newer, or a file with plain weights"
        )
    if not converted:
        raise ValueError(_nothing(adapter, skipped))
    names = [layer.name for layer in adapter.linears]
    notes = [
        f"skip pattern {pattern!r} matches no Linear"
        for pattern in patterns
        if not any(_matches(name, pattern) for name in names)
    ]
    raw = sum(count for name, count in formats.items() if name.startswith(RAW_FP8))
    if raw:
        notes.append(f"{raw} Linears come from raw FP8 weights: what that rounding lost is lost")
    return LinearSettings(
        request=request,
        converted=tuple(converted),
        formats=tuple(formats.most_common()),
        skipped=tuple((reason, tuple(names)) for reason, names in skipped.items()),
        notes=tuple(notes),
    )


def skip_patterns(text: str) -> tuple[str, ...]:
    """The patterns of a comma-separated text."""
    return tuple(
        p.strip().removeprefix(PREFIX).removesuffix(".weight") for p in text.split(",") if p.strip()
    )


def describe_names(names: Iterable[str]) -> dict[str, str]:
    """{"self_attn.q": "0-39"}: blocks of each Linear, in the order of first appearance."""
    blocks: dict[str, set[int]] = {}
    for name in names:
        _, index, part = name.split(".", 2)
        blocks.setdefault(part, set()).add(int(index))
    return {part: describe_layers(frozenset(found)) for part, found in blocks.items()}


def find_module(model, name: str):
    """The module ``name`` below the diffusion model, or None."""
    try:
        return model.get_model_object(PREFIX + name)
    except AttributeError:
        return None


def add_weight_functions(model, settings: LinearSettings) -> None:
    """Put our function on every converted weight of ``model``, a clone of ours."""
    before = model.patches_uuid
    names = [layer.name for layer, _ in settings.converted]
    keys, following = share_keys(names), activations(names)
    for layer, grid in settings.converted:
        name = layer.name
        function = weight_function(grid, keys.get(name, ""), following.get(name, ""))
        model.add_weight_wrapper(f"{PREFIX}{layer.name}.weight", function)
    # A random one, as add_weight_wrapper leaves behind, would load the model again each time.
    what = ";".join(f"{layer.name}={grid}" for layer, grid in settings.converted)
    model.patches_uuid = uuid.uuid5(_NAMESPACE, f"{before}:{what}")
    defer_norms(model, names)


def sort_weight_functions(model, settings: LinearSettings) -> None:
    """Put our functions last, after every LoRA.

    ComfyUI appends a LoRA's function when it moves a layer off the device later on. The result is
    right either way; this makes it the same to the last bit.
    """
    for layer, _ in settings.converted:
        functions = getattr(find_module(model, layer.name), "weight_function", ())
        if len(functions) > 1:
            functions.sort(key=is_weight_function)


def _not_asked_for(layer, request, blocks, patterns) -> str | None:
    if request.scope not in ("all", layer.role):
        return f"not in scope {request.scope!r}"
    if layer.block not in blocks:
        return f"not in layers {request.layers!r}"
    matching = next((p for p in patterns if _matches(layer.name, p)), None)
    return None if matching is None else f"skip pattern {matching!r}"


def _matches(name: str, pattern: str) -> bool:
    """Whole names and their ends: "ffn.0" is every block's."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, "*." + pattern)


def _nothing(adapter: ModelAdapter, skipped: dict[str, list[str]]) -> str:
    why = "; ".join(f"{len(names)} {reason}" for reason, names in skipped.items())
    why = why or f"{adapter.name} has none of the Linears of a {adapter.family} model"
    return (
        f"FP8 Linear: no Linear of this model can be converted ({why}); widen scope and layers, "
        "shorten skip, load plain weights, or remove the node"
    )
