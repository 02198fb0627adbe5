"""Facts about a device that decide which backend can run on it."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """One device, described without allocating on it.

    Attributes:
        type: torch device type ("cpu", "cuda", "mps", ...).
        name: what a person calls it.
        capability: CUDA compute capability (major, minor); None off CUDA and on ROCm, whose
            numbers mean something else.
        is_rocm: a CUDA-typed device that is really an AMD one.
    """

    type: str
    name: str
    capability: tuple[int, int] | None = None
    is_rocm: bool = False

    def describe(self) -> str:
        """Words for messages: "NVIDIA H200 (SM90)", "cpu"."""
        if self.is_rocm:
            return f"{self.name} (ROCm)"
        if self.capability is not None:
            return f"{self.name} (SM{self.capability[0]}{self.capability[1]})"
        return self.name


@functools.lru_cache(maxsize=64)
def _facts(device_type: str, index: int) -> DeviceFacts:
    if device_type != "cuda":
        return DeviceFacts(device_type, device_type)
    name = torch.cuda.get_device_name(index)
    if torch.version.hip:
        return DeviceFacts(device_type, name, is_rocm=True)
    return DeviceFacts(device_type, name, tuple(torch.cuda.get_device_capability(index)))


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of ``device`` itself, never of whichever device happens to be current."""
    device = torch.device(device)
    if device.index is None and device.type == "cuda":
        return _facts(device.type, torch.cuda.current_device())
    return _facts(device.type, device.index or 0)
