"""The Linear that a model is built from when its weights are to be FP8 as soon as they are read.

ComfyUI builds a model from a class of operations and then hands every layer its tensors. Ours has
no weight until then, so that a model in its file's precision never exists, and makes FP8 rows of
what it is handed, layer by layer. What it does about LoRAs, moves and saving is ComfyUI's contract
with its own quantised layers, which has changed over time:

- ComfyUI 0.7 and newer: the weight is a QuantizedTensor (``linear_layout.py``).
- ComfyUI up to 0.3.75: the weight is the codes; the scale stands beside it. ComfyUI puts a weight
  back that it saved before it merged a LoRA, and does not know of scales.
"""

import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ...kernels import QuantizedRows
from ..models.stored_formats import ROWS_FORMAT
from . import linear_layout
from .linear_formats import why_not_shape
from .linear_rows import E4M3, FP8, dequantize_rows, plain_weight, row_weight, stochastic_rows
from .linear_run import handed_out
from .linear_stored import patched_rows_linear, stored_linear, widened_linear

COMPUTE, STORE = "compute", "store"


@dataclass(frozen=True)
class FP8Weights:
    """Which layers become FP8 rows, and the scales that the file keeps beside its weights.

    Attributes:
        roles: layer name -> "compute" (the product is FP8, too) or "store" (only the weight is).
        scales: layer name -> stored scale; layers without one are not in it.
        device: where to quantise; weights stay where they are.
        shares: layer name -> its key, see ``share_keys``.
        done: called after each of these layers.
        activations: layer name -> what follows it, see ``linear_fused.activations``.
    """

    roles: Mapping[str, str]
    scales: Mapping[str, torch.Tensor]
    device: torch.device
    shares: Mapping[str, str] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None
    activations: Mapping[str, str] = field(default_factory=dict)


def why_no_fp8_load() -> str | None:
    """Why this ComfyUI can't keep weights as FP8 rows, or None."""
    if linear_layout.is_available() or _patches_convert():
        return None
    return (
        "this ComfyUI merges LoRAs in a way that is between two others; FP8 at load needs ComfyUI "
        "0.7 or newer, or 0.3.64 to 0.3.75"
    )


def fp8_operations(weights: FP8Weights):
    """A class of operations for ``load_diffusion_model_state_dict``; its Linears use ``weights``."""
    import comfy.ops

    base = _TensorLinear if linear_layout.is_available() else _CodesLinear
    known = inspect.signature(comfy.ops.cast_bias_weight).parameters
    options = {"want_requant": True} if "want_requant" in known else {}

    class Operations(comfy.ops.manual_cast):
        class Linear(base, comfy.ops.manual_cast.Linear):
            fp8_weights = weights
            cast_options = options

    return Operations


def fp8_rows(module) -> QuantizedRows | None:
    """The rows that ``module`` keeps, as they are now; None for any other layer."""
    return module.rows() if getattr(module, "is_hopper_sol_fp8", False) else None


def _patches_convert() -> bool:
    """Whether a LoRA of a layer off the device goes through convert_weight and set_weight."""
    from comfy.model_patcher import LowVramPatch

    return "convert_func" in LowVramPatch.__call__.__code__.co_names


class _Linear:
    """What both ages have in common. Stands before ComfyUI's Linear in the order of bases.

    Attributes:
        is_hopper_sol_fp8: the weight is FP8 rows; decided when it is loaded.
        computes: the product is FP8 as well; otherwise the weight is widened for it.
        source: format that the weight had in the file, in words.
        share: see ``share_keys``. activation: see ``linear_fused.activations``.
        seed: of rounding after a LoRA; from the name of the weight, as ComfyUI derives it, so that
            a LoRA is rounded the same way wherever it is applied.
        rows_are_in: (store of the module, name in it) of every tensor that belongs to the rows.
        cast_options: of ComfyUI's cast_bias_weight.
    """

    fp8_weights: FP8Weights
    cast_options: dict
    rows_are_in: tuple = (("_parameters", "weight"),)
    is_hopper_sol_fp8 = False
    computes = False
    source = ""
    share = ""
    activation = ""
    seed = 0

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight_comfy_model_dtype = self.bias_comfy_model_dtype = dtype or torch.float32
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if bias:
            empty = torch.empty(out_features, device=device, dtype=dtype)
            self.bias = torch.nn.Parameter(empty, requires_grad=False)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
    ):
        key = prefix + "weight"
        shape = (self.out_features, self.in_features)
        weight = state_dict.pop(key, None)
        missing = weight is None
        if missing:
            weight = torch.zeros(shape)
        if tuple(weight.shape) != shape:
            errors.append(f"size mismatch for {key}: got {tuple(weight.shape)}, need {shape}")
            return
        self._take(prefix[:-1], weight, local_metadata.get("assign_to_params_buffers", False))
        # The bias. PyTorch misses the weight, too, which is no longer in the dict.
        absent = []
        torch.nn.Module._load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, absent, unexpected_keys, errors
        )
        missing_keys += [name for name in absent if name != key or missing]

    def _take(self, name: str, weight: torch.Tensor, assign: bool) -> None:
        """Keep ``weight`` of layer ``name``; as it is in memory where ComfyUI wants that."""
        weights, scale = self.fp8_weights, self.fp8_weights.scales.get(name)
        role = weights.roles.get(name)
        if role == STORE or (role == COMPUTE and why_not_shape(self) is None):
            self.source = _words(weight.dtype, scale)
            self._keep(_rows_on(weights.device, weight, scale))
            self.seed = zlib.crc32(f"diffusion_model.{name}.weight".encode())
            self.share = weights.shares.get(name, "")
            self.activation = weights.activations.get(name, "")
            self.is_hopper_sol_fp8, self.computes = True, role == COMPUTE
            weights.done()
            return
        dtype = self.weight_comfy_model_dtype
        if scale is not None:
            weight = plain_weight(weight, scale, dtype)
        elif not assign or weight.dtype in FP8:
            weight = weight.to(dtype, copy=True)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, input, *args, **kwargs):
        if not self.is_hopper_sol_fp8:
            return super().forward(input, *args, **kwargs)
        _run_every_op()
        if torch.is_grad_enabled() and input.requires_grad:  # the FP8 Linear has no backward pass
            return self._forward_plain(input)
        return handed_out(self._forward_rows(input), self.activation)

    def _forward_plain(self, input):
        codes, scale = (tensor.to(input.device) for tensor in self.rows())
        bias = None if self.bias is None else self.bias.to(input)
        weight = dequantize_rows(codes, scale, input.dtype)
        return torch.nn.functional.linear(input, weight, bias)

    def _product(self, input, codes, scale, bias):
        if self.computes:
            return stored_linear(input, codes, scale, bias, self.share)
        return widened_linear(input, codes, scale, bias)

    def _patched_product(self, input, weight, bias):
        if self.computes:
            return patched_rows_linear(input, weight, bias, self.seed, self.share)
        return torch.nn.functional.linear(input, weight, bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if not self.is_hopper_sol_fp8:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        # For ComfyUI's own "save" nodes. The format is one that no loader but ours takes: others
        # expect one scale a layer.
        codes, scale = self.rows()
        settings = json.dumps({"format": ROWS_FORMAT}).encode()
        destination[prefix + "weight"] = codes.detach()
        destination[prefix + "weight_scale"] = scale
        destination[prefix + "comfy_quant"] = torch.tensor(list(settings), dtype=torch.uint8)
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _apply(self, fn, recurse=True):
        """Moves: the rows keep their types, whatever the rest of the model is cast to."""
        if not self.is_hopper_sol_fp8:
            return super()._apply(fn, recurse)
        places = [(getattr(self, store), name) for store, name in self.rows_are_in]
        kept = [store[name] for store, name in places]
        for store, name in places:
            store[name] = None
        super()._apply(fn, recurse)
        for (store, name), tensor in zip(places, kept, strict=True):
            store[name] = None if tensor is None else self._moved(fn, tensor)
        return self


class _TensorLinear(_Linear):
    """ComfyUI 0.7 and newer: the weight is a QuantizedTensor."""

    def rows(self) -> QuantizedRows:
        return QuantizedRows(self.weight._qdata, self.weight._params.scale)

    def _keep(self, rows: QuantizedRows) -> None:
        tensor = linear_layout.quantized_tensor(rows, self.weight_comfy_model_dtype)
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)

    def _forward_rows(self, input):
        import comfy.ops

        weight, bias, stream = comfy.ops.cast_bias_weight(
            self,
            dtype=self.weight.dtype,
            device=input.device,
            bias_dtype=input.dtype,
            compute_dtype=input.dtype,
            offloadable=True,
            **self.cast_options,
        )
        try:
            if hasattr(weight, "_qdata"):
                return self._product(input, weight._qdata, weight._params.scale, bias)
            return self._patched_product(input, weight, bias)
        finally:
            comfy.ops.uncast_bias_weight(self, weight, bias, stream)

    # ComfyUI merges a LoRA into convert_weight(weight) and hands the sum to set_weight.
    def convert_weight(self, weight, inplace=False, **rest):
        return weight.dequantize() if hasattr(weight, "_qdata") else weight

    def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **rest):
        if self.is_hopper_sol_fp8:
            rows = stochastic_rows(weight, seed or self.seed)
            weight = linear_layout.quantized_tensor(rows, self.weight.dtype)
        else:
            weight = weight.to(self.weight.dtype)
        if return_weight:
            return weight
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        return None

    def _moved(self, fn, tensor):
        moved = fn(tensor)
        if not torch.is_inference_mode_enabled() and moved.is_inference():
            moved = moved.clone()
        return torch.nn.Parameter(moved, requires_grad=False)


class _CodesLinear(_Linear):
    """ComfyUI up to 0.3.75: the weight is the codes.

    Attributes:
        row_scale: (N, 1) FP32 of the weight as it was loaded.
        merged_scale: the same of a weight that a LoRA was merged into; None while there is none.
    """

    rows_are_in = (
        ("_parameters", "weight"),
        ("_buffers", "row_scale"),
        ("_buffers", "merged_scale"),
    )

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("row_scale", None, persistent=False)
        self.register_buffer("merged_scale", None, persistent=False)

    def register_parameter(self, name, param):
        super().register_parameter(name, param)
        if name == "weight" and "merged_scale" in self._buffers:
            # Whoever puts a weight here puts back the one that ComfyUI saved.
            self.merged_scale = None

    def rows(self) -> QuantizedRows:
        merged = self.merged_scale
        return QuantizedRows(self.weight, self.row_scale if merged is None else merged)

    def _keep(self, rows: QuantizedRows) -> None:
        self.weight = torch.nn.Parameter(rows.codes, requires_grad=False)
        self.row_scale = rows.scale

    def _forward_rows(self, input):
        import comfy.ops

        # Without a LoRA to apply this gives the codes; with one, what set_weight returned.
        weight, bias = comfy.ops.cast_bias_weight(
            self, dtype=E4M3, device=input.device, bias_dtype=input.dtype
        )
        if weight.dtype == E4M3:
            return self._product(input, weight, self.rows().scale.to(weight.device), bias)
        return self._patched_product(input, weight.to(input.dtype), bias)

    def convert_weight(self, weight, inplace=False, **rest):
        if not self.is_hopper_sol_fp8:
            return weight
        return weight * self.rows().scale.to(device=weight.device, dtype=weight.dtype)

    def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **rest):
        if return_weight:  # for one use: our forward rounds it
            return weight
        if self.is_hopper_sol_fp8:
            rows = stochastic_rows(weight, seed or self.seed)
            self.weight = torch.nn.Parameter(rows.codes, requires_grad=False)
            self.merged_scale = rows.scale
        else:
            weight = weight.to(self.weight.dtype)
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
        return None

    def _moved(self, fn, tensor):
        moved = fn(tensor)
        moved = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        if moved is tensor or not isinstance(tensor, torch.nn.Parameter):
            return moved
        return torch.nn.Parameter(moved, requires_grad=False)


def _rows_on(device: torch.device, weight: torch.Tensor, scale) -> QuantizedRows:
    """``row_weight`` on ``device``, or where the weight is if no memory is left there."""
    try:
        return row_weight(weight, scale, device)
    except torch.cuda.OutOfMemoryError:
        return row_weight(weight, scale)


def _run_every_op() -> None:
    """ComfyUI's check for Cancel, where it has one."""
    import comfy.ops

    getattr(comfy.ops, "run_every_op", lambda: None)()


def _words(dtype: torch.dtype, scale) -> str:
    name = str(dtype).removeprefix("torch.")
    if dtype not in FP8:
        return name
    return f"{'raw' if scale is None else 'scaled'} {name}"
