"""Kernels run by Triton's interpreter on the CPU: ``make test-interpreter``, a process of its own.

Triton decides at import whether it interprets, so these tests can't share a process with anything
that has imported it already.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

triton = pytest.importorskip("triton", reason="Triton is not installed")

if not triton.knobs.runtime.interpret:
    raise RuntimeError(
        "Triton was imported before TRITON_INTERPRET=1 was set: run this folder alone"
    )

import interpreter_repair

interpreter_repair.apply()
