"""Find a ComfyUI on this machine and start it headless on the loopback.

Used by ``demo.py`` and by the tests that need the real server. Standard library only, because it
runs in whatever Python is at hand, while ComfyUI runs in its own. A Server is a comfy_client.Client.

    checkout = usable(find_comfyui())
    link_pack(base, PACK_ROOT)
    with Server(checkout, base) as server:
        entry = server.run(prompt, timeout=120)   # the /history entry of a finished prompt
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACK_ROOT = Path(__file__).absolute().parents[1]
PACK_NAME = "comfyui-hopper-sol"
# Where demo.py puts a ComfyUI of its own when there is none.
DEMO_CHECKOUT = PACK_ROOT / ".demo" / "ComfyUI"
NEEDED_MODULES = ("aiohttp", "torch")

LOG_TAIL_CHARS = 4000

# Loaded here and not in the child between fork and exec, where little is allowed.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _load_client():
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    name = "hopper_sol_comfy_client"
    if name not in sys.modules:
        path = Path(__file__).absolute().parent / "comfy_client" / "__init__.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


comfy_client = _load_client()
Client = comfy_client.Client
ComfyError = comfy_client.ComfyError
HttpError = comfy_client.HttpError
NoAnswer = comfy_client.NoAnswer
ServerError = comfy_client.ServerError


class CheckoutError(ComfyError):
    """COMFYUI_PATH, COMFYUI_PYTHON or a checkout cannot be used."""


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


# ---- a server of our own


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

    def restart(self) -> None:
        """stop(), and start again on the same port."""
        self.stop()
        any_port, self._any_port = self._any_port, False
        try:
            self.__enter__()
        finally:
            self._any_port = any_port

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
            stats = comfy_client.Client(self.url).get("/system_stats", 5.0)
        except (ServerError, HttpError):
            return False
        # Another server may own the port while ours is about to fail on it.
        system = stats.get("system") if isinstance(stats, dict) else None
        argv = system.get("argv") if isinstance(system, dict) else None
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
