"""A compiler that compiles nothing, and kernels for it."""

import os
from pathlib import Path

import pytest

from hopper_sol.kernels import jit
from hopper_sol.kernels.jit.store import Store

LONG_AGO = 1_000_000_000


class FakeToolchain:
    """Objects are what ``build`` returns; the callable of an object returns it."""

    install = "pip install fake"

    def __init__(self):
        self.versions = {"compiler": "fake 1.0", "flavour": "cu12", "ffi": "ffi 1", "machine": "m"}
        self.compiled = []
        self.linked = []

    def identity(self):
        return self.versions

    def compile(self, kernel):
        self.compiled.append(kernel.name)
        return kernel.build("--some --options")

    def link(self, kernel, data):
        self.linked.append(data)
        return lambda: data


@pytest.fixture
def toolchain():
    return FakeToolchain()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    """Writes a source file that is older than this process: (name, text) -> path."""

    def write(name="kernel.py", text="x = 1\n") -> Path:
        path = tmp_path / name
        path.write_text(text)
        os.utime(path, (LONG_AGO, LONG_AGO))
        return path

    return write


@pytest.fixture
def kernel(source):
    """Describes a kernel: keyword arguments as ``jit.Kernel``."""
    path = source()

    def describe(**changes):
        arguments = {"name": "scale_fp8", "build": lambda options: b"code", "sources": (path,)}
        return jit.Kernel(**{**arguments, **changes})

    return describe


@pytest.fixture
def process(toolchain, folder):
    """Makes ``Kernels`` as a new process would have them: keyword arguments as ``Store``."""

    def start(toolchain=toolchain, folders=(folder,), **limits):
        return jit.Kernels(toolchain, lambda: Store(folders, **limits))

    return start
