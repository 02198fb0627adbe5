"""Writes a safetensors file tensor by tensor: nothing but the current one is in memory.

The file appears under its name when it is complete, or not at all.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
GIB = 2**30


@dataclass(frozen=True)
class Entry:
    """A tensor to write: what the header says of it, and a function that makes it when it is due."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: str,
    entries: Iterable[Entry],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
    done: Callable[[Entry], None] = lambda entry: None,
) -> int:
    """Write ``entries`` to ``path``, in their order; the size of the file in bytes.

    Args:
        entries: each has to begin at a multiple of its type's size, as readers map the file.
        metadata: texts for the header.
        overwrite: replace a file that is there; it stays whole until the new one is.
        done: called after each tensor; may raise, and then nothing is left behind.

    Raises:
        ValueError: the file exists, the folder can't be written to, or its disk is full; says
            which and what to do.
    """
    entries = list(entries)
    header = _header(entries, metadata)
    total = len(header) + sum(entry.nbytes for entry in entries)
    name, folder = os.path.basename(path), os.path.dirname(path) or "."
    if os.path.lexists(path) and not overwrite:
        raise ValueError(_exists(name))
    part = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        os.makedirs(folder, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < total:
            raise ValueError(_full(name, total, free))
        with open(part, "xb") as file:
            file.write(header)
            for entry in entries:
                _write(file, entry)
                done(entry)
            file.flush()
            os.fsync(file.fileno())
        _put(part, path, overwrite)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(_full(name, total, _free(folder))) from error
        raise ValueError(
            f"{name}: can't be written ({error.strerror or error}); check that ComfyUI may write "
            "to its output folder"
        ) from error
    finally:
        if os.path.lexists(part):
            os.unlink(part)
    return total


def _header(entries: list[Entry], metadata) -> bytes:
    """Length and JSON, padded so that the data starts on a multiple of 8 bytes."""
    described: dict = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        if start % entry.dtype.itemsize:
            raise ValueError(
                f"{entry.key}: begins at byte {start}, not a multiple of its type's size"
            )
        described[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file, entry: Entry) -> None:
    tensor = entry.make().detach().to("cpu").contiguous()
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise RuntimeError(
            f"{entry.key}: got {tensor.dtype} {tuple(tensor.shape)}, announced {entry.dtype} "
            f"{entry.shape}"
        )
    if entry.nbytes:
        file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))


def _put(part: str, path: str, overwrite: bool) -> None:
    """Give the finished file its name, in one step."""
    if overwrite:
        os.replace(part, path)
        return
    try:
        os.link(part, path)  # unlike a rename, fails if somebody else was faster
    except OSError as error:
        if os.path.lexists(path):
            raise ValueError(_exists(os.path.basename(path))) from error
        os.replace(part, path)  # a file system without links


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _exists(name: str) -> str:
    return f"{name}: exists already; choose another name, or set overwrite"


def _full(name: str, need: int, free: int) -> str:
    return (
        f"{name}: needs {need / GIB:.2f} GiB, the disk of the output folder has {free / GIB:.2f} GiB "
        "left; free some space, or start ComfyUI with --output-directory on another disk"
    )
