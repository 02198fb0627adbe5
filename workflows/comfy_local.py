"""Find a ComfyUI on this machine, start it headless on the loopback, and run API prompts on it.

Used by ``demo.py`` and by the tests that need the real server. Standard library only, because it
runs in whatever Python is at hand, while ComfyUI runs in its own.

    checkout = usable(find_comfyui())
    link_pack(base, PACK_ROOT)
    with Server(checkout, base) as server:
        entry = server.run(prompt, timeout=120)   # the /history entry of a finished prompt
"""

import contextlib
import ctypes
import functools
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACK_ROOT = Path(__file__).absolute().parents[1]
PACK_NAME = "comfyui-hopper-sol"
# Where demo.py puts a ComfyUI of its own when there is none.
DEMO_CHECKOUT = PACK_ROOT / ".demo" / "ComfyUI"
NEEDED_MODULES = ("aiohttp", "torch")

# A connection refused on the loopback means that nothing listens; this is how long we believe
# that it comes back (a server that is being restarted by hand).
REFUSED_GRACE_S = 5.0
LOG_TAIL_CHARS = 4000

# Loaded here and not in the child between fork and exec, where little is allowed.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class ComfyError(RuntimeError):
    """Something about ComfyUI went wrong; the text says what, and what to do."""


class CheckoutError(ComfyError):
    """COMFYUI_PATH, COMFYUI_PYTHON or a checkout cannot be used."""


class ServerError(ComfyError):
    """The server did not start, died, or does not answer. Its log's end is in the text."""


class HttpError(ComfyError):
    """The server answered with a status >= 400.

    Attributes:
        status: the HTTP status.
        body: the answer as parsed JSON where it is JSON, else as text.
    """

    def __init__(self, method: str, path: str, status: int, body: Any):
        text = body if isinstance(body, str) else "" if body is None else json.dumps(body)
        super().__init__(f"{method} {path}: HTTP {status} {text[:2000]}".rstrip())
        self.status = status
        self.body = body


class PromptRejected(ComfyError):
    """The server refuses a prompt, or accepts only a part of it. Nothing of it is left queued.

    Attributes:
        error: ComfyUI's "error" object ({} if only some outputs were refused).
        node_errors: {node id: {"class_type", "errors": [...]}}.
    """

    def __init__(self, error: dict, node_errors: dict | None):
        lines = [_error_line(error)] if error else []
        # ComfyUI has [] here when there is nothing to say about single nodes.
        node_errors = node_errors or {}
        for node_id, node in node_errors.items():
            for item in node.get("errors", []):
                lines.append(f"node {node_id} ({node.get('class_type')}): {_error_line(item)}")
        super().__init__("prompt rejected: " + ("; ".join(lines) or "no reason given"))
        self.error = error
        self.node_errors = node_errors


class PromptFailed(ComfyError):
    """The prompt ran and ended in an error.

    Attributes:
        entry: its /history entry.
        details: the data of the "execution_error" message (node_id, node_type, exception_type,
            exception_message, traceback), {} if there was none.
    """

    def __init__(self, text: str, entry: dict, details: dict):
        super().__init__(text)
        self.entry = entry
        self.details = details


class PromptInterrupted(PromptFailed):
    """The prompt was interrupted while it ran."""


class PromptLost(ComfyError):
    """The server neither runs, queues nor remembers the prompt."""


class PromptTimeout(ComfyError, TimeoutError):
    """The prompt was not done in time. It may still be running."""


class _Unreachable(Exception):
    """No answer. `refused` is True where nothing listens at all."""

    def __init__(self, cause: BaseException, refused: bool):
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.refused = refused


# ---- finding a checkout


@dataclass(frozen=True)
class Checkout:
    """A ComfyUI checkout and the Python that can run it.

    Attributes:
        path: the folder that holds main.py.
        python: an interpreter that has what ComfyUI needs, or None.
        version: "0.33.0", or "unknown".
        reason: why `python` is None, in one line; None otherwise.
    """

    path: Path
    python: Path | None
    version: str
    reason: str | None = None

    def __str__(self) -> str:
        tail = f"with {self.python}" if self.python else f"not usable: {self.reason}"
        return f"ComfyUI {self.version} in {self.path}, {tail}"


def find_comfyui(pack_root: Path = PACK_ROOT) -> list[Checkout]:
    """The ComfyUI checkouts of this machine, the one to prefer first.

    COMFYUI_PATH alone, where it is set. Otherwise the ComfyUI whose custom_nodes folder holds the
    pack, then ~/comfy/ComfyUI* by name, then the checkout that demo.py made.

    The Python is COMFYUI_PYTHON where it is set, else the checkout's .venv or venv, else the
    running one; the first that has aiohttp and torch. A checkout without one is listed too, with
    the reason.

    Raises:
        CheckoutError: COMFYUI_PATH or COMFYUI_PYTHON is set to something that is not one.
    """
    wanted = os.environ.get("COMFYUI_PATH")
    if wanted:
        path = Path(wanted).expanduser().absolute()
        if not _is_checkout(path):
            raise CheckoutError(
                f"COMFYUI_PATH: got {wanted!r}, {_what_is(path)}; need the folder of a ComfyUI "
                "checkout, the one that holds main.py and comfyui_version.py. Correct it, or "
                "unset it to let the others be found."
            )
        return [checkout_at(path)]

    paths = []
    for root in (pack_root.absolute(), pack_root.resolve()):
        if root.parent.name == "custom_nodes":
            paths.append(root.parent.parent)
    paths += sorted((Path.home() / "comfy").glob("ComfyUI*"))
    paths.append(pack_root / ".demo" / "ComfyUI")

    found: dict[Path, Checkout] = {}
    for path in paths:
        if _is_checkout(path) and path.resolve() not in found:
            found[path.resolve()] = checkout_at(path)
    return list(found.values())


def checkout_at(path: Path) -> Checkout:
    """The checkout in `path`, which must hold one, with the Python that can run it."""
    python, reason = _find_python(path)
    return Checkout(path, python, _version(path), reason)


def usable(checkouts: Iterable[Checkout]) -> Checkout | None:
    """The first checkout that has a Python, or None."""
    return next((c for c in checkouts if c.python), None)


def has_cuda(python: Path) -> bool:
    """Whether `python`'s torch sees a CUDA (or ROCm) device. Asked once per interpreter."""
    return _has_cuda(str(python))


@functools.cache
def _has_cuda(python: str) -> bool:
    code = "import torch; print('cuda', torch.cuda.is_available())"
    done = subprocess.run(
        [python, "-c", code],
        # "-c" puts the current folder on sys.path; there is nothing to import in this one.
        cwd=Path(python).parent,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CheckoutError(
            f"{python} cannot import torch: {_last_line(done.stderr)}. "
            "Repair that environment, or name another with COMFYUI_PYTHON."
        )
    return "cuda True" in done.stdout


def venv_python(venv: Path) -> Path:
    """The path of the interpreter in a virtual environment (which need not exist)."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _is_checkout(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfyui_version.py").is_file()


def _what_is(path: Path) -> str:
    if not path.exists():
        return "which does not exist"
    if not path.is_dir():
        return "which is not a folder"
    names = sorted(p.name for p in path.iterdir())
    if not names:
        return "which is an empty folder"
    return f"a folder with {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def _version(path: Path) -> str:
    text = (path / "comfyui_version.py").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
    return match.group(1) if match else "unknown"


def _find_python(path: Path) -> tuple[Path | None, str | None]:
    explicit = os.environ.get("COMFYUI_PYTHON")
    if explicit:
        named = shutil.which(os.path.expanduser(explicit))
        if named is None:
            raise CheckoutError(
                f"COMFYUI_PYTHON: got {explicit!r}, which is not an executable file; need the "
                "Python that ComfyUI runs in. Correct it, or unset it."
            )
        candidates = [Path(named).absolute()]
    else:
        candidates = [venv_python(path / name) for name in (".venv", "venv")]
        candidates = [p for p in candidates if p.is_file()]
        candidates.append(Path(sys.executable))

    reasons = []
    for python in candidates:
        problem = _python_problem(str(python), str(path))
        if problem is None:
            return python, None
        reasons.append(f"{python} {problem}")
    hint = "set COMFYUI_PYTHON to the Python that ComfyUI runs in"
    return None, f"{'; '.join(reasons)}; {hint}"


def _python_problem(python: str, checkout: str) -> str | None:
    # find_spec only looks: importing torch for every candidate would take seconds each.
    code = (
        "import importlib.util as u; "
        f"print('lacks', *[m for m in {NEEDED_MODULES!r} if u.find_spec(m) is None])"
    )
    try:
        done = subprocess.run(
            [python, "-c", code],
            cwd=checkout,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    if done.returncode or not done.stdout.startswith("lacks"):
        return f"does not run ({_last_line(done.stderr) or f'exit {done.returncode}'})"
    missing = done.stdout.split()[1:]
    return f"lacks {', '.join(missing)}" if missing else None


def _environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what would change how a child Python finds its modules."""
    env = dict(os.environ)
    # ComfyUI imports its own modules from the folder of main.py, which "safe path" leaves out.
    for name in ("PYTHONSAFEPATH", "PYTHONHOME"):
        env.pop(name, None)
    env["PYTHONUNBUFFERED"] = "1"
    env.update(extra or {})
    return env


# ---- a base directory with the pack in it


def link_pack(base_directory: Path, pack_root: Path = PACK_ROOT, name: str = PACK_NAME) -> Path:
    """Make a ComfyUI base directory whose custom_nodes holds the pack; the pack's path in it.

    The pack is a symlink; where links are not allowed, a copy of the files that git does not
    ignore, made anew at each call. Models go below <base>/models, results come below <base>/output.

    Raises:
        CheckoutError: something that we did not put there stands in the pack's place.
    """
    base = Path(base_directory)
    pack_root = Path(pack_root).resolve()
    _make_folders(base)
    target = base / "custom_nodes" / name
    # Beside the copy and not in it, so that the copy holds the pack and nothing else.
    copy_mark = base / f".{name}.copied"
    if target.is_symlink():
        if target.resolve() == pack_root:
            return target
        target.unlink()
    elif target.exists():
        if not copy_mark.is_file():
            raise CheckoutError(
                f"{target} exists and is not a link; need that name free to put the pack there. "
                "Move it away, or use another base directory."
            )
        shutil.rmtree(target)
    copy_mark.unlink(missing_ok=True)
    try:
        target.symlink_to(pack_root, target_is_directory=True)
    except (OSError, NotImplementedError):
        copy_mark.write_text(f"{target} is a copy of {pack_root}\n", encoding="utf-8")
        for file in _pack_files(pack_root):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(pack_root / file, target / file)
    return target


def _make_folders(base: Path) -> None:
    # ComfyUI lists some of these at start without making them first.
    for folder in ("models/diffusion_models", "input", "output", "temp", "user", "custom_nodes"):
        (base / folder).mkdir(parents=True, exist_ok=True)


def _pack_files(pack_root: Path) -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=pack_root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckoutError(
            f"links are not allowed here and git cannot list the files of {pack_root} ({error}); "
            "need one of the two to put the pack into a ComfyUI."
        ) from error
    files = (Path(name) for name in listing.split("\0") if name)
    return [file for file in files if (pack_root / file).is_file()]


# ---- talking to a server


class Client:
    """HTTP to a running ComfyUI.

    Args:
        url: "http://127.0.0.1:8188".
        check_alive: called when there is no answer; raises ServerError if the server is dead.
    """

    def __init__(self, url: str, check_alive: Callable[[], None] | None = None):
        self.url = url
        self._check_alive = check_alive or (lambda: None)
        # A proxy for the outside world must not see requests to the loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """The answer to GET `path` as parsed JSON (None if empty). Raises HttpError, ServerError."""
        return self._answer("GET", path, None, timeout)

    def post(self, path: str, body: Any, timeout: float = 60.0) -> Any:
        """The answer to POST `path` with `body` as JSON. Raises HttpError, ServerError."""
        return self._answer("POST", path, body, timeout)

    def queue(self, prompt: Mapping[str, Any], client_id: str | None = None) -> str:
        """Queue an API-format prompt; its prompt_id.

        Raises:
            PromptRejected: the server refuses it, or part of it.
        """
        body = {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex}
        try:
            answer = self.post("/prompt", body)
        except HttpError as error:
            if isinstance(error.body, dict) and "error" in error.body:
                raise PromptRejected(
                    _as_dict(error.body["error"]), error.body.get("node_errors")
                ) from error
            raise
        prompt_id = answer["prompt_id"]
        if answer.get("node_errors"):
            # ComfyUI runs what is left of such a prompt; half a result is no result here.
            self.post("/queue", {"delete": [prompt_id]})
            self.interrupt(prompt_id)
            raise PromptRejected({}, answer["node_errors"])
        return prompt_id

    def wait(
        self,
        prompt_id: str,
        timeout: float = 600.0,
        on_poll: Callable[[str, float], None] | None = None,
        interval: float = 0.1,
    ) -> dict:
        """The /history entry of a prompt that ended well ("status", "outputs").

        /history says nothing about a prompt that has not ended, and nothing about one that never
        was; so /queue is asked too, and what stands in neither is lost, not awaited.

        Args:
            timeout: seconds.
            on_poll: called at each poll with "pending" or "running" and the seconds waited.

        Raises:
            PromptFailed, PromptInterrupted: it ended otherwise.
            PromptLost: the server does not know it (any more).
            PromptTimeout: `timeout` passed.
            ServerError: the server died or stopped answering.
        """
        start = time.monotonic()
        refused_since = None
        state = "pending"
        while True:
            left = timeout - (time.monotonic() - start)
            if left <= 0:
                raise PromptTimeout(f"prompt {prompt_id}: still {state} after {timeout:g} s")
            try:
                state, entry = self._job(prompt_id, min(30.0, max(1.0, left)))
                refused_since = None
            except _Unreachable as error:
                self._check_alive()
                # A busy server may keep a request waiting for long: only the deadline ends that.
                refused_since = (refused_since or time.monotonic()) if error.refused else None
                if refused_since and time.monotonic() - refused_since > REFUSED_GRACE_S:
                    raise ServerError(
                        f"{self.url} has stopped answering ({error}); prompt {prompt_id} is lost"
                    ) from error
                entry = None
            if state == "done":
                return _check_entry(prompt_id, entry)
            if state == "unknown":
                raise PromptLost(
                    f"prompt {prompt_id}: neither queued, running nor in the history of "
                    f"{self.url}; it was deleted, or the server was restarted"
                )
            if on_poll:
                on_poll(state, time.monotonic() - start)
            time.sleep(interval)

    def run(
        self,
        prompt: Mapping[str, Any],
        timeout: float = 600.0,
        on_poll: Callable[[str, float], None] | None = None,
    ) -> dict:
        """queue() and wait()."""
        return self.wait(self.queue(prompt), timeout, on_poll)

    def object_info(self, node: str | None = None) -> dict:
        """What the server says of its nodes, or of one."""
        return self.get("/object_info" + (f"/{node}" if node else ""))

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Interrupt what runs now, or only the given prompt where the server can tell."""
        self.post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def _job(self, prompt_id: str, timeout: float) -> tuple[str, dict | None]:
        for last_look in (False, True):
            history = self._request("GET", f"/history/{prompt_id}", None, timeout) or {}
            if prompt_id in history:
                return "done", history[prompt_id]
            if last_look:
                break
            queue = self._request("GET", "/queue", None, timeout) or {}
            for key, state in (("queue_running", "running"), ("queue_pending", "pending")):
                if any(item[1] == prompt_id for item in queue.get(key, [])):
                    return state, None
            # Not queued: it may have ended between the two requests, so look once more.
        return "unknown", None

    def _answer(self, method: str, path: str, body: Any, timeout: float) -> Any:
        try:
            return self._request(method, path, body, timeout)
        except _Unreachable as error:
            self._check_alive()
            raise ServerError(f"{method} {self.url}{path}: no answer ({error})") from error

    def _request(self, method: str, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return _parse(answer.read())
        except urllib.error.HTTPError as error:
            raise HttpError(method, path, error.code, _parse(error.read())) from error
        except (OSError, http.client.HTTPException) as error:
            # URLError is an OSError that hides the real one.
            cause = getattr(error, "reason", error)
            cause = cause if isinstance(cause, BaseException) else error
            raise _Unreachable(cause, isinstance(cause, ConnectionRefusedError)) from error


class Server(Client):
    """A ComfyUI of our own on a free port of the loopback, as a context manager.

    Runs with --cpu where the checkout's torch has no CUDA device, without API nodes, with its
    database in memory. Its output goes to <base_directory>/server.log. It is ended on leaving the
    context, and on Linux also when the thread that entered it dies without leaving it.

    Args:
        checkout: one with a `python`.
        base_directory: where ComfyUI's models, custom nodes and output are; see link_pack().
        extra_args: more arguments for main.py.
        port: a fixed port; a free one if None.
        env: variables to add to the server's environment.
        start_timeout: seconds until /system_stats must answer.

    Raises (on entering):
        CheckoutError: the checkout has no Python.
        ServerError: the server ended or did not answer in time.
    """

    def __init__(
        self,
        checkout: Checkout,
        base_directory: Path,
        extra_args: Sequence[str] = (),
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
    ):
        if checkout.python is None:
            raise CheckoutError(f"{checkout.path} cannot be started: {checkout.reason}")
        super().__init__("", self._raise_if_dead)
        self.checkout = checkout
        self.base_directory = Path(base_directory).absolute()
        self.log_path = self.base_directory / "server.log"
        self.extra_args = tuple(extra_args)
        self.port = port
        self._any_port = port is None
        self._env = env
        self._start_timeout = start_timeout
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        _make_folders(self.base_directory)
        attempts = 3 if self._any_port else 1
        for attempt in range(1, attempts + 1):
            try:
                self._start()
                return self
            except BaseException as error:
                self.stop()
                # A free port can be taken by someone else before ComfyUI opens it.
                taken = isinstance(error, ServerError) and "already in use" in str(error).lower()
                if not taken or attempt == attempts:
                    raise
        raise AssertionError("unreachable")

    def __exit__(self, *exc_info) -> None:
        self.stop()

    def command(self) -> list[str]:
        """The command line that starts the server."""
        device = () if has_cuda(self.checkout.python) else ("--cpu",)
        return [
            str(self.checkout.python),
            "main.py",
            "--disable-api-nodes",
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--base-directory",
            str(self.base_directory),
            "--database-url",
            "sqlite:///:memory:",
            *(arg for arg in device if arg not in self.extra_args),
            *self.extra_args,
        ]

    def log_text(self) -> str:
        """Everything the server has printed so far, without colours."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def log_tail(self) -> str:
        """The end of the log, for error texts."""
        text = self.log_text()
        return text if len(text) <= LOG_TAIL_CHARS else "[...]" + text[-LOG_TAIL_CHARS:]

    def stop(self) -> None:
        """End the server and every process it started. Does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process, "SIGTERM")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            # What the server started may outlive it.
            _signal_group(process, "SIGKILL")

    def _start(self) -> None:
        if self._any_port:
            self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = self.command()
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.checkout.path,
                env=_environment(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if _LIBC else None,
            )
        deadline = time.monotonic() + self._start_timeout
        while not self._is_up():
            self._raise_if_dead()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"ComfyUI {self.checkout.version} did not answer within "
                    f"{self._start_timeout:g} s ({' '.join(command)}); the end of its log "
                    f"({self.log_path}):\n{self.log_tail()}"
                )
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            stats = self._request("GET", "/system_stats", None, 5.0)
        except (_Unreachable, HttpError):
            return False
        # Another server may own the port while ours is about to fail on it.
        argv = _as_dict(_as_dict(stats).get("system")).get("argv")
        return argv is None or str(self.base_directory) in argv

    def _raise_if_dead(self) -> None:
        if self._process is None:
            raise ServerError(f"the server of {self.checkout.path} is not running")
        code = self._process.poll()
        if code is not None:
            raise ServerError(
                f"ComfyUI {self.checkout.version} ended with exit code {code} "
                f"({' '.join(self._process.args)}); the end of its log ({self.log_path}):\n"
                f"{self.log_tail()}"
            )


def _check_entry(prompt_id: str, entry: dict) -> dict:
    status = _as_dict(entry.get("status"))
    messages = dict(status.get("messages") or [])
    if "execution_interrupted" in messages:
        at = _as_dict(messages["execution_interrupted"])
        where = f"in node {at.get('node_id')} ({at.get('node_type')})"
        raise PromptInterrupted(f"prompt {prompt_id}: interrupted {where}", entry, {})
    if "execution_error" in messages:
        details = _as_dict(messages["execution_error"])
        raise PromptFailed(
            f"prompt {prompt_id}: node {details.get('node_id')} ({details.get('node_type')}) "
            f"failed: {details.get('exception_type')}: "
            f"{str(details.get('exception_message')).strip()}",
            entry,
            details,
        )
    if status.get("status_str") != "success":
        raise PromptFailed(
            f"prompt {prompt_id}: ended with status {status.get('status_str')!r}, need 'success'",
            entry,
            {},
        )
    return entry


def _error_line(error: dict) -> str:
    parts = (str(error.get(key) or "").strip() for key in ("message", "details"))
    return ": ".join(part for part in parts if part) or str(error.get("type") or error)


def _as_dict(value: Any) -> dict:
    if isinstance(value, dict):
        return value
    return {} if value is None else {"message": str(value)}


def _parse(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    # A parent that is killed cannot stop the server, which would then hold memory for ever.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(process: subprocess.Popen, name: str) -> None:
    if os.name == "nt":
        # No process groups to signal there; SIGKILL has no name either.
        if process.poll() is None:
            process.terminate()
        return
    # No such group, or nobody in it that is ours: everyone has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, getattr(signal, name))
