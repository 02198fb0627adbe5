"""The CuTe DSL as compiler and linker; imported at first use, and the DSL only to compile."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .elf import LinkedObject, NotLinkable
from .kernels import Kernel

log = logging.getLogger("hopper_sol")

FUNCTION = "kernel"  # name in every kept object
_EXPORTED = f"__tvm_ffi_{FUNCTION}"
_RUNTIME = "libcute_dsl_runtime.so"
_NO_EXTENSION = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


class CuteToolchain:
    """See ``kernels.Toolchain``."""

    install = "pip install nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi"

    def identity(self) -> dict[str, str]:
        return dict(_identity())

    def compile(self, kernel: Kernel) -> bytes:
        # The architecture as an option: the variable CUTE_DSL_ARCH only counts before the first
        # import of the DSL, which another pack may have done.
        with _no_c_compiler():
            _import_dsl()
            function = kernel.build(f"--enable-tvm-ffi --gpu-arch {kernel.arch}")
        with _memory_file() as (file, path):
            function.export_to_c(object_file_path=path, function_name=FUNCTION)
            file.seek(0)
            return file.read()

    def link(self, kernel: Kernel, data: bytes) -> Callable:
        with _no_c_compiler():
            import tvm_ffi
        try:
            linked = LinkedObject(data, _find_symbol)
            address = linked.address(_EXPORTED)
        except (NotLinkable, OSError) as error:
            log.debug("%s: %s; linked by the compiler instead", kernel.name, error)
            return _link_with_compiler(data)
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=linked)


@functools.cache
def _identity() -> tuple[tuple[str, str], ...]:
    flavour, _ = _runtime()
    return (
        ("compiler", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("flavour", flavour),
        ("ffi", importlib.metadata.version("apache-tvm-ffi")),
        ("machine", f"{platform.system()} {platform.machine()}"),
    )


@functools.cache
def _runtime() -> tuple[str, Path]:
    """Flavour that the DSL chooses ("cu12", "cu13"), and its runtime library.

    The rule is the DSL's: the newest flavour that the driver is not too old for; without a driver
    the newest.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = {}
    for folder in folders:
        for path in folder.glob(f"cu*/lib/{_RUNTIME}"):
            flavour = path.parent.parent.name
            if re.fullmatch(r"cu\d+", flavour):
                found[int(flavour[2:])] = path
    driver = _driver_major()
    fitting = [major for major in found if driver is None or major <= driver]
    if not fitting:
        have = " and ".join(f"CUDA {major}" for major in sorted(found)) or "nothing"
        drives = f"the driver knows CUDA {driver}" if driver else "there is no driver"
        raise ImportError(f"{_RUNTIME}: installed for {have}, {drives}")
    return f"cu{max(fitting)}", found[max(fitting)]


def _driver_major() -> int | None:
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def _import_dsl() -> None:
    """Other packages are called cutlass as well: the error says which one was found."""
    try:
        import cutlass.cute  # noqa: F401
    except Exception as error:
        found = sys.modules.get("cutlass") or importlib.util.find_spec("cutlass")
        where = getattr(found, "__file__", None) or getattr(found, "origin", None)
        raise ImportError(f"no CuTe DSL in cutlass, which is {where}: {error}") from error


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    import tvm_ffi

    _, runtime = _runtime()
    return ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()), ctypes.CDLL(str(runtime))


def _find_symbol(name: str) -> int:
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    raise NotLinkable(f"no runtime library has {name}")


@contextmanager
def _no_c_compiler() -> Iterator[None]:
    """tvm_ffi, imported in here, builds no extension for a torch that lacks its fast path.

    It would start a C++ compiler for up to a minute; without, tensors are handed over some
    microseconds slower. An installed torch_c_dlpack_ext is used.
    """
    import torch

    fast_paths = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
    leave = (
        _NO_EXTENSION in os.environ
        or any(hasattr(torch.Tensor, name) for name in fast_paths)
        or importlib.util.find_spec("torch_c_dlpack_ext") is not None
    )
    if not leave:
        os.environ[_NO_EXTENSION] = "1"
    try:
        yield
    finally:
        if not leave:
            os.environ.pop(_NO_EXTENSION, None)


def _link_with_compiler(data: bytes) -> Callable:
    """The same by the DSL, which has to be imported for it and reads a file."""
    _import_dsl()
    from cutlass.cute.runtime import load_module

    with _memory_file() as (file, path):
        file.write(data)
        file.flush()
        return getattr(load_module(path, enable_tvm_ffi=True), FUNCTION)


@contextmanager
def _memory_file() -> Iterator[tuple[BinaryIO, str]]:
    """(file, path) of an empty file that needs no folder to write to."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("hopper_sol"), "w+b") as file:
            yield file, f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(suffix=".o") as file:
            yield file, file.name
