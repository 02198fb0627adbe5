"""workflows/comfy_local.py: which ComfyUI is found, and how one is started and ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# ---- finding a checkout


@pytest.fixture
def home(comfy_local, tmp_path, monkeypatch):
    """An empty home, no variables set, and every Python good until a test says otherwise."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("USERPROFILE", str(path))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("COMFYUI_PYTHON", raising=False)
    monkeypatch.setattr(comfy_local, "_python_problem", lambda python, checkout: None)
    return path


@pytest.fixture
def pack(tmp_path):
    path = tmp_path / "elsewhere" / "comfyui-hopper-sol"
    path.mkdir(parents=True)
    return path


def _add_python(checkout, comfy_local, venv=".venv"):
    python = comfy_local.venv_python(checkout / venv)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    return python


def test_find_comfyui_nothing(comfy_local, home, pack):
    assert comfy_local.find_comfyui(pack) == []
    assert comfy_local.usable([]) is None


def test_find_comfyui_order(comfy_local, home, tmp_path, make_checkout):
    enclosing = make_checkout(tmp_path / "enclosing", "0.3.64")
    pack = enclosing / "custom_nodes" / "comfyui-hopper-sol"
    own = make_checkout(pack / ".demo" / "ComfyUI")
    second = make_checkout(home / "comfy" / "ComfyUI-b")
    first = make_checkout(home / "comfy" / "ComfyUI")
    (home / "comfy" / "ComfyUI-no-main").mkdir()
    make_checkout(home / "comfy" / "Other")

    found = comfy_local.find_comfyui(pack)
    assert [c.path for c in found] == [enclosing, first, second, own]
    assert [c.version for c in found] == ["0.3.64", "0.33.0", "0.33.0", "0.33.0"]


def test_find_comfyui_lists_a_checkout_once(comfy_local, home, make_checkout):
    checkout = make_checkout(home / "comfy" / "ComfyUI")
    (home / "comfy" / "ComfyUI-link").symlink_to(checkout)
    pack = checkout / "custom_nodes" / "hopper"
    pack.mkdir(parents=True)
    assert [c.path for c in comfy_local.find_comfyui(pack)] == [checkout]


def test_find_comfyui_path_is_the_only_one(comfy_local, home, pack, monkeypatch, make_checkout):
    make_checkout(home / "comfy" / "ComfyUI")
    chosen = make_checkout(home / "chosen")
    monkeypatch.setenv("COMFYUI_PATH", "~/chosen")
    assert [c.path for c in comfy_local.find_comfyui(pack)] == [chosen]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (None, "which does not exist"),
        ([], "which is an empty folder"),
        (["custom_nodes", "models"], "a folder with custom_nodes, models; need"),
        (["main.py"], "a folder with main.py; need"),
        (list("abcdefgh"), "a folder with a, b, c, d, e, f, ...; need"),
    ],
)
def test_find_comfyui_bad_path(comfy_local, home, pack, tmp_path, monkeypatch, names, found):
    path = tmp_path / "wrong"
    if names is not None:
        path.mkdir()
        for name in names:
            (path / name).write_text("")
    monkeypatch.setenv("COMFYUI_PATH", str(path))
    with pytest.raises(comfy_local.CheckoutError, match=r"^COMFYUI_PATH: got ") as error_info:
        comfy_local.find_comfyui(pack)
    text = str(error_info.value)
    assert str(path) in text and found in text
    assert "main.py and comfyui_version.py" in text and "unset it" in text


def test_find_comfyui_path_is_a_file(comfy_local, home, pack, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "file"))
    with pytest.raises(comfy_local.CheckoutError, match="which is not a folder"):
        comfy_local.find_comfyui(pack)


def test_find_comfyui_python_order(comfy_local, home, pack, monkeypatch, make_checkout):
    checkout = make_checkout(home / "comfy" / "ComfyUI")

    def python():
        return comfy_local.find_comfyui(pack)[0].python

    assert python() == Path(sys.executable)
    venv = _add_python(checkout, comfy_local, "venv")
    assert python() == venv
    dot_venv = _add_python(checkout, comfy_local, ".venv")
    assert python() == dot_venv
    monkeypatch.setattr(
        comfy_local,
        "_python_problem",
        lambda python, checkout: "lacks torch" if python == str(dot_venv) else None,
    )
    assert python() == venv
    monkeypatch.setenv("COMFYUI_PYTHON", sys.executable)
    assert python() == Path(sys.executable)


def test_find_comfyui_python_that_is_none(comfy_local, home, pack, monkeypatch, make_checkout):
    make_checkout(home / "comfy" / "ComfyUI")
    monkeypatch.setenv("COMFYUI_PYTHON", "/no/such/python")
    with pytest.raises(comfy_local.CheckoutError, match="COMFYUI_PYTHON: got '/no/such/python'"):
        comfy_local.find_comfyui(pack)


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins for Python are shell scripts")
def test_find_comfyui_no_usable_python(comfy_local, home, pack, monkeypatch, make_checkout):
    monkeypatch.undo()  # the real _python_problem
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("COMFYUI_PYTHON", raising=False)
    checkout = make_checkout(home / "comfy" / "ComfyUI")
    broken = _add_python(checkout, comfy_local, ".venv")
    poor = _add_python(checkout, comfy_local, "venv")
    poor.write_text("#!/bin/sh\necho lacks aiohttp torch\n")
    # Nothing is installed for this one either, whatever runs the tests.
    bare = home / "python"
    bare.write_text("#!/bin/sh\necho 'boom' >&2\nexit 3\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))

    (found,) = comfy_local.find_comfyui(pack)
    assert found.python is None
    assert found.reason == (
        f"{broken} does not run (exit 1); {poor} lacks aiohttp, torch; {bare} does not run (boom); "
        "set COMFYUI_PYTHON to the Python that ComfyUI runs in"
    )
    assert str(found) == f"ComfyUI 0.33.0 in {checkout}, not usable: {found.reason}"
    assert comfy_local.usable([found]) is None
    with pytest.raises(comfy_local.CheckoutError, match=r"cannot be started: .* lacks aiohttp"):
        comfy_local.Server(found, home)


def test_python_problem_real_python(comfy_local, tmp_path, monkeypatch):
    monkeypatch.setattr(comfy_local, "NEEDED_MODULES", ("json", "torch"))
    assert comfy_local._python_problem(sys.executable, str(tmp_path)) is None
    monkeypatch.setattr(comfy_local, "NEEDED_MODULES", ("json", "no_such_module"))
    assert comfy_local._python_problem(sys.executable, str(tmp_path)) == "lacks no_such_module"


def test_checkout_at_version_unknown(comfy_local, home, make_checkout):
    path = make_checkout(home / "ComfyUI")
    (path / "comfyui_version.py").write_text("version = 3\n")
    assert comfy_local.checkout_at(path).version == "unknown"


# ---- link_pack


@pytest.fixture
def small_pack(tmp_path):
    pack = tmp_path / "pack"
    (pack / "nodes").mkdir(parents=True)
    (pack / "__init__.py").write_text("one")
    (pack / "nodes" / "a.py").write_text("a")
    (pack / "junk.log").write_text("ignored")
    (pack / ".gitignore").write_text("*.log\n")
    return pack


def test_link_pack(comfy_local, small_pack, tmp_path):
    base = tmp_path / "base"
    target = comfy_local.link_pack(base, small_pack)
    assert target == base / "custom_nodes" / "comfyui-hopper-sol"
    assert target.is_symlink() and target.resolve() == small_pack
    for folder in ("models/diffusion_models", "input", "output", "temp", "user"):
        assert (base / folder).is_dir()

    before = target.lstat()
    assert comfy_local.link_pack(base, small_pack) == target
    assert target.lstat() == before


def test_link_pack_replaces_a_link_to_elsewhere(comfy_local, small_pack, tmp_path):
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "custom_nodes" / "name").symlink_to(tmp_path / "gone")
    assert comfy_local.link_pack(base, small_pack, "name").resolve() == small_pack


def test_link_pack_leaves_what_is_not_ours(comfy_local, small_pack, tmp_path):
    base = tmp_path / "base"
    mine = base / "custom_nodes" / "comfyui-hopper-sol" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(comfy_local.CheckoutError, match=r"exists and is not a link.*Move it away"):
        comfy_local.link_pack(base, small_pack)
    assert mine.read_text() == "mine"


def test_link_pack_without_links(comfy_local, small_pack, tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError("a privilege is missing")

    base = tmp_path / "base"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", no_links)
        with pytest.raises(comfy_local.CheckoutError, match="links are not allowed here and git"):
            comfy_local.link_pack(base, small_pack)

        subprocess.run(["git", "init", "-q"], cwd=small_pack, check=True)
        target = comfy_local.link_pack(base, small_pack)

        def files():
            return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())

        assert not target.is_symlink()
        assert files() == [".gitignore", "__init__.py", "nodes/a.py"]

        (small_pack / "nodes" / "a.py").unlink()
        (small_pack / "__init__.py").write_text("two")
        comfy_local.link_pack(base, small_pack)
        assert files() == [".gitignore", "__init__.py"]
        assert (target / "__init__.py").read_text() == "two"

    # Once links work, our own copy makes way for one.
    assert comfy_local.link_pack(base, small_pack).is_symlink()


# ---- Server, with a small main.py in the place of ComfyUI

FAKE_MAIN = r"""
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
print("\x1b[31mhello\x1b[0m", sys.argv[1:], flush=True)
BODY
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({"system": {"argv": sys.argv}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def fake_checkout(comfy_local, tmp_path, make_checkout, monkeypatch):
    monkeypatch.setattr(comfy_local, "has_cuda", lambda python: False)

    def make(body=""):
        path = make_checkout(tmp_path / "ComfyUI")
        (path / "main.py").write_text(FAKE_MAIN.replace("BODY", body))
        return comfy_local.Checkout(path, Path(sys.executable), "0.33.0")

    return make


def _is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed process whose parent has not asked for its end is still listed.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def _gone(pid):
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _is_running(pid)


def test_server(comfy_local, fake_checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    checkout = fake_checkout()
    (checkout.path / "sibling.py").write_text("")
    (checkout.path / "main.py").write_text(
        "import os, sibling\nprint('extra', os.environ['EXTRA'])\n"
        + (checkout.path / "main.py").read_text()
    )
    base = tmp_path / "base"
    with comfy_local.Server(checkout, base, ["--fast"], env={"EXTRA": "yes"}) as server:
        pid = server._process.pid
        argv = server.get("/system_stats")["system"]["argv"]
        assert argv[1:] == [
            "--disable-api-nodes",
            "--listen",
            "127.0.0.1",
            "--port",
            str(server.port),
            "--base-directory",
            str(base),
            "--database-url",
            "sqlite:///:memory:",
            "--cpu",
            "--fast",
        ]
        assert server.log_text().splitlines()[0] == "extra yes"
        assert server.log_text().splitlines()[1].startswith("hello ['--disable-api-nodes'")
        assert (base / "custom_nodes").is_dir()
    assert _gone(pid)
    server.stop()  # a second time does no harm
    with pytest.raises(comfy_local.ServerError, match="is not running"):
        server.get("/system_stats")


def test_server_restart(comfy_local, fake_checkout, tmp_path):
    with comfy_local.Server(fake_checkout(), tmp_path / "base") as server:
        pid, url = server._process.pid, server.url
        server.restart()
        assert server._process.pid != pid and _gone(pid)
        assert server.url == url and server.get("/system_stats")["system"]


def test_server_cuda(comfy_local, fake_checkout, tmp_path, monkeypatch):
    checkout = fake_checkout()
    monkeypatch.setattr(comfy_local, "has_cuda", lambda python: True)
    assert "--cpu" not in comfy_local.Server(checkout, tmp_path, port=1).command()
    asked = comfy_local.Server(checkout, tmp_path, ["--cpu"], port=1).command()
    assert asked.count("--cpu") == 1
    monkeypatch.setattr(comfy_local, "has_cuda", lambda python: False)
    asked = comfy_local.Server(checkout, tmp_path, ["--cpu"], port=1).command()
    assert asked.count("--cpu") == 1


def test_server_ends_at_start(comfy_local, fake_checkout, tmp_path):
    checkout = fake_checkout("raise SystemExit('no frontend')")
    with (
        pytest.raises(comfy_local.ServerError, match="ended with exit code 1") as error_info,
        comfy_local.Server(checkout, tmp_path / "base"),
    ):
        pass
    text = str(error_info.value)
    assert "hello" in text and "no frontend" in text and "server.log" in text


def test_server_never_answers(comfy_local, fake_checkout, tmp_path):
    checkout = fake_checkout("time.sleep(60)")
    server = comfy_local.Server(checkout, tmp_path / "base", start_timeout=1.5)
    with pytest.raises(comfy_local.ServerError, match=r"did not answer within 1\.5 s"):
        server.__enter__()
    assert server._process is None


def test_server_takes_another_port(comfy_local, fake_checkout, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = iter([taken.getsockname()[1], comfy_local._free_port()])
        monkeypatch.setattr(comfy_local, "_free_port", lambda: next(ports))
        # As ComfyUI says it.
        text = "print('error while attempting to bind: address already in use'); raise"
        checkout = fake_checkout()
        main = checkout.path / "main.py"
        head, call = main.read_text().rsplit("HTTPServer(", 1)
        main.write_text(
            f"{head}try:\n    HTTPServer({call.rstrip()}\nexcept OSError:\n    {text}\n"
        )
        with comfy_local.Server(checkout, tmp_path / "base") as server:
            assert server.port != taken.getsockname()[1]

        with (
            pytest.raises(comfy_local.ServerError, match="already in use"),
            comfy_local.Server(checkout, tmp_path / "base", port=taken.getsockname()[1]),
        ):
            pass


def test_server_is_not_taken_for_another_one(comfy_local, fake_checkout, tmp_path, fake):
    # Somebody answers on our port, but it is not the server that we started.
    fake.answers["GET /system_stats"] = [(200, {"system": {"argv": ["main.py"]}})]
    port = int(fake.url.rpartition(":")[2])
    checkout = fake_checkout("time.sleep(1); raise SystemExit('port in use')")
    with (
        pytest.raises(comfy_local.ServerError, match="ended with exit code"),
        comfy_local.Server(checkout, tmp_path / "base", port=port),
    ):
        pass


@pytest.mark.skipif(os.name == "nt", reason="process groups")
def test_server_stop_ends_its_children(comfy_local, fake_checkout, tmp_path):
    # A child that does not react to the polite signal.
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    checkout = fake_checkout(
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(0.5)"
    )
    with comfy_local.Server(checkout, tmp_path / "base") as server:
        line = next(x for x in server.log_text().splitlines() if x.startswith("child"))
        child_pid = int(line.split()[1])
        assert _is_running(child_pid)
    assert _gone(child_pid)


KILLED_PARENT = """
import importlib.util, sys, time
from pathlib import Path

script, checkout, base = map(Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location("comfy_local", script)
comfy_local = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comfy_local)
comfy_local.has_cuda = lambda python: False
checkout = comfy_local.Checkout(checkout, Path(sys.executable), "0.33.0")
with comfy_local.Server(checkout, base) as server:
    print(server._process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_server_ends_with_a_killed_parent(comfy_local, fake_checkout, tmp_path):
    arguments = [comfy_local.__file__, fake_checkout().path, tmp_path / "base"]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as parent:
        server_pid = int(parent.stdout.readline())
        assert _is_running(server_pid)
        parent.kill()
    assert _gone(server_pid)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_server_death_is_seen(comfy_local, fake_checkout, tmp_path):
    with comfy_local.Server(fake_checkout(), tmp_path / "base") as server:
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        with pytest.raises(comfy_local.ServerError, match="ended with exit code -9"):
            server.wait("p", 60)
        with pytest.raises(comfy_local.ServerError, match="ended with exit code -9"):
            server.get("/queue")
