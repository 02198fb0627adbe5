"""What an op of the bench is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Declined(Exception):
    """Why a contender does not take part; the text stands in the row as it is."""


@dataclass(frozen=True)
class Option:
    """One setting of a job that a person may give a list of.

    Attributes:
        default: value, or None for "not given".
        kind: str, int or float.
        allowed: the values it may have; empty for any.
        limits: smallest and largest number.
        help: one line.
    """

    default: Any
    kind: type
    help: str
    allowed: tuple[str, ...] = ()
    limits: tuple[float, float] | None = None

    def read(self, name: str, value: Any) -> Any:
        """``value`` as ``kind``; raises ValueError that says what is allowed."""
        try:
            if isinstance(value, bool) or (self.kind is int and isinstance(value, float)):
                raise ValueError
            value = self.kind(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: got {value!r}, need {self.describe()}") from None
        if self.allowed and value not in self.allowed:
            raise ValueError(f"{name}: got {value!r}, need {self.describe()}")
        if self.limits and not self.limits[0] <= value <= self.limits[1]:
            raise ValueError(f"{name}: got {value!r}, need {self.describe()}")
        return value

    def describe(self) -> str:
        """What is allowed, in words."""
        if self.allowed:
            return f"one of {', '.join(self.allowed)}"
        what = {int: "an integer", float: "a number", str: "text"}[self.kind]
        return f"{what} in {self.limits[0]:g} .. {self.limits[1]:g}" if self.limits else what


@dataclass(frozen=True)
class Gate:
    """Result of comparing a contender with the reference.

    Attributes:
        ok: whether its times may be shown.
        fields: what goes into the row: rel_l2, gate (what was compared), ...
        reason: what failed, with the bound; None if nothing did.
    """

    ok: bool
    fields: Mapping[str, Any]
    reason: str | None = None


@dataclass
class Contender:
    """One backend or peer in one job.

    Attributes:
        check: runs it and compares by value.
        stages: callables to time, by the row field they fill without its "_ms"; "total" always,
            parts of it where the backend exposes them. Made only after the gate.
    """

    check: Callable[[], Gate]
    stages: Callable[[], Mapping[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Job:
    """Contenders that share their inputs and are timed in turn.

    Attributes:
        op: name of the op.
        settings: one value for every option of the op, "case" included.
        contenders: (backend or peer, precision).
    """

    op: str
    settings: Mapping[str, Any]
    contenders: tuple[tuple[str, str], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


class Op(Protocol):
    """One op that the bench measures. Instances live for one run and may keep the last inputs."""

    name: str
    options: Mapping[str, Option]
    precisions: tuple[str, ...]
    fields: tuple[str, ...]  # of a row, in their order
    table: tuple[str, ...]  # fields of the table on the terminal

    def backends(self, device: torch.device) -> tuple[str, ...]:
        """Own backends that "all" means on ``device``."""

    def known_backends(self) -> tuple[str, ...]:
        """Own backends that may be named."""

    def read_extra(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Checked settings of an entry's "config"; raises ValueError."""

    def base_row(self, job: Job) -> dict[str, Any]:
        """Fields that are known before anything runs."""

    def describe_inputs(self, job: Job, device: torch.device) -> dict[str, Any]:
        """Makes the inputs of ``job``; fields that follow from them."""

    def contender(self, job: Job, backend: str, precision: str, device: torch.device) -> Contender:
        """Raises Declined, or whatever else stands in the way: it becomes the row's error."""

    def derived(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that follow from measured times."""
