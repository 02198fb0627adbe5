"""Texts and attributes of the errors that callers catch."""

import pytest

from hopper_sol.kernels.errors import BackendUnavailable, UnknownBackend


def test_unknown_backend():
    error = UnknownBackend("sol_attention", "sm89", ("sm90", "reference"))
    assert isinstance(error, ValueError)
    assert (error.op, error.backend, error.known) == (
        "sol_attention",
        "sm89",
        ("sm90", "reference"),
    )
    assert str(error) == (
        "backend 'sm89': sol_attention has no such backend; use 'auto' or one of sm90, reference"
    )


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("auto", "no backend can run f: a: is tired; b: is out"),
        ("b", "backend 'b' can't run f: is out"),
        ("c", "backend 'c' can't run f: a: is tired; b: is out"),
    ],
)
def test_backend_unavailable(backend, text):
    reasons = {"a": "is tired", "b": "is out"}
    error = BackendUnavailable("f", backend, reasons)
    assert isinstance(error, RuntimeError)
    assert str(error) == text
    assert (error.op, error.backend) == ("f", backend)
    reasons.clear()
    assert error.reasons == {"a": "is tired", "b": "is out"}
