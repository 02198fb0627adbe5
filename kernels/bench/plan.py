"""From options or a plan file to jobs."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .base import Job, Op
from .ops import OPS
from .peers import PEER_PREFIX, PEERS

COMMON = ("op", "backend", "precision", "config")


def read_plan(path: Path) -> list[dict[str, Any]]:
    """Entries of a plan file; raises ValueError that names the file."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"plan {path.name}: {error}") from None
    if (
        not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
        or not entries
    ):
        raise ValueError(f"plan {path.name}: need a list of objects, at least one")
    return entries


def expand(entry: Mapping[str, Any], op: Op, device: torch.device) -> list[Job]:
    """All combinations of an entry's lists. Jobs that share inputs are neighbours.

    Raises:
        ValueError: an unknown option, value, case, backend or precision; names what is allowed.
    """
    unknown = set(entry) - {*COMMON, *op.options}
    if unknown:
        raise ValueError(
            f"{op.name}: no option {', '.join(sorted(unknown))}; "
            f"it has {', '.join([*COMMON[1:], *op.options])}"
        )
    values = {}
    for name, option in op.options.items():
        given = _listed(entry.get(name))
        if given == ["all"] and option.allowed:  # the tiny case measures nothing
            given = [value for value in option.allowed if value != "tiny"]
        values[name] = [option.read(name, v) for v in given] or [option.default]
    if "tau" in values and "density" in values:
        values = _tau_or_density(entry, values)
    contenders = tuple(_contenders(entry, op, device))
    extra = entry.get("config") or {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"config: got {extra!r}, need an object of names and values")
    extra = op.read_extra(extra)
    return [
        Job(op.name, dict(zip(values, combination, strict=True)), contenders, extra)
        for combination in itertools.product(*values.values())
    ]


def find_op(name: Any) -> type[Op]:
    """The class of op ``name``; raises ValueError."""
    if not isinstance(name, str) or name not in OPS:
        raise ValueError(f"op: got {name!r}, need one of {', '.join(OPS)}")
    return OPS[name]


def _tau_or_density(entry, values):
    # A density is a tau that is looked up; both at once would be two answers to one question.
    if _listed(entry.get("tau")) and _listed(entry.get("density")):
        raise ValueError("tau and density: got both, need one of them")
    if _listed(entry.get("density")):
        return {**values, "tau": [None]}
    return values


def _contenders(entry, op: Op, device):
    peers = PEERS.get(op.name, {})
    names = _listed(entry.get("backend")) or ["all"]
    known = [*op.known_backends(), *peers]
    precisions = _listed(entry.get("precision")) or [op.precisions[0]]
    for precision in precisions:
        if precision not in op.precisions:
            raise ValueError(
                f"precision: got {precision!r}, need one of {', '.join(op.precisions)}"
            )
    chosen: list[str] = []
    for name in names:
        if name == "all":
            chosen += [*op.backends(device), *peers]
        elif name in known:
            chosen.append(name)
        else:
            raise ValueError(f"backend: got {name!r}, {op.name} has {', '.join(known)}; or 'all'")
    for name in dict.fromkeys(chosen):
        # A peer has the precision it was written for.
        fixed = [peers[name].precision] if name.startswith(PEER_PREFIX) else precisions
        yield from ((name, precision) for precision in fixed)


def _listed(value) -> list:
    """A list of single values from one value, a list, or text with commas."""
    if value is None:
        return []
    items = value if isinstance(value, (list, tuple)) else [value]
    parts = []
    for item in items:
        parts += item.split(",") if isinstance(item, str) else [item]
    return [p.strip() if isinstance(p, str) else p for p in parts if p != ""]
