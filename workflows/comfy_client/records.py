"""JSON lines: one record a run, and which runs a file of them has already."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from .graphs import Run
from .job import Outcome

SCHEMA_VERSION = 1


def record(outcome: Outcome, about: Mapping[str, Any]) -> dict[str, Any]:
    """A run's record; `about` is added (server, outputs, report)."""
    job = outcome.job
    return {
        "schema_version": SCHEMA_VERSION,
        "file": job.run.file,
        "set": dict(job.run.settings),
        "repeat": job.run.repeat,
        "identity": job.run.identity,
        "prompt_id": job.prompt_id or None,
        "status": outcome.status,
        "error": outcome.error,
        "started_at": job.started_at,
        "timings": outcome.timings(),
        "cached": job.cached,
        "resubmitted": job.resubmitted,
        "notes": job.notes,
        **about,
        **job.run.extra,
    }


class Log:
    """Where records are written.

    Args:
        target: a file to append to, "-" for stdout, None for nowhere.
        redact: takes out what must not be written.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(
        self,
        target: str | None,
        redact: Callable[[str], str] = lambda text: text,
        stdout: TextIO | None = None,
    ):
        self._redact = redact
        self._file: TextIO | None = None
        self._owned = target not in (None, "-")
        if target == "-":
            self._file = stdout or sys.stdout
        elif target is not None:
            path = Path(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_within_a_line(path)
            self._file = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
            if torn:
                self._file.write("\n")

    def write(self, data: Mapping[str, Any]) -> None:
        """Append a record."""
        if self._file:
            # ASCII, so that no console or tool trips over it.
            self._file.write(json.dumps(_each_text(data, self._redact)) + "\n")
            self._file.flush()
            if self._owned:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file and self._owned:
            self._file.close()
        self._file = None


def finished(path: str) -> tuple[set[tuple[str, int]], int]:
    """((identity, repeat) of every run recorded as ok, number of lines that are no record)."""
    done, bad = set(), 0
    if not Path(path).exists():
        return done, bad
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                if data["status"] == "ok" and data["schema_version"] == SCHEMA_VERSION:
                    done.add((data["identity"], data["repeat"]))
            except (ValueError, KeyError, TypeError):
                bad += 1
    return done, bad


def is_finished(run: Run, done: set[tuple[str, int]]) -> bool:
    """Whether finished() has this run."""
    return (run.identity, run.repeat) in done


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
