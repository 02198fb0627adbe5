"""A small ComfyUI: HTTP, websocket, a queue and one worker. What its nodes do follows from their class.

Sample     three progress messages
Wait       waits until `gate` is set, or until it is interrupted
Fail       raises
Bad        is refused when queued
Save       lists the files in its input "files", as the server would
Text       shows its input "text"
HopperSolRunReport   shows its input "report" as JSON
anything else        nothing
"""

import base64
import contextlib
import hashlib
import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA


def frame(opcode, payload, final=True):
    """A frame as a server sends it."""
    size = len(payload)
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        head += bytes([size])
    elif size < 65536:
        head += bytes([126]) + struct.pack(">H", size)
    else:
        head += bytes([127]) + struct.pack(">Q", size)
    return head + payload


def fragments(opcode, payload, count):
    """The frames of a message in `count` pieces, with a ping between them."""
    size = -(-len(payload) // count)
    pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
    frames = []
    for index, piece in enumerate(pieces):
        frames.append(frame(0 if index else opcode, piece, index == len(pieces) - 1))
        if index < len(pieces) - 1:
            frames.append(frame(PING, b"between"))
    return b"".join(frames)


def read_frame(file):
    """(opcode, payload) of a frame as a client sends it, which must be masked."""
    first, second = file.read(2)
    assert second & 0x80, "a client has to mask"
    size = second & 0x7F
    assert size < 126
    mask, payload = file.read(4), file.read(size)
    return first & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


class Interrupted(Exception):
    pass


class FakeComfy:
    """Runs on a free port of the loopback.

    Args:
        base: base path.
        auth: Authorization that every request must have.
        tls: an ssl.SSLContext for https.

    Attributes to set:
        failures: {"METHOD /path": [what to do instead, ...]}, each used up once: a status, or
            (status, headers), or "drop" (no answer), or "drop after" (do it, then no answer).
        files: {(filename, subfolder, type): bytes} for /view.
        missing: node classes it has not; choices: {class: {input: [...]}}.
        fragment: messages of the socket come in so many pieces.
        deaf: no websocket.
        on_message: called with the kind of each message about a prompt before it is sent.
        forgetful: nothing gets into the history.
    """

    def __init__(self, base="", auth=None, tls=None):
        self.base, self.auth, self.tls = base, auth, tls
        self.failures, self.files, self.missing, self.choices = {}, {}, set(), {}
        self.fragment, self.deaf, self.forgetful = 1, False, False
        self.on_message = lambda kind: None
        self.requests, self.received, self.heard = [], [], []
        self.gate = threading.Event()
        self.lock = threading.RLock()
        self.sockets = {}
        self.running, self.pending, self.history, self.stopped = None, [], {}, set()
        self.node = None  # id of the node at work, or of the last one
        self.number = 0
        fake = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # a client that is gone

        class BoundHandler(Handler):
            comfy = fake

        self.server = Server(("127.0.0.1", 0), BoundHandler)
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}{base}"
        self.alive = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        threading.Thread(target=self.work, daemon=True).start()

    def close(self):
        # First of all: what comes to its end now must not be told any more.
        self.server.shutdown()
        self.server.server_close()
        self.alive = False
        self.drop_sockets()
        self.gate.set()

    # -- what tests do to it

    def drop_sockets(self, half_a_frame=False):
        """Close every websocket, in the middle of a frame if asked."""
        with self.lock:
            for handler in self.sockets.values():
                with contextlib.suppress(OSError):
                    if half_a_frame:
                        handler.wfile.write(frame(TEXT, b"x" * 300)[:100])
                    handler.connection.shutdown(2)
            self.sockets = {}

    def restart(self):
        """As a server that was killed and started anew: it knows nothing."""
        with self.lock:
            if self.running:
                self.stopped.add(self.running[1])
            self.running, self.pending, self.history = None, [], {}
            self.drop_sockets()

    def interrupt(self):
        """As somebody else's cancel button."""
        with self.lock:
            self.stopped.add(self.running[1])

    def queue_others(self, *ids):
        """Other people's prompts that come first; they wait for the gate."""
        graph = {"1": {"class_type": "Wait", "inputs": {}}}
        with self.lock:
            for prompt_id in ids:
                self.number += 1
                self.pending.append([self.number, prompt_id, graph, {"client_id": "other"}, []])

    def wait_for(self, condition, timeout=10):
        """Wait until condition() holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    def called(self, key):
        """How often "METHOD /path" was asked for."""
        return sum(1 for request in self.requests if request.startswith(key))

    # -- its life

    def send(self, client_id, kind, data):
        payload = json.dumps({"type": kind, "data": data}).encode()
        self.send_raw(client_id, fragments(TEXT, payload, self.fragment))

    def send_raw(self, client_id, data):
        with self.lock:
            handler = self.sockets.get(client_id)
            if handler:
                with contextlib.suppress(OSError):
                    handler.wfile.write(data)

    def work(self):
        while self.alive:
            with self.lock:
                self.running = item = self.pending.pop(0) if self.pending else None
            if item is None:
                time.sleep(0.002)
                continue
            self.run(item)

    def run(self, item):
        _, prompt_id, graph, extra, _ = item
        client, messages, outputs = extra["client_id"], [], {}

        def say(kind, **data):
            data = {"prompt_id": prompt_id, **data}
            if kind.startswith("execution"):
                data["timestamp"] = int(time.time() * 1000)
                messages.append([kind, data])
            self.on_message(kind)
            with self.lock:
                if self.running is item:  # a server that was killed says nothing
                    self.send(client, kind, data)

        def pause():
            if prompt_id in self.stopped:
                raise Interrupted

        say("execution_start")
        say("execution_cached", nodes=[i for i, n in graph.items() if n["class_type"] == "Cached"])
        status, node_id = "success", None
        try:
            for node_id, node in graph.items():
                pause()
                self.node = node_id
                say("executing", node=node_id, display_node=node_id)
                shown = self.run_node(node_id, node, say, pause)
                if shown:
                    outputs[node_id] = shown
                    say("executed", node=node_id, output=shown)
            say("execution_success")
        except Interrupted:
            status = "error"
            say("execution_interrupted", node_id=node_id, node_type=graph[node_id]["class_type"])
        except ValueError as error:
            status = "error"
            say(
                "execution_error",
                node_id=node_id,
                node_type=graph[node_id]["class_type"],
                exception_type="ValueError",
                exception_message=str(error),
                traceback=["a", "b"],
            )
        with self.lock:
            if self.running is not item:
                return
            self.running = None
            if not self.forgetful:
                done = {"status_str": status, "completed": True, "messages": messages}
                self.history[prompt_id] = {"prompt": item, "outputs": outputs, "status": done}
        self.send(client, "executing", {"node": None, "prompt_id": prompt_id})

    def run_node(self, node_id, node, say, pause):
        kind, inputs = node["class_type"], node["inputs"]
        if kind == "Sample":
            for step in (1, 2, 3):
                say("progress", value=step, max=3, node=node_id)
        elif kind == "Wait":
            until = time.monotonic() + 20  # a test that fails is not to hang
            while not self.gate.wait(0.005) and time.monotonic() < until:
                pause()
        elif kind == "Fail":
            raise ValueError("tau: got 9, need -1000 .. 8")
        elif kind == "Save":
            return {"images": inputs["files"], "animated": [True]}
        elif kind == "Text":
            return {"text": [inputs["text"]]}
        elif kind == "HopperSolRunReport":
            return {"text": ["finished"], "json": [json.dumps(inputs["report"])]}
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    comfy: FakeComfy

    def log_message(self, *args):
        pass

    def answer(self, status, data=None, headers=()):
        body = (
            data if isinstance(data, bytes) else b"" if data is None else json.dumps(data).encode()
        )
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        comfy = self.comfy
        path = self.path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not path.startswith(comfy.base + "/"):
            return self.answer(404)
        path = path[len(comfy.base) :]
        key = f"{self.command} {path.split('?')[0]}"
        comfy.requests.append(f"{self.command} {path}")
        if comfy.auth and self.headers.get("Authorization") != comfy.auth:
            return self.answer(401, {"error": f"not {self.headers.get('Authorization')}"})
        queue = comfy.failures.get(key)
        if queue:
            failure = queue.pop(0)
            if failure == "drop after":
                self.answer = lambda *args, **kwargs: None
                self.serve(key, path, body)
            if failure in ("drop", "drop after"):
                self.close_connection = True
                return None
            if callable(failure):
                failure()
            else:
                status, headers = failure if isinstance(failure, tuple) else (failure, {})
                return self.answer(status, None, headers)
        return self.serve(key, path, body)

    do_POST = do_GET

    def serve(self, key, path, body):
        comfy = self.comfy
        query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        if key == "GET /ws":
            return self.websocket(query["clientId"])
        data = json.loads(body) if body else None
        with comfy.lock:
            if key == "GET /system_stats":
                return self.answer(200, {"system": {"comfyui_version": "0.33.0"}})
            if key.startswith("GET /object_info/"):
                name = path.split("/")[-1]
                required = {
                    key: [choices, {}] for key, choices in comfy.choices.get(name, {}).items()
                }
                info = {name: {"input": {"required": required}}}
                return self.answer(200, {} if name in comfy.missing else info)
            if key == "GET /queue":
                running = [comfy.running] if comfy.running else []
                # As ComfyUI's heap: not in the order in which they run.
                pending = comfy.pending[:1] + comfy.pending[:0:-1]
                return self.answer(200, {"queue_running": running, "queue_pending": pending})
            if key.startswith("GET /history/"):
                prompt_id = path.split("/")[-1]
                found = comfy.history.get(prompt_id)
                return self.answer(200, {prompt_id: found} if found else {})
            if key == "POST /queue":
                comfy.pending = [p for p in comfy.pending if p[1] not in data["delete"]]
                return self.answer(200)
            if key == "POST /interrupt":
                if comfy.running and comfy.running[1] == data.get("prompt_id"):
                    comfy.stopped.add(data["prompt_id"])
                return self.answer(200)
            if key == "GET /view":
                place = (query["filename"], query.get("subfolder", ""), query["type"])
                found = comfy.files.get(place)
                return self.answer(404) if found is None else self.answer(200, found)
            if key == "POST /prompt":
                return self.queue(data)
        return self.answer(404)

    def queue(self, data):
        comfy = self.comfy
        comfy.received.append(data)
        graph = data["prompt"]
        bad = {i: n for i, n in graph.items() if n["class_type"] == "Bad"}
        if bad:
            item = {"type": "value_bigger", "message": "Value 99 too big", "details": "tau"}
            errors = {i: {"class_type": "Bad", "errors": [item]} for i in bad}
            error = {"type": "invalid", "message": "No valid outputs", "details": "Value 99"}
            return self.answer(400, {"error": error, "node_errors": errors})
        comfy.number += 1
        extra = {"client_id": data["client_id"]}
        comfy.pending.append([comfy.number, data["prompt_id"], graph, extra, []])
        return self.answer(
            200, {"prompt_id": data["prompt_id"], "number": comfy.number, "node_errors": {}}
        )

    def websocket(self, client_id):
        comfy = self.comfy
        if comfy.deaf:
            return self.answer(404)
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        with comfy.lock:
            comfy.sockets[client_id] = self
        comfy.send(client_id, "status", {"sid": client_id})
        self.close_connection = True
        with contextlib.suppress(OSError, ValueError):
            while True:
                opcode, payload = read_frame(self.rfile)
                comfy.heard.append((opcode, payload))
                if opcode == CLOSE:
                    break
        return None
