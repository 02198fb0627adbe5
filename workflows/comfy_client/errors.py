"""What can go wrong between us and a ComfyUI. Every text says what, and what to do."""

import json
from typing import Any


class ComfyError(RuntimeError):
    """Something about ComfyUI went wrong; the text says what, and what to do."""


class ServerError(ComfyError):
    """The server did not start, died, or does not answer usefully."""


class NoAnswer(ServerError):
    """A request got no answer.

    Attributes:
        refused: nothing listens at that address at all.
    """

    def __init__(self, text: str, refused: bool = False):
        super().__init__(text)
        self.refused = refused


class HttpError(ComfyError):
    """The server answered with a status that is not 2xx.

    Attributes:
        status: the HTTP status.
        body: the answer as parsed JSON where it is JSON, else as text.
        retry_after: seconds after which the server wants to be asked again, or None.
    """

    def __init__(
        self, method: str, path: str, status: int, body: Any, retry_after: float | None = None
    ):
        text = body if isinstance(body, str) else "" if body is None else json.dumps(body)
        super().__init__(f"{method} {path}: HTTP {status} {text[:2000]}".rstrip())
        self.status = status
        self.body = body
        self.retry_after = retry_after

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 429 or self.status >= 500


class PromptRejected(ComfyError):
    """The server refuses a prompt, or accepts only a part of it. Nothing of it is left queued.

    Attributes:
        error: ComfyUI's "error" object ({} if only some outputs were refused).
        node_errors: {node id: {"class_type", "errors": [...]}}.
        lines: what is wrong, one text each.
    """

    def __init__(self, error: dict, node_errors: dict | None):
        # ComfyUI has [] here when there is nothing to say about single nodes.
        node_errors = as_dict(node_errors or {})
        lines = []
        for node_id, node in node_errors.items():
            for item in as_dict(node).get("errors") or []:
                kind = as_dict(node).get("class_type")
                lines.append(f"node {node_id} ({kind}): {error_line(as_dict(item))}")
        if error:
            # Its details repeat what the nodes say, without naming them.
            lines.insert(0, (lines and error.get("message")) or error_line(error))
        super().__init__("prompt rejected: " + ("; ".join(lines) or "no reason given"))
        self.error = error
        self.node_errors = node_errors
        self.lines = lines


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


def error_line(error: dict) -> str:
    """One of ComfyUI's error objects as a line."""
    parts = (str(error.get(key) or "").strip() for key in ("message", "details"))
    return ": ".join(part for part in parts if part) or str(error.get("type") or error)


def as_dict(value: Any) -> dict:
    """`value` where it is a dict; what else a server may put there becomes one."""
    if isinstance(value, dict):
        return value
    return {} if value is None else {"message": str(value)}
