"""Kernels compiled on a machine without a GPU: ``make test-compile``, a process of its own.

For sm_90 unless a test is parametrised with ``@pytest.mark.parametrize("capability", [80, 89])``.

Host code runs on CPU tensors as it would on a GPU; where it would launch a kernel, the kernel is
compiled for the very arguments of the launch, and nothing runs.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled")

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class WithoutDevice:
    """What Triton's launcher asks a driver before it compiles."""

    capability: int

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # kernels are kept per device, and so per target

    def get_current_stream(self, device):
        return 0


@dataclass
class Compiled:
    """One kernel as compiled: its name, the launch's key, and facts of its machine code."""

    name: str
    key: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    sass: str

    def __post_init__(self):
        # ptxas 12.8 has been seen to drop the register that holds two E4M3 codes and to read the
        # stack pointer instead: codes turned into bytes and into FP32 at once. Every kernel here
        # is looked at for it, since nothing else shows it without a GPU.
        wrong = re.search(r"F2FP[^;]*\bR1\b[^;]*;", self.sass)
        assert not wrong, f"{self.name}: miscompiled, converts the stack pointer: {wrong[0]}"

    def count(self, opcode):
        """Instructions whose name begins with ``opcode``."""
        return len(re.findall(rf"\b{opcode}\b", self.sass))

    def instructions(self):
        """(address, text) of every instruction, in order."""
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", self.sass, re.MULTILINE)
        return [(int(address, 16), text.strip()) for address, text in found]

    def loops(self):
        """Instructions of every loop: from the target of a backward branch to the branch."""
        instructions = self.instructions()
        bodies = []
        for address, text in instructions:
            branch = re.search(r"\bBRA (?:`\(\S+\)|0x([0-9a-f]+))", text)
            if branch and branch[1] and int(branch[1], 16) < address:
                start = int(branch[1], 16)
                bodies.append([text for at, text in instructions if start <= at <= address])
        return bodies


_INSPECTED: dict[str, Compiled] = {}  # by hash: tests share most of their kernels


@pytest.fixture
def capability():
    return 90


@pytest.fixture
def launches(monkeypatch, tmp_path, capability):
    """Every launch made while the test runs, as a list of ``Compiled``."""
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in _INSPECTED:
            _INSPECTED[kernel.hash] = _inspect(self.__name__, kernel, tmp_path / "kernel.cubin")
        made.append(_INSPECTED[kernel.hash])
        return kernel

    made = []
    previous = driver._active
    driver.set_active(WithoutDevice(capability))
    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    yield made
    driver._active = previous


def _inspect(name, kernel, path):
    path.write_bytes(kernel.asm["cubin"])

    def dump(option):
        command = [str(CUOBJDUMP), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
    return Compiled(
        name=name,
        key=kernel.hash,
        registers=int(usage[1]),
        spilled_bytes=int(usage[2]),
        shared_bytes=kernel.metadata.shared,
        sass=dump("-sass"),
    )
