"""Ops and their backends: who can take a call, and why the others can't.

A backend is registered with data and rules only; its code is imported when it is first chosen,
so that a missing compiler costs nothing until somebody asks for it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import BackendUnavailable, UnknownBackend
from .requirements import Requirements

Rule = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: "reference", "triton", "sm90", ...
        load: imports and returns the implementation.
        requirements: conditions on device, dtype, platform and modules.
        rules: further conditions on a call, each returning a reason or None.
        auto_rules: conditions that only hold back the automatic choice (a backend that can run
            but would not pay); an explicit request ignores them.
        defaults: of a call, (config field, value) for fields that the caller may leave as None.
        native_dtypes: input dtypes computed as they are; others are cast to BF16, and stats say so.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    requirements: Requirements = field(default_factory=Requirements)
    rules: tuple[Rule, ...] = ()
    auto_rules: tuple[Rule, ...] = ()
    defaults: Callable[[Any], tuple[tuple[str, Any], ...]] = lambda call: ()
    native_dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16})

    def why_not(self, call: Any, *, automatic: bool = False) -> str | None:
        """Reason to decline ``call`` or None; cheap, touches no device, does not raise."""
        reason = self.requirements.why_not(call)
        rules = self.rules + (self.auto_rules if automatic else ())
        return reason or next((r for r in (rule(call) for rule in rules) if r), None)


_BACKENDS: dict[str, dict[str, Backend]] = {}


def register(op: str, backend: Backend) -> None:
    """Add ``backend`` to ``op``. Registration order is the order in which "auto" asks."""
    known = _BACKENDS.setdefault(op, {})
    if backend.name in known:
        raise ValueError(f"backend {backend.name!r} is already registered for {op}")
    known[backend.name] = backend


def list_backends(op: str) -> tuple[str, ...]:
    """Names of the backends of ``op``, preferred first."""
    return tuple(_BACKENDS.get(op, {}))


def get(op: str, name: str) -> Backend:
    """The backend called ``name``; raises UnknownBackend."""
    try:
        return _BACKENDS[op][name]
    except KeyError:
        raise UnknownBackend(op, name, list_backends(op)) from None


def select(
    op: str, call: Any, backend: str = "auto", exclude: frozenset[str] = frozenset()
) -> tuple[Backend, dict[str, str]]:
    """Choose a backend for ``call``.

    Args:
        op: name of the op.
        call: what rules and requirements look at.
        backend: "auto" or a name.
        exclude: names that "auto" passes over, such as one that failed before.

    Returns:
        The backend, and for "auto" the preferred ones that declined with their reasons.

    Raises:
        UnknownBackend: no such name.
        BackendUnavailable: the named backend, or every backend, declines.
    """
    if backend != "auto":
        chosen = get(op, backend)
        reason = chosen.why_not(call)
        if reason:
            raise BackendUnavailable(op, backend, {backend: reason})
        return chosen, {}
    declined: dict[str, str] = {}
    for candidate in _BACKENDS.get(op, {}).values():
        reason = candidate.why_not(call, automatic=True)
        if candidate.name in exclude:
            reason = "switched off after it failed"
        if reason is None:
            return candidate, declined
        declined[candidate.name] = reason
    raise BackendUnavailable(op, backend, declined)


def choose(
    op: str, call: Any, backend: str = "auto", exclude: frozenset[str] = frozenset()
) -> tuple[str, dict[str, str]]:
    """As ``select``, but the name of the backend only."""
    chosen, declined = select(op, call, backend, exclude)
    return chosen.name, declined


def why_not(op: str, call: Any, backend: str = "auto") -> str | None:
    """Why ``backend`` would decline ``call``; None if it would run. Touches no device.

    For "auto": the reasons of all backends, if every one of them declines.
    """
    try:
        select(op, call, backend)
    except BackendUnavailable as unavailable:
        return unavailable.reasons.get(backend) or unavailable.listed
    return None


def loaded(backend: Backend) -> Callable[..., Any]:
    """The implementation of ``backend``, imported once."""
    return _load(backend)


@functools.cache
def _load(backend: Backend) -> Callable[..., Any]:
    return backend.load()
