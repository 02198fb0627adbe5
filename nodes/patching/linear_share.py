"""One quantised activation for Linears that are handed the same tensor: q, k and v of attention.

Which layers those are is known by name. Within a sampler run the first of them quantises, and the
others of the same block take its rows if they are handed the very same tensor. Nothing else is
assumed: a layer that comes a second time, or with another tensor, quantises for itself.
"""

import threading
import weakref
from collections.abc import Callable, Iterable

import torch

from ...kernels import QuantizedRows

# Layers of a block that a model calls one after another, with nothing in between that could change
# their input. For models with one Linear for all three there is nothing to share.
_TOGETHER = (
    ("self_attn.q", "self_attn.k", "self_attn.v"),
    ("cross_attn.k", "cross_attn.v"),
    ("cross_attn.k_img", "cross_attn.v_img"),
)


def share_keys(names: Iterable[str]) -> dict[str, str]:
    """{"blocks.0.self_attn.k": "blocks.0/0/3/k"}: key of every layer that shares with others.

    Args:
        names: of the layers that run in FP8, "blocks.N.part".
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        block, part = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        for index, together in enumerate(_TOGETHER):
            if part in together:
                groups.setdefault(f"{block}/{index}", []).append(name)
    return {
        name: f"{group}/{len(members)}/{name.rpartition('.')[2]}"
        for group, members in groups.items()
        if len(members) > 1
        for name in members
    }


class SharedRows:
    """The last shared activation of a sampler run, on each device. Safe to call from threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._slots: dict[torch.device, _Slot] = {}

    def rows(
        self, x: torch.Tensor, key: str, backend: str, quantize: Callable[[], QuantizedRows]
    ) -> QuantizedRows:
        """Rows of ``x`` for the layer with ``key``; ``quantize()`` makes them where none fit."""
        group, _, rest = key.rpartition("/")
        with self._lock:
            slot = self._slots.get(x.device)
            if slot is not None and slot.fits(x, group, rest, backend):
                slot.members.add(rest)
                if len(slot.members) == slot.size:  # nobody else will ask: free the memory
                    del self._slots[x.device]
                return slot.rows
            self._slots.pop(x.device, None)
        rows = quantize()
        with self._lock:
            self._slots[x.device] = _Slot(x, group, rest, backend, rows)
        return rows

    def clear(self, device: torch.device) -> None:
        """Let go of what is kept on ``device``: a layer that does not share has come."""
        if device in self._slots:
            with self._lock:
                self._slots.pop(device, None)


class _Slot:
    """Rows of one tensor, and which layers have had them."""

    def __init__(self, x, group, member, backend, rows):
        # Not the tensor itself: whether it is still the caller's is part of the question.
        self.tensor = weakref.ref(x)
        self.version = _version(x)
        self.group, self.backend, self.rows = group, backend, rows
        self.members = {member}
        self.size = int(group.rpartition("/")[2])

    def fits(self, x, group, member, backend) -> bool:
        return (
            self.tensor() is x
            and self.version == _version(x)
            and (self.group, self.backend) == (group, backend)
            and member not in self.members
        )


def _version(x: torch.Tensor) -> int | None:
    """How often ``x`` was written in place; not counted in inference mode."""
    return None if x.is_inference() else x._version
