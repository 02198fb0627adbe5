"""From a kernel's description to its callable: memory, then disk, then the compiler."""

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import KernelBuildError
from .folder import candidate_folders
from .store import Entry, Store

log = logging.getLogger("hopper_sol")

FORMAT = 1  # of what is kept; another number makes every kept object another one
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = time.time()  # sources changed later may not be what this process imported


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be compiled.

    Attributes:
        name: letters, digits and underscores.
        build: imports the compiler and compiles with the options it is given. Only called if no
            compiled object is kept.
        sources: every file that decides what is generated.
        settings: what else does, such as the repr of a variant.
        arch: GPU architecture, "sm_90a".
        seconds: about how long it takes to compile.
    """

    name: str
    build: Callable[[str], Any]
    sources: tuple[Path, ...]
    settings: str = ""
    arch: str = "sm_90a"
    seconds: int = 5

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9_]+", self.name):
            raise ValueError(f"name: got {self.name!r}, need letters, digits and underscores")


class Toolchain(Protocol):
    """A compiler and a linker; every method may raise anything.

    Attributes:
        install: command that installs it.
    """

    install: str

    def identity(self) -> Mapping[str, str]:
        """What the compiled object depends on besides the kernel: versions, machine."""

    def compile(self, kernel: Kernel) -> bytes:
        """The object of ``kernel``."""

    def link(self, kernel: Kernel, data: bytes) -> Callable:
        """The callable of an object."""


class Kernels:
    """Kernels of this process, each made once."""

    def __init__(self, toolchain: Toolchain, store: Callable[[], Store]):
        self._toolchain = toolchain
        self._make_store = store
        self._store: Store | None = None
        self._ready: dict[tuple, Callable] = {}
        self._failed: dict[tuple, KernelBuildError] = {}
        self._told = False
        self._lock = threading.Lock()
        _renew_lock_after_fork(self)

    def load(self, kernel: Kernel) -> Callable:
        """The callable of ``kernel``; raises KernelBuildError."""
        known = (kernel.name, kernel.settings, kernel.arch, kernel.sources)
        ready = self._ready.get(known)
        if ready is not None:
            return ready
        # One at a time: compilers keep state of their own, and a second thread wants the result.
        with self._lock:
            if known in self._ready:
                return self._ready[known]
            if known in self._failed:
                first = self._failed[known]
                raise KernelBuildError(
                    first.kernel, first.what, first.reason, first.advice
                ) from first.__cause__
            try:
                self._ready[known] = self._make(kernel)
            except KernelBuildError as error:
                if not isinstance(error.__cause__, OSError | MemoryError):  # those may pass
                    self._failed[known] = error
                raise
            return self._ready[known]

    def _make(self, kernel: Kernel) -> Callable:
        if self._store is None:
            self._store = self._make_store()
        with self._failing(kernel, "find the compiler of"):
            entry = self._entry(kernel)
        if entry is None:
            log.info(
                "%s: its sources changed while this process ran, no kept object is used",
                kernel.name,
            )
            return self._compile(kernel, None)
        kept = self._kept(kernel, entry)
        if kept is not None:
            return kept
        with self._store.compiling(entry):
            # Another process may have had the lock before.
            return self._kept(kernel, entry) or self._compile(kernel, entry)

    def _kept(self, kernel: Kernel, entry: Entry) -> Callable | None:
        data = self._store.read(entry)
        if data is None:
            return None
        try:
            function = self._toolchain.link(kernel, data)
        except Exception as error:
            log.warning(
                "%s: the kept object can't be loaded and is made again: %s", kernel.name, error
            )
            self._store.discard(entry)
            return None
        log.debug("%s: loaded a kept object", kernel.name)
        return function

    def _compile(self, kernel: Kernel, entry: Entry | None) -> Callable:
        folder = self._store.writable_folder() if entry else None
        log.info(
            "compiling %s for %s, about %d s, %s",
            kernel.name,
            kernel.arch.rstrip("a").replace("_", "").upper(),
            kernel.seconds,
            f"kept in {folder}" if folder else "not kept",
        )
        if entry and folder is None:
            self._tell_unwritable()
        with self._failing(kernel, "compile"):
            data = self._toolchain.compile(kernel)
        # From here on the same as in a later process: what is run is what is kept.
        with self._failing(kernel, "load"):
            function = self._toolchain.link(kernel, data)
        if entry and folder and self._store.write(entry, data) is None:
            self._tell_unwritable()
        return function

    @contextlib.contextmanager
    def _failing(self, kernel: Kernel, what: str) -> Iterator[None]:
        """Whatever is raised inside, as KernelBuildError."""
        try:
            yield
        except Exception as error:
            advice = "choose another backend, the others do without it"
            if isinstance(error, ImportError):
                advice = f"run {self._toolchain.install}, or choose another backend"
            text = _COLOURS.sub("", str(error)).strip()  # the DSL writes for terminals
            reason = f"{type(error).__name__}: {text}"
            raise KernelBuildError(kernel.name, what, reason, advice) from error

    def _tell_unwritable(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "compiled kernels can't be kept, every process makes them again: no folder of %s "
                "can be written; set HOPPER_SOL_CACHE to one that can",
                ", ".join(map(str, self._store.folders)) or "none",
            )

    def _entry(self, kernel: Kernel) -> Entry | None:
        """Where the object is kept; None if the sources are newer than what this process imported."""
        if any(path.stat().st_mtime > _STARTED for path in kernel.sources):
            return None
        text = json.dumps(self._ingredients(kernel), sort_keys=True)
        return Entry(kernel.name, hashlib.sha256(text.encode()).hexdigest())

    def _ingredients(self, kernel: Kernel) -> dict:
        """Everything the object depends on."""
        return {
            "format": FORMAT,
            "toolchain": dict(self._toolchain.identity()),
            "name": kernel.name,
            "settings": kernel.settings,
            "arch": kernel.arch,
            "sources": [
                (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
                for path in kernel.sources
            ],
        }


def _renew_lock_after_fork(kernels: Kernels) -> None:
    """A thread that held the lock does not exist in a forked child, where nobody would let go."""
    if not hasattr(os, "register_at_fork"):
        return
    reference = weakref.ref(kernels)

    def renew():
        with contextlib.suppress(AttributeError):  # already gone
            reference()._lock = threading.Lock()

    os.register_at_fork(after_in_child=renew)


_DEFAULT: dict[str, Kernels] = {}


def default_kernels() -> Kernels:
    """The kernels that ``load`` serves; made at first use, by one thread for all."""
    if not _DEFAULT:
        from .cute import CuteToolchain

        _DEFAULT.setdefault("cute", Kernels(CuteToolchain(), lambda: Store(candidate_folders())))
    return _DEFAULT["cute"]
