"""One line that says how far it is: in place on a terminal, now and then elsewhere."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import TextIO

_TERMINAL_PAUSE_S = 0.1
_PIPE_PAUSES_S = (2.0, 10.0)  # between different lines, between lines that differ in numbers only


def bar(step: int, steps: int, width: int = 20) -> str:
    """[#####...............]"""
    done = max(0, min(width, width * step // steps))
    return f"[{'#' * done}{'.' * (width - done)}]"


class Display:
    """Writes for a person.

    Args:
        stream: where to.
        quiet: problems only.
        redact: takes out what must not be shown.
    """

    def __init__(
        self, stream: TextIO, quiet: bool = False, redact: Callable[[str], str] = lambda text: text
    ):
        self._stream = stream
        self._quiet = quiet
        self._redact = redact
        self._terminal = stream.isatty()
        self._last = ("", -1e9)
        self._dirty = False

    def live(self, what: str, detail: str = "") -> None:
        """What goes on now; the next one takes its place."""
        if self._quiet:
            return
        now = time.monotonic()
        if self._terminal:
            if now - self._last[1] >= _TERMINAL_PAUSE_S or what != self._last[0]:
                text = _shortened(self._clean(f"{what} {detail}".rstrip()), self._columns() - 1)
                self._write(f"\r\x1b[K{text}")
                self._dirty, self._last = True, (what, now)
            return
        if now - self._last[1] >= _PIPE_PAUSES_S[what == self._last[0]]:
            self._write(self._clean(f"{what} {detail}".rstrip()) + "\n")
            self._last = (what, now)

    def line(self, text: str) -> None:
        """Something that stays."""
        if not self._quiet:
            self.problem(text)

    def problem(self, text: str) -> None:
        """Something that stays and is shown in any case."""
        self.clear()
        for part in text.split("\n"):
            self._write(self._clean(part) + "\n")

    def clear(self) -> None:
        """Take the live line away."""
        if self._dirty:
            self._write("\r\x1b[K")
        self._dirty = False

    def _columns(self) -> int:
        # Of our own stream: stdout may be a file.
        with contextlib.suppress(OSError, ValueError):
            return int(os.environ.get("COLUMNS") or os.get_terminal_size(self._stream.fileno())[0])
        return 80

    def _clean(self, text: str) -> str:
        # Titles and messages come from elsewhere: no escape sequences of theirs on our terminal.
        return "".join(c if c.isprintable() else " " for c in self._redact(text))

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def _shortened(text: str, width: int) -> str:
    """`text` in `width` characters; its end, where the numbers are, is kept."""
    width = max(20, width)
    if len(text) <= width:
        return text
    head = width // 3
    return f"{text[:head]}...{text[head + 3 - width :]}"
