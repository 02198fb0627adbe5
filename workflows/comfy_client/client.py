"""HTTP to a running ComfyUI."""

import contextlib
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from .errors import (
    ComfyError,
    HttpError,
    NoAnswer,
    PromptFailed,
    PromptInterrupted,
    PromptLost,
    PromptRejected,
    PromptTimeout,
    ServerError,
    as_dict,
)

# A connection refused on the loopback means that nothing listens; this is how long we believe
# that it comes back (a server that is being restarted by hand).
REFUSED_GRACE_S = 5.0


@dataclass(frozen=True)
class JobState:
    """Where a prompt stands.

    Attributes:
        state: "pending", "running", "done" or "unknown".
        entry: its /history entry if done.
        ahead: how many prompts run before it if pending.
    """

    state: str
    entry: dict | None = None
    ahead: int = 0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # urllib would take our headers, the secret ones too, to wherever the server points.
    def redirect_request(self, *args, **kwargs):
        return None


class Client:
    """HTTP to a running ComfyUI.

    Args:
        url: "http://127.0.0.1:8188", or with a base path "https://host/comfy".
        check_alive: called when there is no answer; raises ServerError if the server is dead.
        headers: sent with every request.
        tls: for https.
        timeout: seconds that a request may stand still.
        use_proxy: ask the proxies that the environment names; off, because a proxy for the outside
            world must not see requests to the loopback.
    """

    def __init__(
        self,
        url: str,
        check_alive: Callable[[], None] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 30.0,
        use_proxy: bool = False,
    ):
        self.url = url
        self.timeout = timeout
        self._headers = dict(headers or {})
        self._check_alive = check_alive or (lambda: None)
        handlers: list[Any] = [_NoRedirect()]
        if not use_proxy:
            handlers.append(urllib.request.ProxyHandler({}))
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, timeout: float | None = None) -> Any:
        """The answer to GET `path` as parsed JSON (None if empty). Raises HttpError, ServerError."""
        return self._json("GET", path, None, timeout)

    def post(self, path: str, body: Any, timeout: float | None = None) -> Any:
        """The answer to POST `path` with `body` as JSON. Raises HttpError, ServerError."""
        return self._json("POST", path, body, timeout)

    def queue(
        self, prompt: Mapping[str, Any], client_id: str | None = None, prompt_id: str | None = None
    ) -> str:
        """Queue an API-format prompt; its prompt_id.

        Args:
            prompt: node id -> {"class_type", "inputs"}.
            client_id: whose websocket hears of it.
            prompt_id: the id to give it, a UUID; the server chooses one if None.

        Raises:
            PromptRejected: the server refuses it, or part of it.
        """
        body = {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex}
        if prompt_id:
            body["prompt_id"] = prompt_id
        try:
            # Checking a graph can take long: files are opened for it.
            answer = self.post("/prompt", body, max(60.0, self.timeout))
        except HttpError as error:
            if isinstance(error.body, dict) and "error" in error.body and error.status == 400:
                raise PromptRejected(
                    as_dict(error.body["error"]), error.body.get("node_errors")
                ) from error
            raise
        if not isinstance(answer, dict) or not isinstance(answer.get("prompt_id"), str):
            raise ServerError(
                f"POST {self.url}/prompt: the answer has no prompt_id; not a ComfyUI?"
            )
        prompt_id = answer["prompt_id"]
        if answer.get("node_errors"):
            # ComfyUI runs what is left of such a prompt; half a result is no result here.
            with contextlib.suppress(ComfyError):
                self.withdraw([prompt_id])
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

        Polls only: for a server that is near. runner.py is the one that also survives.

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
                job = self.jobs([prompt_id], min(30.0, max(1.0, left)))[prompt_id]
                refused_since = None
            except NoAnswer as error:
                # A busy server may keep a request waiting for long: only the deadline ends that.
                refused_since = (refused_since or time.monotonic()) if error.refused else None
                if refused_since and time.monotonic() - refused_since > REFUSED_GRACE_S:
                    raise ServerError(
                        f"{self.url} has stopped answering ({error}); prompt {prompt_id} is lost"
                    ) from error
            else:
                state = job.state
                if state == "done":
                    return check_entry(prompt_id, job.entry)
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

    def jobs(self, prompt_ids: Iterable[str], timeout: float | None = None) -> dict[str, JobState]:
        """Where each prompt stands.

        /history says nothing about a prompt that has not ended, and nothing about one that never
        was; so /queue is asked too, and what stands in neither is "unknown".
        """
        found: dict[str, JobState] = {}
        ids = list(prompt_ids)

        def look_into_history():
            for prompt_id in ids:
                if prompt_id not in found:
                    history = as_dict(self.get(f"/history/{quote(prompt_id)}", timeout))
                    if prompt_id in history:
                        found[prompt_id] = JobState("done", as_dict(history[prompt_id]))

        look_into_history()
        if len(found) < len(ids):
            running, pending = self.queued(timeout)
            for prompt_id in ids:
                if prompt_id in found:
                    continue
                if prompt_id in running:
                    found[prompt_id] = JobState("running")
                elif prompt_id in pending:
                    ahead = len(running) + pending.index(prompt_id)
                    found[prompt_id] = JobState("pending", ahead=ahead)
        if len(found) < len(ids):
            # Not queued: it may have ended between the two requests, so look once more.
            look_into_history()
        return {prompt_id: found.get(prompt_id, JobState("unknown")) for prompt_id in ids}

    def queued(self, timeout: float | None = None) -> tuple[list[str], list[str]]:
        """Ids of the prompts that run, and of those that wait, the next one first."""
        queue = as_dict(self.get("/queue", timeout))
        # The pending ones come as a heap; the number in front is their order.
        pending = sorted(queue.get("queue_pending") or [], key=lambda item: item[0])
        return [item[1] for item in queue.get("queue_running") or []], [i[1] for i in pending]

    def object_info(self, node: str | None = None) -> dict:
        """What the server says of its nodes, or of one ({} if it has no such node)."""
        return self.get("/object_info" + (f"/{quote(node, safe='')}" if node else ""))

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Interrupt what runs now, or only the given prompt where the server can tell."""
        self.post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def withdraw(self, prompt_ids: Iterable[str]) -> None:
        """Take prompts back: from the queue, or by an interrupt if one of them runs.

        Other people's prompts are left alone: a server so old that its interrupt takes no id is
        only asked to interrupt if one of these is what it runs.
        """
        ids = list(prompt_ids)
        self.post("/queue", {"delete": ids})
        # In this order: what starts in between is seen running.
        running, _ = self.queued()
        for prompt_id in running:
            if prompt_id in ids:
                self.interrupt(prompt_id)

    @contextlib.contextmanager
    def view(self, filename: str, subfolder: str = "", kind: str = "output") -> Iterator[Any]:
        """An open answer to read a file of the server from; `length` is its size or None.

        Raises:
            HttpError: the server has no such file, or does not give it.
            NoAnswer: also while reading.
        """
        query = urlencode({"filename": filename, "subfolder": subfolder, "type": kind})
        path = f"/view?{query}"
        with self._open("GET", path, None, None) as answer, self._no_answer("GET", "/view"):
            yield answer

    def _json(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        with (
            self._open(method, path, body, timeout) as answer,
            self._no_answer(method, path),
        ):
            data = answer.read()
        value = _parse(data)
        if isinstance(value, str):
            raise ServerError(
                f"{method} {self.url}{path}: the answer is no JSON ({value.strip()[:80]!r}); "
                "check the address and its base path, and whether something asks for a login"
            )
        return value

    def _open(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = dict(self._headers)
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._no_answer(method, path):
                return self._opener.open(request, timeout=timeout or self.timeout)
        except urllib.error.HTTPError as error:
            with error, self._no_answer(method, path):
                text = _parse(error.read())
            if 300 <= error.code < 400:
                place = error.headers.get("Location", "nowhere")
                text = f"redirects to {place}; if that is the server, pass its address as --server"
            raise HttpError(method, path, error.code, text, _retry_after(error.headers)) from None

    @contextlib.contextmanager
    def _no_answer(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            # URLError is an OSError that hides the real one.
            cause = getattr(error, "reason", error)
            cause = cause if isinstance(cause, BaseException) else error
            self._check_alive()
            hint = ""
            if isinstance(cause, ssl.SSLCertVerificationError):
                hint = "; --insecure switches the check off"
            raise NoAnswer(
                f"{method} {self.url}{path}: no answer ({type(cause).__name__}: {cause}{hint})",
                isinstance(cause, ConnectionRefusedError),
            ) from error


def check_entry(prompt_id: str, entry: dict) -> dict:
    """`entry` if it is one of a prompt that ended well. Raises PromptFailed, PromptInterrupted."""
    status = as_dict(entry.get("status"))
    messages = entry_messages(entry)
    if "execution_interrupted" in messages:
        at = messages["execution_interrupted"]
        where = f"in node {at.get('node_id')} ({at.get('node_type')})"
        raise PromptInterrupted(f"prompt {prompt_id}: interrupted {where}", entry, at)
    if "execution_error" in messages:
        details = messages["execution_error"]
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


def entry_messages(entry: dict) -> dict[str, dict]:
    """The messages in a /history entry, by their names."""
    messages = as_dict(entry.get("status")).get("messages") or []
    return {item[0]: as_dict(item[1]) for item in messages if len(item) == 2}


def _parse(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # A text is what this function returns for what is no JSON.
    return {"message": value} if isinstance(value, str) else value


def _retry_after(headers: Any) -> float | None:
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None  # absent, or a date, which is rare and not worth a parser
