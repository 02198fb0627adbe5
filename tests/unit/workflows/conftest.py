"""The scripts in workflows/ are no package: load them by path, as their users run them."""

import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _load(name, folder=ROOT / "workflows"):
    full_name = f"hopper_sol_workflow_{name}"
    if full_name not in sys.modules:
        path = folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(full_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture
def tiny_wan():
    return _load("tiny_wan")


@pytest.fixture
def tiny_h3():
    return _load("tiny_h3")


@pytest.fixture
def comfy_local(demo):
    # The one that demo.py loaded, so that a test can use both and meet the same classes.
    return demo.comfy_local


@pytest.fixture
def comfy_client(comfy_local):
    return comfy_local.comfy_client


@pytest.fixture
def queue_prompt():
    return _load("queue_prompt")


@pytest.fixture
def fake_comfy():
    """The module of the stand-in for a server."""
    return _load("fake_comfy", Path(__file__).parent)


@pytest.fixture
def demo():
    return _load("demo")


@pytest.fixture
def make_checkout():
    """Make the files by which a ComfyUI checkout is known, in a given folder."""

    def make(path, version="0.33.0"):
        path.mkdir(parents=True)
        (path / "main.py").write_text("")
        (path / "comfyui_version.py").write_text(f'# generated\n__version__ = "{version}"\n')
        return path

    return make


class AnswerTable:
    """An HTTP server that answers from a table: "METHOD path" -> answers, the last one for ever.

    An answer is (status, JSON-able body), or a function that returns one.
    """

    def __init__(self):
        self.answers = {}
        self.requests = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self):
                key = f"{self.command} {self.path}"
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.requests.append((key, json.loads(body) if body else None))
                queue = fake.answers.get(key) or [(404, None)]
                answer = queue.pop(0) if len(queue) > 1 else queue[0]
                status, data = answer() if callable(answer) else answer
                text = b"" if data is None else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = _serve

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake():
    server = AnswerTable()
    yield server
    server.close()
