"""Queue prompts on a ComfyUI without a browser: sweeps, outputs, JSON lines, exit codes.

    python queue_prompt.py PROMPT.json|FOLDER ... [options]
    python queue_prompt.py warmup --workflow PROMPT.json --size 832x480x81 [options]

Needs Python 3.10 and nothing else; the server may be anywhere. `--help` and README.md beside this
file say the rest.
"""

import argparse
import contextlib
import functools
import importlib.util
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent


def _load_package(name: str):
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    full_name = f"hopper_sol_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, HERE / name / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


comfy_client = _load_package("comfy_client")
address, graphs, outputs = comfy_client.address, comfy_client.graphs, comfy_client.outputs
arguments, records = comfy_client.arguments, comfy_client.records
runner, warmup = comfy_client.runner, comfy_client.warmup

OK, FAILED, BAD_REQUEST, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
STATUS_CODES = {
    "ok": OK,
    "error": FAILED,
    "interrupted": FAILED,
    "refused": BAD_REQUEST,
    "lost": UNREACHABLE,
}


class _Stopped(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    warm = argv[:1] == ["warmup"]
    options = (arguments.warmup_parser() if warm else arguments.queue_parser()).parse_args(
        argv[warm:]
    )
    display = comfy_client.progress.Display(sys.stderr, options.quiet)
    try:
        place = address.parse(options.server, options.header, options.insecure)
        display = comfy_client.progress.Display(sys.stderr, options.quiet, place.redact)
        runs = _warmup_runs(options) if warm else _runs(options, display)
        if getattr(options, "dry_run", False):
            for run in runs:
                display.problem(f"{run.identity[:12]} {run.label}")
            return OK
        log = records.Log(options.jsonl, place.redact)
    except (ValueError, OSError) as error:
        display.problem(f"error: {error}")
        return BAD_REQUEST
    with contextlib.closing(log):
        return Queue(options, place, display, log).run(runs, WarmupTable() if warm else None)


# ---- what to run


def _runs(options: argparse.Namespace, display: Any) -> list[Any]:
    """Every run that is asked for and not finished. Raises ValueError."""
    if options.resume and options.jsonl in (None, "-"):
        raise ValueError("--resume needs --jsonl FILE, where finished runs are on record")
    runs = []
    for path in graphs.find_files(options.prompts):
        runs += graphs.expand(
            str(path),
            graphs.load(path),
            options.settings,
            options.sweep,
            options.repeat,
            options.new_seeds,
        )
    if options.resume:
        done, bad = records.finished(options.jsonl)
        if bad:
            display.problem(f"{options.jsonl}: {bad} lines are no records; passed over")
        left = [run for run in runs if not records.is_finished(run, done)]
        display.line(f"{len(runs) - len(left)} of {len(runs)} runs are done already")
        return left
    return runs


def _warmup_runs(options: argparse.Namespace) -> list[Any]:
    sizes = warmup.parse_sizes(options.size)
    graph = graphs.load(Path(options.workflow))
    return list(
        warmup.expand(
            options.workflow,
            graph,
            sizes,
            steps=options.steps,
            settings=options.settings,
            nodes=options.size_node,
        )
    )


# ---- running


class WarmupTable:
    """Shows a line for each size once both of its runs have ended."""

    def __init__(self):
        self._seconds: dict[str, list[str]] = {}

    def add(self, record: Mapping[str, Any], display: Any) -> None:
        """Take in the record of a run."""
        size = record["warmup"]["size"]
        seconds = record["timings"]["running_s"]
        shown = self._seconds.setdefault(size, [])
        ended = record["status"] == "ok" and seconds is not None
        shown.append(f"{seconds:.1f} s" if ended else record["status"])
        if len(shown) < 2:
            return
        display.line(f"{size}: first {shown[0]}, second {shown[1]}")
        runs = (record["report"] or {}).get("runs") or []
        if runs and not any(run.get("sparse_calls") for run in runs):
            why = sorted({reason for run in runs for reason in run.get("dense_calls") or {}})
            display.problem(f"{size}: no sparse call, so nothing was warmed up: {', '.join(why)}")


class Queue:
    """Everything between the runs to make and the exit code."""

    def __init__(self, options: argparse.Namespace, place: Any, display: Any, log: Any):
        self._options = options
        self._place = place
        self._display = display
        self._log = log
        self._codes = {OK}
        self._comfyui: str | None = None
        self._table: WarmupTable | None = None
        self._client = comfy_client.Client(
            place.url,
            headers=place.headers,
            tls=place.tls(),
            timeout=options.timeout,
            use_proxy=not place.loopback,
        )
        client_id = uuid.uuid4().hex
        connect = functools.partial(
            comfy_client.websocket.connect, place, client_id, min(10.0, options.timeout)
        )
        self._runner = runner.Runner(
            self._client,
            client_id,
            connect,
            display,
            runner.Options(
                max_pending=getattr(options, "max_pending", 1),
                on_lost=options.on_lost,
                patience_s=options.patience,
                prompt_timeout_s=options.prompt_timeout,
            ),
        )

    def run(self, runs: Sequence[Any], table: WarmupTable | None = None) -> int:
        """Make the runs; the exit code."""
        self._table = table
        if not runs:
            return OK
        ended = 0
        try:
            with _sigterm_as_interrupt():
                self._meet_server()
                for outcome in self._runner.run_all(runs):
                    ended += 1
                    if not self._finish(outcome) and getattr(self._options, "fail_fast", False):
                        for left in self._runner.cancel():
                            ended += 1
                            self._finish(left)
                        break
        except KeyboardInterrupt:
            self._codes.add(INTERRUPTED)
            # A second one ends this as well.
            with contextlib.suppress(KeyboardInterrupt):
                self._display.problem("stopping; cancelling what is queued or running")
                for outcome in self._runner.cancel():
                    ended += 1
                    self._finish(outcome)
        except OSError as error:
            # Without its record a run is lost work; a full disk will not take the next one either.
            self._codes.add(FAILED)
            self._display.problem(f"error: can't write the record of a run: {error}; stopping")
            self._runner.cancel()
        except _Unusable as error:
            self._display.problem(f"error: {error}")
            self._codes.add(error.code)
        except comfy_client.ServerError as error:
            self._codes.add(UNREACHABLE)
            for outcome in self._runner.abandon("lost", str(error)):
                ended += 1
                self._finish(outcome)
            self._display.problem(f"error: {error}")
        finally:
            self._runner.close()
            self._display.clear()
        if ended < len(runs):
            self._display.problem(f"{len(runs) - ended} of {len(runs)} runs were not made")
        return max(self._codes)

    def _meet_server(self) -> None:
        """See that a ComfyUI is there. Raises _Unusable, ServerError."""
        if self._place.headers and not (self._place.secure or self._place.loopback):
            self._display.problem("note: headers go to the server unencrypted; https is safer")
        deadline = time.monotonic() + self._options.wait_for_server
        while True:
            try:
                stats = self._client.get("/system_stats")
                break
            except (comfy_client.NoAnswer, comfy_client.HttpError) as error:
                if isinstance(error, comfy_client.HttpError) and not error.temporary:
                    raise _Unusable(self._advice(error), BAD_REQUEST) from error
                if time.monotonic() >= deadline:
                    raise _Unusable(
                        f"{error}; is a ComfyUI running there? --server has its address, "
                        "--wait-for-server waits for it",
                        UNREACHABLE,
                    ) from error
            self._display.live(f"waiting for {self._place.url}")
            time.sleep(0.5)
        system = stats.get("system") if isinstance(stats, dict) else None
        self._comfyui = system.get("comfyui_version") if isinstance(system, dict) else None

    def _advice(self, error: Any) -> str:
        if error.status in (401, 403):
            return f"{error}; set {address.AUTH_VARIABLE} to what the server wants, 'Bearer ...'"
        if error.status == 404:
            return f"{error}; no ComfyUI at {self._place.url}: check the base path of --server"
        return str(error)

    def _finish(self, outcome: Any) -> bool:
        """Fetch the files of a run and put it on record; whether it ended well."""
        about = {"server": self._place.url, "comfyui": self._comfyui}
        texts = outputs.texts_of(outcome.entry)
        reports = list(outputs.take_reports(texts, outcome.job.graph).items())
        about["report"] = reports[0][1] if reports else None
        if len(reports) > 1:
            about["more_reports"] = dict(reports[1:])
        about["texts"] = texts
        try:
            about["outputs"], problems = self._fetch(outcome)
        except KeyboardInterrupt:
            # It has ended, but what it made is not all here: --resume makes it again.
            outcome.status = "interrupted"
            outcome.error = {"type": "interrupted", "message": "stopped while fetching outputs"}
            self._log.write(records.record(outcome, {**about, "outputs": []}))
            raise
        if problems and outcome.status == "ok":
            outcome.status = "error"
            outcome.error = {"type": "output", "message": "\n".join(problems)}
        self._codes.add(STATUS_CODES[outcome.status])
        data = records.record(outcome, about)
        self._log.write(data)
        self._show(outcome, about["outputs"])
        if self._table:
            self._table.add(data, self._display)
        return outcome.status == "ok"

    def _fetch(self, outcome: Any) -> tuple[list[dict], list[str]]:
        """(what the record says of each file, what went wrong)."""
        folder = getattr(self._options, "output", None)
        without = {"temp", "input"} if getattr(self._options, "no_previews", False) else set()
        listed, problems = [], []
        for output in outputs.files_of(outcome.entry):
            if output.kind in without:
                continue
            item = {"node": output.node, "kind": output.key, "name": output.name, "file": None}
            if folder is not None:
                self._display.live(f"fetching {output.name}")
                try:
                    item["file"] = outputs.fetch(self._client, output, folder).as_posix()
                except (outputs.UnsafeName, comfy_client.ComfyError, OSError) as error:
                    problems.append(f"{output.name}: not saved: {error}")
            listed.append(item)
        return listed, problems

    def _show(self, outcome: Any, listed: Sequence[Mapping[str, Any]]) -> None:
        job = outcome.job
        head = f"[{job.number}/{self._runner.total}] {job.run.label}"
        for note in job.notes:
            self._display.line(f"{head}: {note}")
        if outcome.status == "ok":
            saved = [item["file"] for item in listed if item["file"]]
            text = f"{head}: ok, {outcome.total_s:.1f} s"
            self._display.line(f"{text} -> {', '.join(saved)}" if saved else text)
            return
        error = outcome.error or {}
        where = (
            f" in node {job.describe_node(str(error['node_id']))}" if error.get("node_id") else ""
        )
        kind = "" if error.get("type") == outcome.status else f" {error.get('type')}:"
        message = str(error.get("message")).replace("\n", "\n    ")
        self._display.problem(f"{head}: {outcome.status}{where}:{kind} {message}")


class _Unusable(Exception):
    """The server can't be worked with; with the exit code for it."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


@contextlib.contextmanager
def _sigterm_as_interrupt():
    def stop(*_):
        raise _Stopped

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:
        # Not the main thread; then signals are not ours to handle.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
