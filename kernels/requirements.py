"""What a backend needs, as data that can say why a call does not meet it."""

import importlib.util
import platform
from dataclasses import dataclass
from typing import Protocol

import torch

from .arch import DeviceFacts


class Call(Protocol):
    """The part of a call that requirements look at."""

    device: DeviceFacts
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class Requirements:
    """Necessary conditions of a backend. An empty set or None means "anything".

    Attributes:
        device_types: torch device types it runs on.
        min_capability: lowest CUDA compute capability, (major, minor).
        arch_major: exact CUDA major version, for architecture-specific code such as sm_90a.
        dtypes: input dtypes it takes.
        head_dims: head dimensions it takes.
        modules: importable modules it needs; looked up, not imported (of a dotted name, the
            parent packages are).
        systems: values of platform.system() it runs on.
    """

    device_types: frozenset[str] = frozenset()
    min_capability: tuple[int, int] | None = None
    arch_major: int | None = None
    dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] = frozenset()
    modules: tuple[str, ...] = ()
    systems: frozenset[str] = frozenset()

    def why_not(self, call: Call) -> str | None:
        """The first unmet condition in words, or None. Touches no device and does not raise."""
        device = call.device
        if self.systems and platform.system() not in self.systems:
            return f"needs {_listed(self.systems)}, this is {platform.system()}"
        if self.device_types and device.type not in self.device_types:
            return (
                f"needs a {_listed(self.device_types)} device, tensors are on {device.describe()}"
            )
        if self.min_capability or self.arch_major:
            if device.capability is None:
                return f"needs an NVIDIA GPU, tensors are on {device.describe()}"
            if self.min_capability and device.capability < self.min_capability:
                major, minor = self.min_capability
                return f"needs SM{major}{minor} or newer, this GPU is {device.describe()}"
            if self.arch_major and device.capability[0] != self.arch_major:
                return f"needs SM{self.arch_major}x, this GPU is {device.describe()}"
        if self.head_dims and call.head_dim not in self.head_dims:
            return f"needs head_dim {_listed(self.head_dims)}, got {call.head_dim}"
        if self.dtypes and call.dtype not in self.dtypes:
            return f"needs {_listed(self.dtypes)}, got {call.dtype}"
        for module in self.modules:
            if not _importable(module):
                return f"needs the Python module {module!r}, which is not installed"
        return None


def _listed(values) -> str:
    return " or ".join(sorted(str(value) for value in values))


def _importable(module: str) -> bool:
    # A parent package that is itself broken makes find_spec raise anything at all; a backend
    # whose module can't even be looked up is simply not there.
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        return False
