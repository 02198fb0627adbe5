"""A model whose Linears are FP8 from the moment its file is read.

The file's tensors stay on disk until ComfyUI hands each to its layer (they are mapped, not read),
and a layer that is to be FP8 keeps nothing else. So a copy in the file's precision never exists.
"""

import inspect
import logging
import os
import weakref
from collections import Counter

import torch

from ..models.checkpoint import CheckpointFacts, inspect_checkpoint
from .apply import adapter_of, installed, runtime_of
from .linear import LinearSettings, find_module
from .linear_formats import why_not_shape
from .linear_fused import activations, defer_norms
from .linear_ops import COMPUTE, STORE, FP8Weights, fp8_operations, why_no_fp8_load
from .linear_rows import FP8
from .linear_share import share_keys
from .plan import AccelerationPlan, FP8LinearRequest
from .runtime import AccelerationRuntime

log = logging.getLogger("hopper_sol")
AT_LOAD = "at load"

# Models that are still in use, so that a node that runs again need not read its file again. Nothing
# here keeps one alive.
_in_use: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def load_fp8_model(path: str, keep_adaln: bool = False, disable_dynamic: bool = False):
    """ModelPatcher of the diffusion model at ``path``, with the Linears of its blocks in FP8.

    Sampler runs of it are reported as with an FP8 Linear node.

    Args:
        path: of a safetensors file that ``inspect_checkpoint`` accepts.
        keep_adaln: leave the layers that FP8 would only store, MiniMax-H3's adaLN, in 16 bits.
        disable_dynamic: see ComfyUI's load_diffusion_model.

    Raises:
        ValueError: the file, or this ComfyUI, does not allow it; before any weight is read.
    """
    import comfy.sd
    import comfy.utils

    facts = inspect_checkpoint(path)
    reason = why_no_fp8_load()
    if reason is not None:
        raise ValueError(f"linear_precision: {reason}; choose 'default' here")
    layers = facts.weights.layers
    stored = frozenset() if keep_adaln else layers.store
    tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    tensors, scales = _split(tensors, facts)
    weights = FP8Weights(
        roles={**dict.fromkeys(layers.compute, COMPUTE), **dict.fromkeys(stored, STORE)},
        scales=scales,
        device=_quantising_device(),
        shares=share_keys(layers.compute),
        activations=activations(layers.compute),
        done=_progress(len(layers.compute | stored)),
    )
    options = {"custom_operations": fp8_operations(weights)}
    if sum(t.numel() * (1 if t.dtype in FP8 else -1) for t in tensors.values()) > 0:
        # ComfyUI would make the rest of the model FP8, too: norms, biases, embeddings.
        options["dtype"] = _float_dtype(sum(t.numel() for t in tensors.values()))
    known = inspect.signature(comfy.sd.load_diffusion_model_state_dict).parameters
    # Without what describes the layers' formats: they are of one form now.
    metadata = {k: v for k, v in (metadata or {}).items() if k != "_quantization_metadata"}
    later = {"metadata": metadata, "disable_dynamic": disable_dynamic}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        tensors, model_options=options, **{k: v for k, v in later.items() if k in known}
    )
    scales.clear()
    if patcher is None:
        raise ValueError(f"{os.path.basename(path)}: this ComfyUI does not know the model in it")
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (load_fp8_model, (path, keep_adaln))
    adapter = adapter_of(patcher, "Load Video Model")
    settings = loaded_settings(patcher, adapter, facts)
    defer_norms(patcher, (layer.name for layer, _ in settings.converted))
    plan = AccelerationPlan(linear=settings.request)
    return installed(patcher, plan, AccelerationRuntime(adapter, None, settings))


def load_or_reuse(path: str, keep_adaln: bool = False):
    """As ``load_fp8_model``; the model itself, if one of this file is in use already.

    Args:
        path, keep_adaln: see there. Models that differ in the second are two.
    """
    stat = os.stat(path)
    key = (os.path.abspath(path), stat.st_mtime_ns, stat.st_size, keep_adaln)
    patcher = _in_use.get(key)
    if patcher is not None:
        log.info("Load Video Model: reusing the FP8 weights of %s", os.path.basename(path))
        return patcher
    patcher = _in_use[key] = load_fp8_model(path, keep_adaln)
    return patcher


def is_loaded_fp8(model) -> bool:
    """Whether ``model`` or what it is a clone of came from ``load_fp8_model``."""
    runtime = runtime_of(model)
    linear = None if runtime is None else runtime.linear
    return linear is not None and any(name.endswith(AT_LOAD) for name, _ in linear.formats)


def loaded_settings(model, adapter, facts: CheckpointFacts) -> LinearSettings:
    """What the report says of a model that was loaded so: read off its layers."""
    converted, formats, skipped = [], Counter(), {}
    for layer in adapter.linears:
        module = find_module(model, layer.name)
        if getattr(module, "is_hopper_sol_fp8", False):
            formats[f"{module.source} {AT_LOAD}"] += 1
            converted.append((layer, None))
        else:
            reason = why_not_shape(module) or "not FP8 in this kind of file"
            skipped.setdefault(reason, []).append(layer.name)
    if not converted:
        why = "; ".join(f"{len(names)} {reason}" for reason, names in skipped.items())
        raise ValueError(
            f"linear_precision: no Linear of {adapter.name} can be FP8 ({why}); choose "
            "'default' here"
        )
    stored, kept = 0, Counter()
    for name in sorted(facts.weights.layers.store):
        module = find_module(model, name)
        if getattr(module, "is_hopper_sol_fp8", False):
            stored += 1
        elif module is not None:
            kept[str(module.weight.dtype).removeprefix("torch.")] += 1
    notes = []
    raw = sum(count for name, count in formats.items() if name.startswith("raw"))
    if raw:
        notes.append(f"{raw} Linears come from raw FP8 weights: what that rounding lost is lost")
    if stored:
        notes.append(f"{stored} further Linears are kept in FP8 and computed without")
    for dtype, count in kept.items():
        notes.append(f"{count} further Linears (adaLN) are kept in {dtype}")
    return LinearSettings(
        request=FP8LinearRequest(),
        converted=tuple(converted),
        formats=tuple(formats.most_common()),
        skipped=tuple((reason, tuple(names)) for reason, names in skipped.items()),
        notes=tuple(notes),
    )


def _split(tensors: dict, facts: CheckpointFacts) -> tuple[dict, dict[str, torch.Tensor]]:
    """The diffusion model's tensors by name below its prefix, and its scales by layer."""
    prefix, form = facts.weights.prefix, facts.weights.format
    scales = {layer: tensors[key] for layer, key in form.scales.items()}
    own = {
        key[len(prefix) :]: tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix) and key not in form.extras
    }
    return own, scales


def _quantising_device() -> torch.device:
    """The GPU, if it is one that computes faster than moving the weights there and back takes."""
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    return device if device.type == "cuda" else torch.device("cpu")


def _float_dtype(parameters: int) -> torch.dtype:
    """What ComfyUI would choose for the model if its file were not FP8."""
    import comfy.model_management

    return comfy.model_management.unet_dtype(
        model_params=parameters,
        supported_dtypes=[torch.bfloat16, torch.float16, torch.float32],
    )


def _progress(layers: int):
    """A function to call after each layer: moves ComfyUI's bar, and stops where Cancel was pressed."""
    import comfy.model_management
    import comfy.utils

    bar = comfy.utils.ProgressBar(layers)

    def done():
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(1)

    return done
