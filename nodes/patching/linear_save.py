"""A model's weights as a file in comfy_quant FP8: what ComfyUI since 0.3.76 loads by itself.

That format has one scale for a whole weight. Ours is a power of two: BF16 holds it exactly, so
every reader gets the same weights, whichever type it multiplies in; and E4M3, being a float, loses
nothing by it but half a step among numbers 2^-15 below the largest.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..models import ModelAdapter
from ..models.safetensors_writer import Entry, write_safetensors
from .apply import adapter_of
from .linear import PREFIX
from .linear_formats import weight_format, why_not_shape
from .linear_rows import (
    E4M3,
    E4M3_MAX,
    FP8,
    plain_weight,
    power_of_two_scale,
    stochastic_codes,
)

FORMAT = "float8_e4m3fn"
# Of a layer's tensors; written anew, or of a form that the file no longer has.
_DESCRIPTIONS = ("weight_scale", "scale_weight", "input_scale", "scale_input", "comfy_quant")


@dataclass(frozen=True)
class SavedFile:
    """What was written: bytes of the file, Linears in FP8, other tensors."""

    size_bytes: int
    linears: int
    others: int


def save_fp8_model(
    model,
    path: str,
    *,
    overwrite: bool = False,
    core_matmul: bool = False,
    device: torch.device | None = None,
    done: Callable[[int], None] = lambda nbytes: None,
) -> SavedFile:
    """Write ``model`` with the Linears of its blocks in FP8; LoRAs on it are merged.

    Args:
        model: ComfyUI ModelPatcher of a family we know. It is not changed.
        core_matmul: ask ComfyUI's own loader to multiply in FP8 where it can, with activations that
            are not scaled; otherwise it widens the weights.
        device: where to compute; where the weights are if None.
        done: called with the bytes of each tensor that was written; may raise.

    Raises:
        ValueError: another model, a weight that can't be written so, or a file that can't; before
            anything is written, but for disks that fill up meanwhile.
    """
    entries, linears = saved_entries(model, core_matmul=core_matmul, device=device)
    size = write_safetensors(
        path,
        entries,
        {"format": "pt"},
        overwrite=overwrite,
        done=lambda entry: done(entry.nbytes),
    )
    return SavedFile(size, linears, len(entries) - 3 * linears)


def saved_entries(
    model, *, core_matmul: bool = False, device: torch.device | None = None
) -> tuple[list[Entry], int]:
    """(entries of the file, number of its Linears in FP8); see ``save_fp8_model``."""
    adapter = adapter_of(model, "Save FP8 Model")
    diffusion_model = model.get_model_object("diffusion_model")
    diffusion_model = getattr(diffusion_model, "_orig_mod", diffusion_model)
    layers = _layers(model, diffusion_model, adapter)
    if not layers:
        raise ValueError(f"Save FP8 Model: {adapter.name} has no Linear to save in FP8")
    settings = {"format": FORMAT}
    if not core_matmul:
        settings["full_precision_matrix_mult"] = True
    text = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    linears = [e for name, module in layers.items() for e in _entries(model, name, module, device)]
    texts = [
        Entry(f"{name}.comfy_quant", torch.uint8, tuple(text.shape), lambda: text)
        for name in layers
    ]
    others = []
    for key, tensor in diffusion_model.state_dict().items():
        layer, _, end = key.rpartition(".")
        if layer not in layers or end not in ("weight", *_DESCRIPTIONS):
            others.append(_plain_entry(model, key, tensor, device))
    # Aligned: a Linear's codes are a multiple of 256 bytes, and its scale, which is known once they
    # are made, is 4. Whatever is smaller than 4 bytes comes last.
    others.sort(key=lambda entry: -entry.dtype.itemsize)
    wide = [entry for entry in others if entry.dtype.itemsize >= 4]
    return [*wide, *linears, *others[len(wide) :], *texts], len(layers)


def _layers(model, diffusion_model, adapter: ModelAdapter) -> dict:
    """name -> module of every layer to write in FP8: the Linears of the blocks, and others that are
    stored in FP8 already."""
    modules = dict(diffusion_model.named_modules())
    names = {layer.name for layer in (*adapter.linears, *getattr(adapter, "stored", ()))}
    found = {}
    for name, module in modules.items():
        if not hasattr(module, "in_features") or why_not_shape(module) is not None:
            continue
        parts = _parts(module, _original(model, f"{PREFIX}{name}.weight"))
        if parts is not None and parts[1].numel() > 1 and not bool((parts[1] == parts[1][0]).all()):
            raise ValueError(_rounded_twice(name))
        if parts is not None:
            found[name] = module
        elif name in names:
            reason = weight_format(module).skip
            if reason is not None:
                raise ValueError(f"Save FP8 Model: {name} can't be saved in FP8: {reason}")
            found[name] = module
    return found


def _parts(module, weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(codes, scale) of an FP8 weight with one scale or one a row; None for any other weight."""
    if hasattr(weight, "_qdata"):
        codes, scale = weight._qdata, getattr(weight._params, "scale", None)
    else:
        codes, scale = weight, getattr(module, "row_scale", None)
        scale = getattr(module, "scale_weight", None) if scale is None else scale
        scale = torch.ones(()) if scale is None else scale
    floats = codes.dtype in FP8 and getattr(scale, "dtype", None) == torch.float32
    return (codes, scale) if floats and scale.numel() in (1, codes.shape[0]) else None


def _original(model, key: str) -> torch.Tensor:
    """The weight ``key`` without LoRAs, which ComfyUI may have merged into the one in use."""
    saved = model.backup.get(key)
    return _attribute(model.model, key) if saved is None else saved.weight


def _attribute(module, path: str):
    """The attribute at a dotted ``path``."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _entries(model, layer: str, module, device) -> list[Entry]:
    """weight and weight_scale of ``layer``, to be made in this order."""
    made = []

    def codes():
        values, scale = _saved_linear(model, layer, module, device)
        made.append(scale.reshape(()).float())
        return values

    shape = (module.out_features, module.in_features)
    return [
        Entry(f"{layer}.weight", E4M3, shape, codes),
        Entry(f"{layer}.weight_scale", torch.float32, (), made.pop),
    ]


def _saved_linear(model, layer: str, module, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes (N, K), scale) of a Linear with its LoRAs."""
    key = f"{PREFIX}{layer}.weight"
    weight = _original(model, key)
    parts = _parts(module, weight)
    if parts is not None and parts[0].dtype == E4M3 and key not in model.patches:
        return parts[0], parts[1].flatten()[0]
    values = weight if parts is None else plain_weight(*parts, torch.float32)
    values = _patched(model, key, values.to(device=device or weight.device, dtype=torch.float32))
    amax = values.abs().amax()
    if not bool(amax.isfinite()):
        raise ValueError(f"Save FP8 Model: {layer}.weight holds NaN or an infinity; not saved")
    scale = power_of_two_scale(amax)
    values = (values * (1.0 / scale)).clamp_(-E4M3_MAX, E4M3_MAX)
    if parts is None:
        return values.to(E4M3), scale
    # A LoRA on numbers that are FP8 already: see stochastic_rows.
    return stochastic_codes(values, zlib.crc32(key.encode())), scale


def _plain_entry(model, key: str, tensor: torch.Tensor, device) -> Entry:
    """A tensor that stays as it is, but for LoRAs."""
    full = PREFIX + key
    saved = model.backup.get(full)
    tensor = tensor if saved is None else saved.weight
    if full not in model.patches:
        return Entry(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    def make():
        values = tensor.to(device=device or tensor.device, dtype=torch.float32)
        return _patched(model, full, values).to(tensor.dtype)

    return Entry(key, tensor.dtype, tuple(tensor.shape), make)


def _patched(model, key: str, values: torch.Tensor) -> torch.Tensor:
    """``values``, FP32, with the LoRAs on ``key``."""
    if key not in model.patches:
        return values
    from comfy.lora import calculate_weight

    shape = values.shape
    values = calculate_weight(model.patches[key], values.clone(), key)
    if values.shape != shape:
        raise ValueError(
            f"Save FP8 Model: a patch makes {key} {tuple(values.shape)}, the model has "
            f"{tuple(shape)}; take that patch off the model"
        )
    return values


def _rounded_twice(name: str) -> str:
    return (
        f"Save FP8 Model: {name} was rounded to FP8 when this model was loaded, with a scale for "
        "every row; the file has one a layer, and would round it a second time. Load the model with "
        "linear_precision 'default' (that takes no GPU memory) and save it"
    )
