"""Tensors that are computed when somebody looks at them, so that an FP8 Linear can look first.

A model computes an activation, or a norm and its modulation, and hands the result to a Linear, which
rounds it to FP8. One kernel can do both in one pass over memory, but the model asks for one after
the other. So the first is put off: the model is handed a tensor that knows how to compute itself. An
FP8 Linear takes the recipe. Anybody else who touches it in any way has it computed, by the model's
own operation, and goes on with an ordinary tensor.

    Marked    output of a Linear that an activation follows; an ordinary tensor but for that
    Half      gate or up of a Marked one, for SwiGLU
    Pending   what is not computed yet: shape, dtype and device, and a recipe in place of memory

Marks never spread: whatever is done to a marked tensor but its activation takes the mark away.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import gelu, linear, silu
from torch.utils._pytree import tree_map

from ...kernels import QuantizedRows, quantize_gelu, quantize_norm, quantize_swiglu

GELU, SWIGLU, NORM = "gelu", "swiglu", "norm"


def mark(x: torch.Tensor, activation: str) -> torch.Tensor:
    """``x``, the same memory, as a tensor whose ``activation`` is put off.

    Args:
        x: (..., K), contiguous. activation: GELU, or SWIGLU over gate and up side by side.
    """
    marked = x.as_subclass(Marked)
    marked.source = _Source(x, activation)
    return marked


def pending_norm(x: torch.Tensor, eps: float, forward: Callable) -> "Pending":
    """The result of ``forward(x)``, a LayerNorm without weights over the last dimension, put off.

    Args:
        x: (..., K), any strides; not written to while the result is in use.
    """
    return Pending(Norm(x, eps, forward))


def computed(x: torch.Tensor) -> torch.Tensor:
    """``x`` as an ordinary tensor: computed if it is Pending, without a mark."""
    if type(x) is Pending:
        return x.value()
    if type(x) is Marked or type(x) is Half:
        x.source.touched()
        # In place: whoever else holds it holds an ordinary tensor now.
        del x.source
        vars(x).pop("index", None)
        x.__class__ = torch.Tensor
    return x


def fused_kind(x: torch.Tensor) -> str:
    """What an FP8 Linear can compute along with the rounding of ``x``; "" for nothing."""
    return x.recipe.fused if type(x) is Pending and x.recipe is not None else ""


@dataclass(frozen=True, eq=False)
class Silu:
    """silu of the gate: a step on the way to SwiGLU, nothing of its own."""

    source: "_Source"
    fused = ""

    @property
    def like(self):
        return self.source.x, (*self.source.x.shape[:-1], self.source.x.shape[-1] // 2)

    def compute(self):
        return silu(self.source.x.chunk(2, dim=-1)[0])


@dataclass(frozen=True, eq=False)
class Activation:
    """GELU (tanh) of x (..., K), or SwiGLU of x (..., 2 K)."""

    x: torch.Tensor
    fused: str

    @property
    def like(self):
        columns = self.x.shape[-1]
        return self.x, (*self.x.shape[:-1], columns // 2 if self.fused == SWIGLU else columns)

    def compute(self):
        if self.fused == GELU:
            return gelu(self.x, approximate="tanh")
        gate, up = self.x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def quantize(self, backend):
        return (quantize_gelu if self.fused == GELU else quantize_swiglu)(self.x, backend=backend)


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm of x (..., K) without weights: a step on the way to Modulated."""

    x: torch.Tensor
    eps: float
    forward: Callable
    fused = ""

    @property
    def like(self):
        return self.x, self.x.shape

    def compute(self):
        return self.forward(self.x)


@dataclass(frozen=True, eq=False)
class Modulated:
    """shift + norm factor, one operation; factor is 1 + scale as the model has rounded it."""

    norm: Norm
    shift: torch.Tensor
    factor: torch.Tensor
    fused = NORM

    @property
    def like(self):
        return self.norm.like

    def compute(self):
        return torch.addcmul(self.shift, self.norm.compute(), self.factor)

    def quantize(self, backend):
        return quantize_norm(
            self.norm.x,
            eps=self.norm.eps,
            scale=self.factor,
            shift=self.shift,
            scale_has_one=True,
            backend=backend,
        )


class _Source:
    """What Marked, its Halves and what was made of them have in common.

    Attributes:
        x: the marked tensor, under its own class.
        live: nobody has touched it; otherwise somebody may hold a view of it and write there.
    """

    def __init__(self, x: torch.Tensor, activation: str):
        self.x, self.activation = x, activation
        self.live = True
        self._pending: list[weakref.ref] = []

    def pending(self, recipe) -> "Pending":
        made = Pending(recipe)
        self._pending.append(weakref.ref(made))
        return made

    def touched(self) -> None:
        """Somebody does something to the memory of ``x``: what depends on it comes first."""
        self.live = False
        for reference in self._pending:
            made = reference()
            if made is not None:
                made.value()
        self._pending.clear()


class _Seen(torch.Tensor):
    """Base of the three: sends every use of them to ``_used``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _used(func, types, args, kwargs or {})


class Marked(_Seen):
    """Output of a Linear that an activation follows. ``source``: see _Source."""

    # Nothing to dispatch below: it is an ordinary tensor there.
    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl


class Half(_Seen):
    """A half of a Marked tensor's columns. ``source``: the whole's. ``index``: 0 gate, 1 up."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl


class Pending(_Seen):
    """A tensor that is not computed yet.

    Attributes:
        recipe: how to; None once it is.
    """

    @staticmethod
    def __new__(cls, recipe):
        x, shape = recipe.like
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)

    def __init__(self, recipe):
        self.recipe = recipe
        self._value = None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Callers in C++, and those that switched the way above off.
        return func(*tree_map(computed, args), **tree_map(computed, kwargs or {}))

    def value(self) -> torch.Tensor:
        """The tensor itself: computed once, then the one that everybody has."""
        if self.recipe is not None:
            self._value = self.recipe.compute()
            self.recipe = None  # what it was made of may go
        return self._value

    def quantize(self, backend: str) -> QuantizedRows:
        """Rows of what ``value()`` would be; nothing else is computed. Needs ``fused_kind``."""
        return self.recipe.quantize(backend)


def is_fusible(x: torch.Tensor) -> bool:
    """Whether ``x`` has a ``fused_kind``; never while torch.compile traces."""
    return not torch.compiler.is_compiling() and fused_kind(x) != ""


def _used(func, types, args, kwargs):
    """``func(*args, **kwargs)``, one of whose arguments is of a class of ours."""
    if func in _LOOKS:
        first = args[0] if args else None
        if type(first) is Pending and first.recipe is None:
            args = (first.value(), *args[1:])  # its size may have been changed in place
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _PUT_OFF:
        out = _PUT_OFF[func](types, args, kwargs)
        if out is not None:
            return out
    return func(*tree_map(computed, args), **tree_map(computed, kwargs))


# Each of these stands for an operation and returns None where the call is not exactly what a model
# does, or has been touched by others.


def _gelu(types, args, kwargs):
    (x, *rest) = args or (None,)
    if type(x) is Marked and not rest and kwargs == {"approximate": "tanh"} and _awaits(x, GELU):
        return x.source.pending(Activation(x.source.x, GELU))
    return None


def _chunk(types, args, kwargs):
    (x, *rest) = args or (None,)
    if type(x) is not Marked or not _awaits(x, SWIGLU):
        return None
    if [*rest, *kwargs.values()] != [2, -1] or not {*kwargs} <= {"dim"}:
        return None
    halves = tuple(half.as_subclass(Half) for half in x.source.x.chunk(2, dim=-1))
    for index, half in enumerate(halves):
        half.source, half.index = x.source, index
    return halves


def _silu(types, args, kwargs):
    (x, *rest) = args or (None,)
    if type(x) is Half and not rest and kwargs == {"inplace": False}:
        return x.source.pending(Silu(x.source)) if x.index == 0 and x.source.live else None
    return None


def _times(types, args, kwargs):
    if not _is_swiglu(args, kwargs):
        return None
    source = args[1].source
    return source.pending(Activation(source.x, SWIGLU))


def _times_in_place(types, args, kwargs):
    if not _is_swiglu(args, kwargs):
        return None
    args[0].recipe = Activation(args[1].source.x, SWIGLU)
    return args[0]


def _addcmul(types, args, kwargs):
    if len(args) != 3 or kwargs:
        return None
    shift, norm, factor = args
    recipe = norm.recipe if type(norm) is Pending else None
    if type(recipe) is not Norm or not (_fits(shift, recipe.x) and _fits(factor, recipe.x)):
        return None
    return Pending(Modulated(recipe, shift, factor)) if shift.shape == factor.shape else None


def _linear(types, args, kwargs):
    x = args[0] if args else kwargs.get("input")
    if type(x) is Pending and any(getattr(kind, "takes_pending", False) for kind in types):
        return NotImplemented  # the weight's own class is asked next
    return None


def _awaits(x, activation: str) -> bool:
    return x.source.live and x.source.activation == activation


def _is_swiglu(args, kwargs) -> bool:
    """Whether these are silu(gate) and up of one tensor."""
    if len(args) != 2 or kwargs:
        return False
    product, up = args
    recipe = product.recipe if type(product) is Pending else None
    if type(recipe) is not Silu or type(up) is not Half or up.index != 1:
        return False
    return up.source is recipe.source and up.source.live


def _fits(table, x) -> bool:
    """Whether ``table`` is a modulation of ``x`` (..., K) that ``quantize_norm`` reads in place.

    One row for all of x, one for each row, or one for every row of x's first dimensions.
    """
    if type(table) not in (torch.Tensor, torch.nn.Parameter) or table.dtype != x.dtype:
        return False
    if table.device != x.device or (torch.is_grad_enabled() and table.requires_grad):
        return False
    if table.dim() != x.dim() or table.shape[-1] != x.shape[-1] or table.stride(-1) != 1:
        return False
    given, rows = table.shape[:-1], x.shape[:-1]
    same = next((i for i, (a, b) in enumerate(zip(given, rows, strict=True)) if a != b), len(rows))
    if any(size != 1 for size in given[same:]):
        return False
    # Rows that follow each other at one distance: a view, where a copy could be as large as x.
    steps = [(n, step) for n, step in zip(given, table.stride(), strict=False) if n > 1]
    return all(a[1] == b[0] * b[1] for a, b in pairwise(steps))


_GETTERS = (
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_nested",
    "is_quantized", "is_sparse", "is_leaf", "requires_grad", "grad_fn", "_version",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "get_device", "__len__",
)  # fmt: skip
# What does not read or write the numbers.
_LOOKS = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
    | {getattr(torch.Tensor, name) for name in _METHODS}
    | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference}
)
_PUT_OFF = {
    gelu: _gelu,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    silu: _silu,
    torch.mul: _times,
    torch.Tensor.mul: _times,
    torch.Tensor.__mul__: _times,
    torch.Tensor.mul_: _times_in_place,
    torch.addcmul: _addcmul,
    linear: _linear,
}
