"""Run prompts on a server one after the other, through all that can happen on the way.

The websocket tells what goes on, /history and /queue tell what is true: a socket that drops costs
details of the progress and nothing else.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .client import Client
from .errors import ComfyError, HttpError, NoAnswer, PromptRejected, ServerError, as_dict
from .graphs import Run
from .job import Job, Outcome, ended, failed
from .preflight import Preflight
from .progress import Display, bar
from .websocket import WebSocket, WebSocketError

POLL_S = 1.0  # without a socket
POLL_BESIDE_SOCKET_S = 5.0  # with one, which may be silently dead
POLL_AT_END_S = 0.1  # once the socket has told the end, until the history has it
HISTORY_GRACE_S = 5.0  # after which the history is taken to have been cleared
BACKOFF_S = (0.25, 10.0)  # first and longest wait before trying again


class ServerLost(ServerError):
    """The server is out of reach for longer than we wait. What is on its way is lost to us."""


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        max_pending: how many of our prompts may be queued or running at once.
        on_lost: "resubmit" (once) or "fail", when the server has forgotten a prompt.
        patience_s: how long a server may be out of reach. "429 Too Many Requests" is an answer.
        prompt_timeout_s: how long a prompt may run; no limit if None.
    """

    max_pending: int = 1
    on_lost: str = "resubmit"
    patience_s: float = 120.0
    prompt_timeout_s: float | None = None


class _Backoff:
    """Growing waits between attempts."""

    def __init__(self):
        self._next = BACKOFF_S[0]

    def next(self, error: Exception | None = None) -> float:
        wait, self._next = self._next, min(2 * self._next, BACKOFF_S[1])
        asked = error.retry_after if isinstance(error, HttpError) else None
        return wait if asked is None else min(asked, 60.0)


class Runner:
    """Runs prompts on one server.

    Args:
        client: the server.
        client_id: ours; messages come under it.
        connect: opens a websocket for it; raises WebSocketError.
        display: told how far it is.

    Attributes:
        total: how many runs there are.
    """

    def __init__(
        self,
        client: Client,
        client_id: str,
        connect: Callable[[], WebSocket],
        display: Display,
        options: Options | None = None,
    ):
        self._client = client
        self._client_id = client_id
        self._connect = connect
        self._display = display
        self._options = options or Options()
        self._preflight = Preflight(client.object_info)
        self._active: dict[str, Job] = {}
        self.total = 0
        self._socket: WebSocket | None = None
        self._connect_at = 0.0
        self._connect_backoff = _Backoff()
        self._told_no_socket = False
        self._poll_at = self._polled = 0.0
        self._silent_since: float | None = None
        self._silent_backoff = _Backoff()

    def run_all(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        """The outcome of every run, as they end.

        Raises:
            ServerLost: see `patience_s`; abandon() then tells what was on its way.
        """
        self.total = len(runs)
        todo = deque(enumerate(runs, 1))
        while todo or self._active:
            self._open_socket()
            while todo and len(self._active) < self._options.max_pending:
                number, run = todo.popleft()
                graph, notes, problems = self._preflight.check(run.graph)
                job = Job(run, number, graph, notes)
                outcome = self._refused(job, problems) if problems else self._submit(job)
                if outcome:
                    yield outcome
            if self._active:
                yield from self._tick()
        self.close()

    def cancel(self) -> list[Outcome]:
        """Take back what is queued or running, of ours only; the outcomes."""
        jobs = list(self._active.values())
        message = "cancelled"
        try:
            if jobs:
                self._client.withdraw([job.prompt_id for job in jobs])
        except ComfyError as error:
            message = f"cancelled, but it may go on running: {error}"
        return self.abandon("interrupted", message)

    def abandon(self, status: str, message: str) -> list[Outcome]:
        """Outcomes for what is on its way, without asking the server."""
        jobs, self._active = list(self._active.values()), {}
        self.close()
        return [failed(job, status, status, message) for job in jobs]

    def close(self) -> None:
        """Close the websocket."""
        if self._socket:
            self._socket.close()
        self._socket = None

    # -- queueing

    def _submit(self, job: Job) -> Outcome | None:
        """Queue a job; an outcome if it is refused."""
        job.renew(self._socket is not None)
        # Before it is sent, so that it is taken back if we are stopped right here.
        self._active[job.prompt_id] = job
        start, backoff, crashes = time.monotonic(), _Backoff(), 0
        while True:
            try:
                prompt_id = self._client.queue(job.graph, self._client_id, job.prompt_id)
            except PromptRejected as error:
                return self._refused(job, error.lines or [str(error)])
            except (NoAnswer, HttpError) as error:
                problem = error
                if isinstance(error, HttpError) and not error.temporary:
                    return self._refused(job, [str(error)])
                # A server that fails by itself on this graph will do so again.
                crashes += isinstance(error, HttpError) and error.status == 500
            else:
                # A server that does not take our id has given it one.
                del self._active[job.prompt_id]
                job.prompt_id = prompt_id
                self._active[prompt_id] = job
                break
            if self._arrived(job):
                break
            if crashes >= 3:
                return self._refused(job, [str(problem)])
            wait = backoff.next(problem)
            if isinstance(problem, HttpError) and problem.status == 429:
                start = time.monotonic()  # alive and busy, however long
            if time.monotonic() + wait - start > self._options.patience_s:
                raise ServerLost(f"{problem}; gave up after {self._options.patience_s:g} s")
            self._display.live(self._head(job), f"can't be queued yet: {problem}; trying again")
            time.sleep(wait)
        self._silent_since, self._poll_at = None, 0.0
        return None

    def _arrived(self, job: Job) -> bool:
        """Whether the server knows the job after all, though its answer was lost."""
        with contextlib.suppress(ComfyError):
            return self._client.jobs([job.prompt_id])[job.prompt_id].state != "unknown"
        return False

    def _refused(self, job: Job, lines: Sequence[str]) -> Outcome:
        self._active.pop(job.prompt_id, None)
        return failed(job, "refused", "refused", "\n".join(lines))

    # -- following

    def _tick(self) -> Iterator[Outcome]:
        wait = min(max(0.0, self._poll_at - time.monotonic()), 0.5)
        if self._socket:
            self._listen(wait)
        else:
            time.sleep(min(wait, 0.2))
        if time.monotonic() >= self._poll_at or any(map(self._is_late, self._active.values())):
            yield from self._poll()
        self._show()

    def _poll(self) -> Iterator[Outcome]:
        self._listen_to_all()
        self._polled = time.monotonic()
        # Set before asking: what is heard meanwhile may bring the next poll forward.
        pause = POLL_BESIDE_SOCKET_S if self._socket else POLL_S
        self._poll_at = self._polled + pause
        try:
            states = self._client.jobs(list(self._active))
        except (NoAnswer, HttpError) as error:
            self._poll_at = self._polled + self._unanswered(error)
            return
        self._silent_since, self._silent_backoff = None, _Backoff()
        # Again, before anything is concluded: a server that was started anew has closed the socket.
        self._listen_to_all()
        for prompt_id, now in states.items():
            job = self._active[prompt_id]
            if now.state == "done":
                outcome = ended(job, now.entry)
            elif now.state == "unknown":
                outcome = self._unknown(job)
            else:
                job.ahead = now.ahead
                if now.state == "running":
                    job.set_running()
                outcome = self._stop_if_late(job)
            if outcome:
                self._active.pop(prompt_id, None)
                yield outcome
        if any(job.ended for job in self._active.values()):
            self._poll_at = self._polled + POLL_AT_END_S

    def _unanswered(self, error: ComfyError) -> float:
        """A poll has failed; seconds until the next. Raises ServerLost."""
        now = time.monotonic()
        if isinstance(error, HttpError) and not error.temporary:
            raise ServerLost(str(error)) from error
        self._silent_since = self._silent_since or now
        if now - self._silent_since > self._options.patience_s:
            raise ServerLost(f"{error}; gave up after {self._options.patience_s:g} s") from error
        for job in self._active.values():
            self._display.live(self._head(job), f"no answer for {now - self._silent_since:.0f} s")
        return self._silent_backoff.next(error)

    def _unknown(self, job: Job) -> Outcome | None:
        """The server neither runs nor queues it, and the history has no entry."""
        entry = job.heard_entry()
        if job.ended and entry:
            if time.monotonic() - job.ended < HISTORY_GRACE_S:
                return None
            job.notes.append("the history has no entry of it; this is what the websocket told")
            return ended(job, entry)
        if job.unbroken:
            return failed(
                job, "interrupted", "removed", "somebody removed it from the server's queue"
            )
        if self._options.on_lost == "resubmit" and not job.resubmitted:
            job.resubmitted += 1
            job.notes.append(f"the server no longer knew prompt {job.prompt_id}; queued again")
            self._display.line(f"{self._head(job)}: the server has forgotten it; queued again")
            del self._active[job.prompt_id]
            return self._submit(job)
        return failed(
            job,
            "lost",
            "lost",
            f"prompt {job.prompt_id} is neither queued, running nor in the history: the server "
            "was restarted, or the prompt was deleted",
        )

    def _is_late(self, job: Job) -> bool:
        limit = self._options.prompt_timeout_s
        if limit is None or not job.running_since:
            return False
        return time.monotonic() - job.running_since >= limit

    def _stop_if_late(self, job: Job) -> Outcome | None:
        if not self._is_late(job):
            return None
        limit = self._options.prompt_timeout_s
        with contextlib.suppress(ComfyError):
            self._client.withdraw([job.prompt_id])
        return failed(job, "error", "timeout", f"not done after running for {limit:g} s; cancelled")

    # -- the websocket

    def _open_socket(self) -> None:
        if self._socket or time.monotonic() < self._connect_at:
            return
        try:
            self._socket = self._connect()
            self._connect_backoff = _Backoff()
        except WebSocketError as error:
            self._connect_at = time.monotonic() + self._connect_backoff.next()
            if not self._told_no_socket:
                self._told_no_socket = True
                self._display.line(f"no websocket ({error}); asking for the progress instead")

    def _listen(self, timeout: float) -> bool:
        """Take in one message; False if there is none."""
        try:
            message = self._socket.receive(timeout) if self._socket else None
        except WebSocketError:
            self.close()
            self._connect_at = time.monotonic() + self._connect_backoff.next()
            self._poll_at = 0.0
            for job in self._active.values():
                job.unbroken = job.complete = False
            return False
        if isinstance(message, str):
            self._hear(message)
        return message is not None

    def _listen_to_all(self) -> None:
        while self._listen(0.0):
            pass

    def _hear(self, message: str) -> None:
        try:
            message = as_dict(json.loads(message))
        except ValueError:
            return
        kind, data = str(message.get("type")), as_dict(message.get("data"))
        if kind == "status":
            # The queue has changed; so may have our place in it.
            if any(job.state == "pending" for job in self._active.values()):
                self._poll_at = min(self._poll_at, self._polled + POLL_S)
            return
        job = self._active.get(str(data.get("prompt_id")))
        if job is None and kind == "executing" and "prompt_id" not in data:
            # To a socket that has come back; it names the node only.
            job = next((j for j in self._active.values() if j.state == "running"), None)
            if job is None or data.get("node") is None:
                return
        if job:
            job.hear(kind, data)
            if job.ended:
                self._poll_at = 0.0

    # -- showing

    def _head(self, job: Job) -> str:
        return f"[{job.number}/{self.total}] {job.run.label}"

    def _show(self) -> None:
        jobs = sorted(self._active.values(), key=lambda job: (job.state != "running", job.ahead))
        if not jobs or self._silent_since:
            return
        job = jobs[0]
        head = self._head(job)
        if job.state == "pending":
            if job.ahead:
                self._display.live(f"{head}: waiting, {job.ahead} before it")
            return
        what, detail = f"{head}: running", ""
        if job.doing:
            node, step, steps = job.doing
            what = f"{head}: {job.describe_node(node)}"
            detail = f"{bar(step, steps)} {step}/{steps}" if steps > 0 else ""
        seconds = time.monotonic() - (job.running_since or job.submitted)
        self._display.live(what, f"{detail} {seconds:.0f} s".strip())
