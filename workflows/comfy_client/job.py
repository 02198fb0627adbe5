"""A prompt that was queued: what is heard of it, and how it ended."""

import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from .client import check_entry, entry_messages
from .errors import PromptFailed, PromptInterrupted, as_dict
from .graphs import Graph, Run, title_of

# The messages that end a prompt.
_ENDS = {"execution_success": "success", "execution_error": "error"}
_ENDS["execution_interrupted"] = "error"


@dataclass
class Job:
    """A run on its way through a server.

    Attributes:
        run, number: what is run, and as which of all runs, from 1 on.
        graph: what is queued: the run's graph, fitted to the server.
        unbroken: the websocket has been open ever since it was queued, to the same server.
        complete: no message can have been missed.
        state: "pending" or "running"; `ahead` prompts come first.
        doing: (node id, step, number of steps) of what runs now.
    """

    run: Run
    number: int
    graph: Graph
    notes: list[str] = field(default_factory=list)
    prompt_id: str = ""
    unbroken: bool = False
    complete: bool = False
    resubmitted: int = 0
    state: str = "pending"
    ahead: int = 0
    doing: tuple[str, int, int] | None = None
    cached: list[str] = field(default_factory=list)
    node_seconds: dict[str, float] = field(default_factory=dict)
    ended: float | None = None  # when the socket told
    running_since: float | None = None
    _outputs: dict[str, dict] = field(default_factory=dict)
    _end: list = field(default_factory=list)
    _node: tuple[str, float] | None = None

    def __post_init__(self):
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.submitted = time.monotonic()

    def renew(self, socket_open: bool) -> None:
        """Make it ready to be queued: a new id, nothing heard of it yet."""
        # A UUID of our own: when the answer to a POST is lost, it tells whether the prompt was.
        self.prompt_id = str(uuid.uuid4())
        self.unbroken = self.complete = socket_open
        self.state, self.ahead, self.doing = "pending", 0, None
        self.cached, self.node_seconds, self.running_since, self.ended = [], {}, None, None
        self._outputs, self._end, self._node = {}, [], None

    def set_running(self) -> None:
        """It has left the queue."""
        self.state, self.ahead = "running", 0
        self.running_since = self.running_since or time.monotonic()

    def hear(self, kind: str, data: dict) -> None:
        """A message of the server about this prompt."""
        now = time.monotonic()
        if kind in _ENDS:
            self._end_node(now)
            self._end = [kind, data]
            self.ended = self.ended or now
            return
        if kind == "executing" and data.get("node") is None:
            self._end_node(now)
            # The last message of a prompt, after its result has gone into the history.
            self.ended = self.ended or now
            return
        if kind not in ("execution_start", "execution_cached", "executing", "progress", "executed"):
            return
        self.set_running()
        if kind == "execution_cached":
            nodes = data.get("nodes")
            self.cached = [str(node) for node in nodes] if isinstance(nodes, list) else []
        elif kind == "executing":
            self._end_node(now)
            self._node = (str(data["node"]), now)
            self.doing = (str(data["node"]), 0, 0)
        elif kind == "progress":
            step, steps = data.get("value"), data.get("max")
            if isinstance(step, (int, float)) and isinstance(steps, (int, float)):
                self.doing = (str(data.get("node")), int(step), int(steps))
        elif kind == "executed" and data.get("output"):
            self._outputs[str(data.get("node"))] = as_dict(data["output"])

    def _end_node(self, now: float) -> None:
        if self._node:
            node_id, since = self._node
            self.node_seconds[node_id] = self.node_seconds.get(node_id, 0.0) + now - since
        self._node = None

    def heard_entry(self) -> dict | None:
        """What the history should say, from what was heard; None if that is not its end."""
        if not self._end:
            return None
        status = {"status_str": _ENDS[self._end[0]], "messages": [self._end]}
        return {"outputs": self._outputs, "status": status}

    def describe_node(self, node_id: str) -> str:
        """A node for a person: its title, else its class."""
        node = self.graph.get(node_id)
        return f"{title_of(node) or node['class_type']} ({node_id})" if node else f"({node_id})"


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        status: "ok", "error", "interrupted", "lost" or "refused".
        error: {"type", "message", "node_id", "node_type", ...} unless ok.
        entry: its /history entry, {} if there is none.
        total_s, running_s: from queueing to the end; of that, running (None if not known).
    """

    job: Job
    status: str
    error: dict[str, Any] | None = None
    entry: dict = field(default_factory=dict)

    def __post_init__(self):
        self.total_s = time.monotonic() - self.job.submitted
        self.running_s = _running_seconds(self.entry)
        if self.running_s is None and self.job.running_since and self.job.ended:
            self.running_s = self.job.ended - self.job.running_since

    def timings(self) -> dict[str, Any]:
        """In seconds; what is not known is null."""
        running = self.running_s
        return {
            # The server's clock and ours need not agree to the millisecond.
            "queued_s": None if running is None else round(max(0.0, self.total_s - running), 3),
            "running_s": None if running is None else round(running, 3),
            "total_s": round(self.total_s, 3),
            "nodes": {n: round(s, 3) for n, s in self.job.node_seconds.items()},
            "nodes_complete": self.job.complete,
        }


def ended(job: Job, entry: dict) -> Outcome:
    """The outcome of a job that has a /history entry."""
    try:
        check_entry(job.prompt_id, entry)
        return Outcome(job, "ok", None, entry)
    except PromptInterrupted as error:
        details, status, kind = error.details, "interrupted", "interrupted"
        message = str(error)
    except PromptFailed as error:
        details, status = error.details, "error"
        kind = str(details.get("exception_type") or "unknown")
        message = str(details.get("exception_message") or error).strip()
    about = {"type": kind, "message": message}
    for key in ("node_id", "node_type", "traceback"):
        about[key] = details.get(key)
    return Outcome(job, status, about, entry)


def failed(job: Job, status: str, kind: str, message: str) -> Outcome:
    """The outcome of a job that has no /history entry."""
    return Outcome(job, status, {"type": kind, "message": message})


def _running_seconds(entry: dict) -> float | None:
    messages = entry_messages(entry)
    times = [m.get("timestamp") for m in messages.values()]
    start = messages.get("execution_start", {}).get("timestamp")
    times = [t for t in times if isinstance(t, (int, float))]
    if not isinstance(start, (int, float)) or not any(kind in messages for kind in _ENDS):
        return None
    return max(0.0, (max(times) - start) / 1000)
