"""Files of compiled kernels: checked when read, replaced as a whole when written, bounded in size.

A file is one line of text, then the object. The line tells its key, the object's SHA-256 and its
size, so that a file cut short, damaged or given another name is seen before any of it is run.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes may compile the same kernel
    fcntl = None

from .folder import can_be_written

log = logging.getLogger("hopper_sol")

SIZE_LIMIT = 256 * 2**20  # bytes in a folder before old files go
LOCK_SECONDS = 60.0  # longer than a compilation takes
STALE_SECONDS = 3600.0  # a temporary file this old has no process any more
SUFFIX, TEMPORARY, LOCK = ".kernel", ".kernel-tmp", ".kernel-lock"
_MAGIC = "hopper_sol compiled kernel"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Entry:
    """What a file is for.

    Attributes:
        name: of the kernel: letters, digits and underscores, for people.
        key: hex SHA-256 of everything the object depends on.
    """

    name: str
    key: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.key[:32]}{SUFFIX}"


class Store:
    """Compiled objects in the first of ``folders`` that holds them, or that can be written."""

    def __init__(self, folders: Sequence[Path], size_limit: int = SIZE_LIMIT):
        self.folders = tuple(folders)
        self.size_limit = size_limit

    def read(self, entry: Entry) -> bytes | None:
        """The object, or None if there is none or it is damaged."""
        for folder in self.folders:
            path = folder / entry.file_name
            try:
                content = path.read_bytes()
            except OSError:
                continue
            found = _checked(content, entry)
            if found is None:
                log.warning("%s is damaged and is made again", path)
                _remove(path)
                continue
            with contextlib.suppress(OSError):  # read-only: then it isn't tidied up either
                os.utime(path)
            return found
        return None

    def discard(self, entry: Entry) -> None:
        """Forget what is kept, as far as that is possible."""
        for folder in self.folders:
            _remove(folder / entry.file_name)

    def write(self, entry: Entry, data: bytes) -> Path | None:
        """Keep ``data``; where, or None if no folder can be written. Never raises OSError."""
        digest = hashlib.sha256(data).hexdigest()
        header = f"{_MAGIC} {entry.key} {digest} {len(data)}\n".encode()
        for folder in self.folders:
            path = folder / entry.file_name
            try:
                _replace(path, header + data)
            except OSError:
                continue
            self._tidy(folder, keep=path)
            return path
        return None

    def writable_folder(self) -> Path | None:
        """The folder that ``write`` would take."""
        return next((folder for folder in self.folders if can_be_written(folder)), None)

    @contextlib.contextmanager
    def compiling(self, entry: Entry, timeout: float | None = None) -> Iterator[None]:
        """Hold off other processes that want the same entry, as far as that is possible.

        Only saves work: after ``timeout`` seconds, or where locks don't exist, the block is
        entered all the same. The system lets go of the lock when the process ends.
        """
        timeout = LOCK_SECONDS if timeout is None else timeout
        folder = self.writable_folder()
        if fcntl is None or folder is None:
            yield
            return
        path = folder / (entry.file_name.removesuffix(SUFFIX) + LOCK)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            if _lock(descriptor, timeout):
                try:
                    yield
                finally:
                    _remove(path)
                    # Not left to close(): a child forked meanwhile has the file open as well.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            else:
                yield
        finally:
            os.close(descriptor)

    def _tidy(self, folder: Path, keep: Path) -> None:
        """Remove what is least recently used beyond the limit, and what killed processes left."""
        kept = []
        try:
            for path in folder.iterdir():
                if path.name.endswith((SUFFIX, TEMPORARY, LOCK)):
                    with contextlib.suppress(OSError):
                        facts = path.lstat()
                        kept.append((facts.st_mtime, facts.st_size, path))
        except OSError:
            return
        total = sum(size for _, size, _ in kept)
        for changed, size, path in sorted(kept):
            left_behind = not path.name.endswith(SUFFIX)
            if left_behind:
                remove = changed < time.time() - STALE_SECONDS
            else:
                remove = total > self.size_limit and path != keep
            if remove:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _checked(content: bytes, entry: Entry) -> bytes | None:
    line, newline, data = content.partition(b"\n")
    digest = hashlib.sha256(data).hexdigest()
    expected = f"{_MAGIC} {entry.key} {digest} {len(data)}".encode()
    return data if newline and line == expected else None


def _replace(path: Path, content: bytes) -> None:
    """Write ``path`` so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp lets nobody else read it: one who runs an image that another built has to.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _lock(descriptor: int, timeout: float) -> bool:
    """Whether the lock was had within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:  # a file system without locks
            return False
