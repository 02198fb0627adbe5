"""The result file, what it says about the machine, and the table on the terminal."""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .runner import check_no_speed_without_parity

SCHEMA_VERSION = 1
PACKAGES = ("triton", "flash-attn-4", "comfy-kitchen", "nvidia-cutlass-dsl")


class Results:
    """Rows of one run, written to ``path`` after every change so that a killed run keeps them.

    Attributes:
        rows: what is written.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]):
        self.path = path
        self.head = dict(head)
        self.rows: list[dict[str, Any]] = []

    def write(self, _row: Mapping[str, Any] | None = None) -> None:
        """Replace the file in one step; refuses a speed without parity."""
        check_no_speed_without_parity(self.rows)
        if self.path is None:
            return
        content = json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n"
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(content, "utf-8")
        os.replace(partial, self.path)


def head(device: torch.device, command: str, plan: Sequence[Any], commit: str | None) -> dict:
    """Everything but the rows. Names no host and no path."""
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit or commit_of_checkout(),
        "command": command,
        "plan": list(plan),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """GPU, driver and limits; on a CPU its architecture."""
    if device.type != "cuda":
        return {"gpu": None, "cpu": platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "sms": properties.multi_processor_count,
    }
    names = ("driver_version", "clocks.max.sm", "power.limit")
    asked = _output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    if asked:
        first = asked.splitlines()[0].split(",")
        facts.update(
            zip(("driver", "max_sm_clock", "power_limit"), map(str.strip, first), strict=False)
        )
    return facts


def versions() -> dict[str, str]:
    """Of Python, torch, CUDA, and of the peers that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_of_checkout() -> str | None:
    """Short commit id, "+" behind it if files differ; None without git."""
    root = str(Path(__file__).resolve().parents[2])
    commit = _output("git", "-C", root, "rev-parse", "--short", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _output(program: str, *arguments: str) -> str | None:
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Aligned text: one line a row, and a footnote for every row that has an error."""
    rows = list(rows)
    cells = [[shown(row.get(name)) for name in columns] for row in rows]
    notes = []
    for row, line in zip(rows, cells, strict=True):
        if row.get("error"):
            notes.append(f"[{len(notes) + 1}] {row['backend']}: {row['error']}")
            line[columns.index("backend")] += f" [{len(notes)}]"
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [list(columns), *cells]
    ]
    return "\n".join([*lines, *notes]) + "\n"


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
