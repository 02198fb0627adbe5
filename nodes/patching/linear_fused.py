"""Which layers can compute what stands in front of a Linear along with the rounding of its input.

Known by name, as with layers that share an activation (``linear_share.py``): the model computes what
it always did, and what is put off is decided by what it really calls (``linear_deferred.py``).
"""

import copy
from collections.abc import Iterable
from functools import lru_cache

import torch

from .linear_deferred import GELU, SWIGLU, pending_norm
from .linear_run import defers_norm

PREFIX = "diffusion_model."
# First Linear -> activation behind it, Linear behind that.
_ACTIVATIONS = {"ffn.0": (GELU, "ffn.2"), "mlp.fc1": (SWIGLU, "mlp.fc2")}
# Norm without weights -> Linears that get its result, modulated in one operation, and nobody else.
# MiniMax-H3 writes its modulation over the norm's result, segment by segment: nothing to put off.
_NORMS = {"norm1": ("self_attn.q", "self_attn.k", "self_attn.v"), "norm2": ("ffn.0",)}


def activations(names: Iterable[str]) -> dict[str, str]:
    """{"blocks.0.ffn.0": "gelu"}: activation behind each layer whose next Linear is FP8 as well.

    Args:
        names: of the layers that run in FP8, "blocks.N.part".
    """
    names = set(names)
    found = {}
    for name in names:
        block, part = _split(name)
        activation, following = _ACTIVATIONS.get(part, (None, None))
        if f"{block}.{following}" in names:
            found[name] = activation
    return found


def norms(names: Iterable[str]) -> list[str]:
    """["blocks.0.norm1"]: norms of the blocks whose readers are all among ``names``."""
    names = set(names)
    blocks = dict.fromkeys(_split(name)[0] for name in sorted(names))
    return [
        f"{block}.{norm}"
        for block in blocks
        for norm, readers in _NORMS.items()
        if all(f"{block}.{reader}" in names for reader in readers)
    ]


def defer_norms(model, names: Iterable[str]) -> None:
    """Object patches on ``model``, a clone of ours, for the ``norms`` of ``names``.

    One that another pack has replaced is left to it, and one that it replaces later is its own.
    """
    taken = getattr(model, "object_patches", {})
    for name in norms(names):
        key = PREFIX + name
        if any(other == key or other.startswith(key + ".") for other in taken):
            continue
        try:
            deferred = deferred_norm(model.get_model_object(key))
        except AttributeError:
            continue
        if deferred is not None:
            model.add_object_patch(key, deferred)


def deferred_norm(module):
    """``module`` as one whose result may be put off, or None if it is no LayerNorm without weights.

    A copy that shares everything with ``module``, hooks and settings, but its class.
    """
    if not isinstance(module, torch.nn.LayerNorm) or isinstance(module, _Deferred):
        return None
    plain = module.weight is None and module.bias is None and len(module.normalized_shape) == 1
    if not plain or "forward" in vars(module):
        return None
    deferred = copy.copy(module)
    deferred.__class__ = _deferred_class(type(module))
    return deferred


class _Deferred:
    """Stands before a LayerNorm's own class."""

    def forward(self, x, *args, **kwargs):
        forward = super().forward
        # A hook may do anything with the result and what it came from.
        if args or kwargs or self._forward_hooks or not defers_norm(x):
            return forward(x, *args, **kwargs)
        return pending_norm(x, self.eps, forward)


@lru_cache(maxsize=16)
def _deferred_class(kind: type) -> type:
    return type(kind.__name__, (_Deferred, kind), {})


def _split(name: str) -> tuple[str, str]:
    """("blocks.0", "ffn.0") of "blocks.0.ffn.0"."""
    kind, index, part = name.split(".", 2)
    return f"{kind}.{index}", part
