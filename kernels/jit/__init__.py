"""Compiled CuTe DSL kernels, kept on disk from one process to the next (README.md).

Importing this reads no file and starts nothing; it imports no compiler.
"""

from .errors import KernelBuildError
from .kernels import Kernel, Kernels, default_kernels


def load(kernel: Kernel):
    """The callable of ``kernel``: from this process, from disk, or compiled now.

    Raises KernelBuildError. Threads that ask for the same kernel compile it once.
    """
    return default_kernels().load(kernel)


__all__ = ["Kernel", "KernelBuildError", "Kernels", "load"]
