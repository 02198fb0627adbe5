"""The command line of queue_prompt.py."""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from .address import AUTH_VARIABLE
from .warmup import DEFAULT_STEPS

DEFAULT_SERVER = "http://127.0.0.1:8188"
EXIT_CODES = """\
exit codes (of several, the largest):
  0    every prompt ended well, or was skipped by --resume
  1    a prompt failed or was interrupted while it ran, or an output could not be saved
  2    bad arguments, a bad prompt file, or the server refused a graph or our authorization
  3    the server is out of reach, or has lost a prompt
  130  stopped by Ctrl-C or SIGTERM; what was queued or running of ours is cancelled. A second
       Ctrl-C leaves at once

environment:
  HOPPER_SOL_AUTH   value of the Authorization header, as in 'Bearer ...'; never shown
"""
EPILOG = (
    """\
NODE is a node's id, its title, or its class if there is only one of it. A VALUE is read as JSON
(5, true, "text"), else as text; where the input holds a text now, it stays a text.

examples:
  queue_prompt.py wan.json --output out
  queue_prompt.py wan.json --set KSampler.steps=20 --sweep KSampler.seed=1,2,3 --output out
  queue_prompt.py prompts/ --server https://host/comfy/ --jsonl runs.jsonl --resume

"""
    + EXIT_CODES
)


class _Parser(argparse.ArgumentParser):
    """Shows no authorization that stands in a wrong place of the command line."""

    def __init__(self, **settings):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"(?i)\b(authorization|bearer|basic)\b.*", r"\1 ***", message))


def _common(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--server",
        metavar="URL",
        default=DEFAULT_SERVER,
        help=f"http or https, with a base path if need be (default: {DEFAULT_SERVER})",
    )
    server.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        default=[],
        help="sent with every request; other users of this machine can read it here, "
        f"so better put an authorization into {AUTH_VARIABLE}",
    )
    server.add_argument("--insecure", action="store_true", help="do not check certificates")
    server.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=30.0,
        metavar="S",
        help="of one request (default: 30)",
    )
    server.add_argument(
        "--patience",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="how long the server may be out of reach while we work (default: 120)",
    )
    server.add_argument(
        "--wait-for-server",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="how long to wait for it at the start (default: 0)",
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--prompt-timeout",
        type=_seconds,
        metavar="S",
        help="cancel a prompt that runs longer (default: never)",
    )
    running.add_argument(
        "--on-lost",
        choices=("resubmit", "fail"),
        default="resubmit",
        help="when a restarted server has forgotten a prompt: queue it once more, or give it up "
        "(default: resubmit)",
    )
    running.add_argument(
        "--set",
        metavar="NODE.INPUT=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="change an input; as often as needed",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--jsonl", metavar="FILE", help="append a JSON record for every run; - is stdout"
    )
    results.add_argument("--quiet", action="store_true", help="show problems only")


def queue_parser() -> argparse.ArgumentParser:
    """The parser of everything but warmup."""
    parser = _Parser(
        prog="queue_prompt.py",
        description="Queue prompts in API format on a ComfyUI, follow them, fetch what they make.\n"
        "'queue_prompt.py warmup --help' is about compiling kernels before traffic.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT|FOLDER", help="files, or folders of *.json"
    )
    _common(parser)
    many = parser.add_argument_group("many runs")
    many.add_argument(
        "--sweep",
        metavar="NODE.INPUT=V1,V2,...",
        action="append",
        default=[],
        help="run with each value (or each of a JSON list); several sweeps make all combinations",
    )
    many.add_argument(
        "--repeat",
        type=_count,
        default=1,
        metavar="N",
        help="run each N times; ComfyUI answers an unchanged graph from its cache, so see "
        "--new-seeds",
    )
    many.add_argument(
        "--new-seeds", action="store_true", help="add 1 to every seed from repetition to repetition"
    )
    many.add_argument(
        "--resume",
        action="store_true",
        help="skip runs that --jsonl has as ok: same graph with everything set, same repetition",
    )
    many.add_argument(
        "--max-pending",
        type=_count,
        default=1,
        metavar="N",
        help="how many of ours to have on the server at once (default: 1)",
    )
    many.add_argument("--fail-fast", action="store_true", help="stop at the first that is not ok")
    many.add_argument("--dry-run", action="store_true", help="list the runs and stop")
    files = parser.add_argument_group("files")
    files.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="fetch the files of each run into DIR; without it they stay on the server",
    )
    files.add_argument(
        "--no-previews", action="store_true", help="do not fetch what nodes only showed"
    )
    return parser


def warmup_parser() -> argparse.ArgumentParser:
    """The parser of warmup."""
    parser = _Parser(
        prog="queue_prompt.py warmup",
        description="Run a graph twice at each size with few steps and new seeds, so that kernels\n"
        "are compiled and files are read before traffic; shows the seconds of both runs. What the\n"
        "graph saves goes below hopper_sol_warmup/ in the server's output folder.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--workflow", required=True, metavar="PROMPT", help="in API format")
    parser.add_argument(
        "--size",
        required=True,
        metavar="WxHxFRAMES,...",
        help="sizes in pixels and frames, as 832x480x81; without frames, those of the graph",
    )
    parser.add_argument(
        "--size-node",
        action="append",
        default=[],
        metavar="NODE",
        help="the node to set width, height and length of (default: the only one that has them)",
    )
    parser.add_argument(
        "--steps",
        type=_count,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"at most so many (default: {DEFAULT_STEPS})",
    )
    _common(parser)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e7:
        raise argparse.ArgumentTypeError(f"got {text}, need seconds, 0 or more")
    return value


def _positive_seconds(text: str) -> float:
    if _seconds(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text}, need more than 0 seconds")
    return float(text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, need 1 or more")
    return value
