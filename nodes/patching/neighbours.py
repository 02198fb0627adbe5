"""Who kept attention calls from Sol Attention in a run: patches of other nodes, by name.

Looked for after a run and only where calls are missing, so that a patch that still goes through the
override is never accused.
"""

import logging
import re
from collections import Counter
from dataclasses import dataclass, field

from .layers import describe_layers
from .plan import KEY

log = logging.getLogger("hopper_sol")
_MODEL = "diffusion_model"
_COMPILE_KEY = "torch.compile"  # ComfyUI's own compile wrapper computes what it is given
_FORWARDS = ("forward", "_forward", "forward_orig", "inner_forward")
# A key of the model, of a block or of a block's own attention; cross-attention is not ours.
_PLACE = re.compile(rf"{_MODEL}(?:\.blocks\.(\d+)(?:\.(?!cross)\w*attn\w*)?)?")

# ComfyUI's names of the places where a patch can answer for the model, or get between.
_AROUND_MODEL = ("apply_model", _MODEL)
_AROUND_STEP = ("sampler_sample", "predict_noise", "calc_cond_batch", "apply_model")
_ANYWHERE = ("outer_sample", *_AROUND_STEP, _MODEL, "on_pre_run", "on_prepare_state")


@dataclass
class CallsSeen:
    """Self-attention calls that reached the override of a run.

    Attributes:
        places: (step, block) of each; block None where it is unknown.
        before_us: name of another override -> calls of any kind that came through it.
    """

    places: set[tuple[int, int | None]] = field(default_factory=set)
    before_us: Counter[str] = field(default_factory=Counter)


def name_of(function) -> str:
    """Module and name of a function; of a custom node, from its folder on."""
    if function is None:
        return "nothing"
    for inner in ("func", "__func__"):  # functools.partial, bound method
        function = getattr(function, inner, function)
    owner = function if hasattr(function, "__qualname__") else type(function)
    # ComfyUI imports a custom node under its path, which is nobody's business in a report.
    module = getattr(owner, "__module__", None) or type(owner).__module__
    module = str(module).replace("\\", "/").rsplit("custom_nodes/", 1)[-1]
    return f"{module}.{owner.__qualname__}"


def explain(run, model_options: dict, seen: CallsSeen) -> list[str]:
    """Notes on calls that a finished run should have seen and did not, with names.

    Args:
        run: the SolAttentionRun, its record not sealed yet.
        model_options: of the run's guider.
        seen: calls that came by.
    """
    try:
        return _explain(run, model_options, seen)
    except Exception:  # other packs may keep anything there, and the render is done
        log.exception("Sol Attention: can't tell which other nodes took attention calls")
        return ["which other nodes took attention calls can't be told; the log says why"]


def _explain(run, model_options: dict, seen: CallsSeen) -> list[str]:
    record = run.record
    notes = [
        f"another override stood before Sol Attention and handed on {count} calls: {name}"
        for name, count in seen.before_us.items()
    ]
    evaluations, skipped = record.evaluations, record.evaluations - record.forwards
    if evaluations and not seen.places:
        found = _replaced(run.patcher) or _hooks(run.patcher, model_options, _ANYWHERE)
        if found:
            notes.append(f"what may have computed all self-attention instead: {'; '.join(found)}")
        return notes
    if skipped:
        found = _hooks(run.patcher, model_options, _AROUND_MODEL)
        notes.append(
            f"{skipped} of {evaluations} evaluations made no attention call; answered instead by "
            f"{'; '.join(found) or 'a patch that left no trace'}"
        )
    idle = record.num_steps - len({step for step, _ in seen.places})
    if seen.places and idle and not skipped:
        found = _hooks(run.patcher, model_options, _AROUND_STEP)
        if found:
            notes.append(
                f"{idle} of {record.num_steps} steps did not run the model; what may have answered: "
                f"{'; '.join(found)}"
            )
    blocks = {block for _, block in seen.places}
    silent = frozenset(range(record.num_blocks)) - blocks
    if blocks and None not in blocks and silent:
        found = _replaced(run.patcher, silent) or _hooks(run.patcher, model_options, _ANYWHERE)
        notes.append(
            f"no self-attention call from blocks {describe_layers(silent)}; computed instead by "
            f"{'; '.join(found) or 'a patch that left no trace'}"
        )
    return notes


def _replaced(patcher, blocks: frozenset[int] | None = None) -> list[str]:
    """Replaced forwards on the way to self-attention, "key (name)", keys of equal blocks joined.

    blocks: only what concerns these; None for all.
    """
    places: dict[tuple[str, str], set[int]] = {}
    for key, value in {**_written(patcher), **getattr(patcher, "object_patches", {})}.items():
        owner, _, last = key.rpartition(".")
        place = _PLACE.fullmatch(owner if last in _FORWARDS else key)
        # A compiled module computes what the module inside it does.
        if place is None or hasattr(value, "_orig_mod"):
            continue
        if place[1] is None:
            places.setdefault((key, name_of(value)), set())
        elif blocks is None or int(place[1]) in blocks:
            pattern = key.replace(f".blocks.{place[1]}", ".blocks.{}", 1)
            places.setdefault((pattern, name_of(value)), set()).add(int(place[1]))
    return [
        f"{key.format(describe_layers(frozenset(where)))} ({name})"
        for (key, name), where in places.items()
    ]


def _written(patcher) -> dict:
    """Functions that a patch wrote onto the diffusion model's modules, by key."""
    model = getattr(getattr(patcher, "model", None), _MODEL, None)
    model = getattr(model, "_orig_mod", model)
    if model is None:
        return {}
    return {
        ".".join(filter(None, (_MODEL, path, name))): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # ComfyUI puts what an object patch replaced back in this way.
        if name in _FORWARDS and getattr(value, "__func__", None) is not _own(module, name)
    }


def _own(module, name: str):
    return getattr(type(module), name, module)  # the module itself equals no function


def _hooks(patcher, model_options: dict, kinds: tuple[str, ...]) -> list[str]:
    """Wrappers and callbacks of other nodes, "key (name)", and the older single function wrapper."""
    found = {}
    of_run = model_options.get("transformer_options", {})
    for attribute in ("wrappers", "callbacks"):
        for hooks in (getattr(patcher, attribute, {}), of_run.get(attribute, {})):
            for key, functions in (item for kind in kinds for item in hooks.get(kind, {}).items()):
                if key in (KEY, _COMPILE_KEY):
                    continue
                for function in functions:
                    name = name_of(function)
                    found[name if key is None else f"{key} ({name})"] = None
    if "model_function_wrapper" in model_options:
        found[f"model_function_wrapper ({name_of(model_options['model_function_wrapper'])})"] = None
    return list(found)
