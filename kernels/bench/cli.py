"""Arguments of the bench."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from . import report
from .base import Op
from .ops import OPS
from .peers import PEERS
from .plan import expand, find_op, read_plan
from .results import Results, head, table
from .runner import PENDING, Clock, empty_rows, run_job
from .timing import Rounds

PATH_OPTIONS = ("json", "plan")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 if a row failed its parity gate; 2 for bad arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["report"]:
        return report.main(argv[1:])
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        _say(_listing())
        return 0
    try:
        device = _device(arguments.device)
        entries = _entries(arguments)
        ops = {}
        for entry in entries:
            kind = find_op(entry.get("op"))
            ops.setdefault(kind.name, kind())
        jobs = [job for entry in entries for job in expand(entry, ops[entry["op"]], device)]
        if arguments.json is not None and not arguments.json.parent.is_dir():
            raise ValueError(f"json: the folder of {arguments.json} does not exist")
    except ValueError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2

    command = shlex.join(["bench", *_without_paths(argv)])
    results = Results(arguments.json, head(device, command, entries, arguments.commit))
    planned = [(job, empty_rows(job, ops[job.op])) for job in jobs]
    results.rows = [row for _, rows in planned for row in rows]
    results.write()
    clock = Clock(arguments.time_limit)
    rounds = Rounds(arguments.warmup, arguments.iterations, arguments.budget)

    def saved(row: dict[str, Any]) -> None:
        results.write()
        state = row["error"] or f"total {row['total_ms']} ms"
        if row["error"] == PENDING:
            state = f"parity ok, rel L2 {row['rel_l2']}"
        sys.stderr.write(f"{row['case']} {row['backend']} {row['precision']}: {state}\n")

    for job, rows in planned:
        run_job(job, ops[job.op], rows, device, rounds, clock, saved)
    for name, op in ops.items():
        _say(table((row for row in results.rows if row["op"] == name), op.table))
    return 1 if any(row["parity_ok"] is False for row in results.rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Times behind a parity gate. Options take comma lists and may be repeated.",
        epilog="bench report [--check] renders committed results into BENCHMARKS.md.",
    )
    parser.add_argument("op", nargs="?", metavar="OP", help=f"one of {', '.join(OPS)}")
    parser.add_argument("--list", action="store_true", help="ops, cases, options, backends, peers")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="JSON list of what to measure")
    parser.add_argument("--json", type=Path, metavar="OUT", help="result file, kept up to date")
    parser.add_argument("--backend", action="append", metavar="NAMES", help="default: all")
    parser.add_argument("--precision", action="append", metavar="NAMES")
    parser.add_argument(
        "--config", action="append", metavar="NAME=VALUE", help="a further setting of the op"
    )
    for name, option in _all_options().items():
        flags = [f"--{name.replace('_', '-')}"] + (["--cases"] if name == "case" else [])
        parser.add_argument(*flags, dest=f"option_{name}", action="append", help=option.help)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="then stop measuring")
    parser.add_argument("--iterations", type=_at_least(1), default=Rounds.most, help="most rounds")
    parser.add_argument("--warmup", type=_at_least(0), default=Rounds.warmup, help="rounds before")
    parser.add_argument(
        "--budget",
        type=float,
        default=Rounds.budget_s,
        metavar="SECONDS",
        help="of one job's rounds",
    )
    parser.add_argument("--commit", help="commit id to write, where there is no git")
    return parser


def _all_options():
    return {name: option for op in OPS.values() for name, option in op.options.items()}


def _at_least(least: int):
    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}, need {least} or more")
        return int(text)

    return integer


def _entries(arguments) -> list[dict[str, Any]]:
    """Plan entries from the file, or the one that the options make."""
    given = {
        name.removeprefix("option_"): value
        for name, value in vars(arguments).items()
        if value is not None and (name.startswith("option_") or name in ("backend", "precision"))
    }
    if arguments.config:
        given["config"] = dict(_setting(text) for text in arguments.config)
    if arguments.plan is None:
        if arguments.op is None:
            raise ValueError(f"op: none given, need one of {', '.join(OPS)}, or --plan FILE")
        return [{"op": arguments.op, **given}]
    if arguments.op or given:
        raise ValueError(
            f"plan: got {', '.join(filter(None, [arguments.op, *given]))} beside it; "
            "what to measure stands in the plan alone"
        )
    return read_plan(arguments.plan)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"config: got {text!r}, need NAME=VALUE")
    return name, value


def _device(text: str) -> torch.device:
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"device: got {text!r}, need auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {text!r}, need auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device: got {text!r}, this machine has {count} CUDA devices")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _without_paths(argv: list[str]) -> list[str]:
    """The arguments with the file names of --json and --plan instead of their paths."""
    out, path_next = [], False
    for text in argv:
        flag, equals, value = text.partition("=")
        if path_next:
            text = Path(text).name
        elif equals and flag.lstrip("-") in PATH_OPTIONS:
            text = f"{flag}={Path(value).name}"
        path_next = not equals and text.lstrip("-") in PATH_OPTIONS and text.startswith("--")
        out.append(text)
    return out


def _listing() -> str:
    lines = []
    for name, kind in OPS.items():
        op: Op = kind()
        lines += [name, f"  precisions  {', '.join(op.precisions)}"]
        lines += [f"  backends    {', '.join(op.known_backends()) or 'none'}"]
        lines += [f"  peers       {', '.join(PEERS.get(name, {}))}"]
        for key, option in op.options.items():
            lines.append(f"  --{key.replace('_', '-'):12} {option.help}: {option.describe()}")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
