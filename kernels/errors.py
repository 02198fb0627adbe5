"""Errors that callers of the public ops can catch.

A mistake no backend could accept is a plain ValueError or TypeError, raised before any device work.
"""

from collections.abc import Mapping


class UnknownBackend(ValueError):
    """A backend name that is not registered for this op."""

    def __init__(self, op: str, backend: str, known: tuple[str, ...]):
        self.op = op
        self.backend = backend
        self.known = known
        super().__init__(
            f"backend {backend!r}: {op} has no such backend; use 'auto' or one of {', '.join(known)}"
        )


class BackendUnavailable(RuntimeError):
    """No backend that was allowed to run can take this call.

    Attributes:
        op: name of the public op.
        backend: what the caller asked for ("auto" or a name).
        reasons: every candidate with the reason it declined.
        listed: the reasons in one line.
    """

    def __init__(self, op: str, backend: str, reasons: Mapping[str, str]):
        self.op = op
        self.backend = backend
        self.reasons = dict(reasons)
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        self.listed = listed or "no backend is registered"
        if backend == "auto":
            text = f"no backend can run {op}: {self.listed}"
        else:
            text = f"backend {backend!r} can't run {op}: {self.reasons.get(backend, self.listed)}"
        super().__init__(text)
