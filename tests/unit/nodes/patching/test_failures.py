"""Failures of kernels."""

import logging

import pytest
import torch

from hopper_sol.nodes.patching.failures import describe_failure, is_interrupt, raise_if_sticky


def test_is_interrupt(interrupt):
    assert is_interrupt(interrupt()) and not is_interrupt(RuntimeError())


def test_sticky_error_raises_with_advice(monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    error = ValueError("first")
    with pytest.raises(
        RuntimeError, match=r"FP8 Linear: backend 'x' left the GPU .*restart"
    ) as info:
        raise_if_sticky("FP8 Linear", "x", error, torch.device("cuda"))
    assert info.value.__cause__ is error


def test_other_errors_do_not(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    raise_if_sticky("FP8 Linear", "x", ValueError(), torch.device("cpu"))
    assert seen == []
    raise_if_sticky("FP8 Linear", "x", ValueError(), torch.device("cuda", 1))
    assert seen == [torch.device("cuda", 1)]


def test_describe_failure_is_short_and_logs_the_traceback(caplog):
    try:
        raise ValueError("long " * 100 + "\nsecond line")
    except ValueError as error:
        words = describe_failure("FP8 Linear", "triton", error)
    assert words.startswith("ValueError: long long") and len(words) == 200
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.name == "hopper_sol"
    assert "FP8 Linear: backend 'triton' failed" in record.getMessage()
    assert "Traceback" in record.getMessage() and "second line" in record.getMessage()
