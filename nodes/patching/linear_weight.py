"""A weight that runs in FP8 wherever a Linear uses it, and is itself everywhere else.

ComfyUI hands a layer's weight, on the device and with its LoRAs applied, through the functions on
that weight and then to ``F.linear``. Ours returns the same memory under a tensor class that catches
that one call. Whatever else happens to the weight, such as a LoRA that comes after us, sees the
weight as it is.
"""

import torch
from torch.nn.functional import linear

from .linear_deferred import is_fusible
from .linear_run import compute, handed_out

# Results of these are still the layer's weight: ComfyUI of 2025 multiplies by a stored scale.
_STILL_A_WEIGHT = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__})


class FP8Weight(torch.Tensor):
    """A weight (N, K) that is quantised when a Linear uses it.

    ``grid``, ``share`` and ``activation`` belong to the class, because torch.compile follows classes
    but not the attributes of tensors that it makes: see ``weight_function``.
    """

    grid: float | None = None
    share: str = ""
    activation: str = ""
    takes_pending = True
    # Nothing to dispatch below: torch.compile traces classes that say so.
    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is linear:
                return _fp8_linear(cls, *args, **kwargs)
            out = func(*args, **kwargs)
            if func in _STILL_A_WEIGHT:
                out = out.as_subclass(FP8Weight)
            return out


def weight_function(grid: float | None, share: str = "", activation: str = ""):
    """A function for ModelPatcher.add_weight_wrapper.

    ``share``: see ``share_keys``. ``activation``: see ``linear_fused.activations``.

    A plain function: ComfyUI looks for further attributes on objects. It keeps nothing of the
    model, so that one that stays on a module serves every clone alike.
    """
    # torch.compile has to find the class in a closure.
    own = {"grid": grid, "share": share, "activation": activation}
    plain = grid is None and not share and not activation
    kind = FP8Weight if plain else type("FP8Weight", (FP8Weight,), own)

    def fp8_weight(weight):
        return weight.as_subclass(kind)

    fp8_weight.is_hopper_sol = True
    return fp8_weight


def is_weight_function(function) -> bool:
    """Whether ``function`` came from ``weight_function``."""
    return getattr(function, "is_hopper_sol", False)


def _trains(input, weight) -> bool:
    """The FP8 Linear has no backward pass."""
    return torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)


def _fp8_linear(kind, input, weight, bias=None):
    takes_it = isinstance(weight, FP8Weight) and input.dtype in _FLOATS
    if not takes_it or _trains(input, weight):
        return linear(input, weight, bias)
    # Outside of the op, which would have a pending tensor computed.
    forward = _forward if is_fusible(input) else _patched_linear
    out = forward(input, weight, bias, kind.grid, kind.share)
    return handed_out(out, kind.activation)


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


# One op for the whole layer: quantising the weight, counting and falling back happen when it runs
# and not when torch.compile traces it.
def _forward(x, weight, bias, grid, share):
    return compute(x, weight.as_subclass(torch.Tensor), bias, grid, share)


_patched_linear = torch.library.custom_op(
    "hopper_sol::patched_linear",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, float? grid, str share) -> Tensor",
)


@_patched_linear.register_fake
def _fake(x, weight, bias, grid, share):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
