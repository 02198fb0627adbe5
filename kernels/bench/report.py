"""Committed results -> the tables of BENCHMARKS.md.

``bench report`` rewrites the part between BEGIN and END from results/*/*.json; ``--check`` only says
whether it is up to date. A number in those tables is one that a committed file holds.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import SCHEMA_VERSION, shown
from .runner import check_no_speed_without_parity

BEGIN = "<!-- bench:begin (written by `bench report`, do not edit) -->"
END = "<!-- bench:end -->"
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[2] / "BENCHMARKS.md"

# Heading of a column -> fields; what is empty in a whole table is left out.
COLUMNS = {
    "sol_attention": {
        "backend": "backend",
        "precision": "precision",
        "tau": "tau",
        "density": "density",
        "prep": "prep_ms",
        "of it route": "route_ms",
        "main": "main_ms",
        "total ms": "total_ms",
        "quartiles": ("p25_ms", "p75_ms"),
        "exact TFLOP/s": "exact_tflops",
        "rel L2": "rel_l2",
        "gate": "gate",
        "extra MiB": "peak_extra_mb",
    },
    "fp8_linear": {
        "layer": "case",
        "backend": "backend",
        "fused": "fused",
        "quantise": "quant_ms",
        "TB/s": "quant_tb_s",
        "GEMM": "gemm_ms",
        "total ms": "total_ms",
        "quartiles": ("p25_ms", "p75_ms"),
        "TFLOP/s": "tflops",
        "rel L2": "rel_l2",
    },
}
# What rows of one table have in common, and its title says.
GROUPS = {
    "sol_attention": ("case", "generator", "token_order", "estimator", "sinks", "seed"),
    "fp8_linear": ("generator", "seed"),
}


def main(argv: Sequence[str]) -> int:
    """Exit status: 0; 1 if --check finds the page out of date; 2 for files it can't use."""
    parser = argparse.ArgumentParser(prog="bench report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if out of date"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown file to rewrite")
    arguments = parser.parse_args(argv)
    try:
        old = arguments.page.read_text("utf-8")
        new = updated(old, render(arguments.results))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"bench report: {error}\n")
        return 2
    if arguments.check:
        if old != new:
            sys.stderr.write(
                f"bench report: {arguments.page.name} is not what the results render\n"
            )
        return int(old != new)
    if old != new:
        arguments.page.write_text(new, "utf-8")
    return 0


def updated(page: str, tables: str) -> str:
    """``page`` with ``tables`` between the markers; raises ValueError without them."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one line {BEGIN!r} and below it one line {END!r}")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables}{END}{after}"


def render(results: Path) -> str:
    """Markdown of every result file under ``results``, by path."""
    files = sorted(results.glob("**/*.json"), key=lambda path: path.as_posix())
    return "".join(_file(load(path), path.relative_to(results).as_posix()) for path in files)


def load(path: Path) -> dict[str, Any]:
    """A result file; raises ValueError if it is none, or shows a speed without parity."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(f"{path.name}: got schema_version {found}, need {SCHEMA_VERSION}")
    try:
        check_no_speed_without_parity(content["rows"])
    except RuntimeError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return content


def _file(content: Mapping[str, Any], name: str) -> str:
    machine, versions = content["machine"], content["versions"]
    facts = [machine.get("gpu") or f"CPU {machine['cpu']}"]
    facts += [
        f"{key.replace('_', ' ')} {machine[key]}"
        for key in ("driver", "power_limit")
        if key in machine
    ]
    facts += [f"{key} {value}" for key, value in versions.items()]
    lines = [f"### {name}", ""]
    lines += [
        f"{content['date']}, {', '.join(facts)}, commit {content['commit'] or 'unknown'}.",
        "",
    ]
    lines += [f"    {content['command']}", ""]
    for group, rows in _grouped(content["rows"]):
        lines += [f"**{group}**", "", *_table(rows), ""]
    return "\n".join(lines) + "\n"


def _grouped(rows: Iterable[Mapping[str, Any]]):
    """(title, rows) in order of first appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_title(row), []).append(row)
    return groups.items()


def _title(row: Mapping[str, Any]) -> str:
    said = [f"`{row['op']}`"]
    for name in GROUPS[row["op"]]:
        value = row[name]
        said.append(str(value) if name == "case" else f"{name.replace('_', ' ')} {value}")
    if "case" in GROUPS[row["op"]]:
        said.insert(2, f"({', '.join(map(str, row['shape']))})")
    for n in (2, 3):
        if row.get(f"union_ratio_{n}") is not None and row.get("tau") is not None:
            # The ratio belongs to a tau; rows of another tau are another table.
            said.append(f"tau {row['tau']:.3g} union ratio of {n} {row[f'union_ratio_{n}']:.2f}")
    for name, value in (row.get("config") or {}).items():
        said.append(f"{name} {value}")
    return ", ".join(said)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [row for row in rows if not row["error"]]
    columns = {
        title: field
        for title, field in COLUMNS[rows[0]["op"]].items()
        if any(_cell(row, field) != "-" for row in measured)
    }
    lines = []
    if measured:
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "---|" * len(columns))
    for row in measured:
        lines.append("| " + " | ".join(_cell(row, field) for field in columns.values()) + " |")
    for row in rows:
        if row["error"]:
            where = "" if "case" in GROUPS[row["op"]] else f" {row['case']}"
            lines += [
                "",
                f"No times for {row['backend']} {row['precision']}{where}: {row['error']}",
            ]
    return lines


def _cell(row: Mapping[str, Any], field) -> str:
    if isinstance(field, tuple):
        values = [row.get(name) for name in field]
        return "-" if None in values else " - ".join(shown(float(v)) for v in values)
    value = row.get(field)
    if field == "rel_l2" and value is not None:
        return f"{value:.2g}"
    return shown(float(value) if isinstance(value, int) and field != "tau" else value)
