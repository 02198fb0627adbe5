"""A real CuTe kernel goes to disk and comes back, each in a process of its own, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

TESTS = Path(__file__).resolve().parents[1]

KERNEL = """
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor, factor: Float32):
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    i = block * 128 + thread
    if i < cute.size(x):
        out[i] = factor * x[i]


@cute.jit
def scale(x: cute.Tensor, out: cute.Tensor, factor: Float32, stream):
    blocks = (cute.size(x) + 127) // 128
    kernel(x, out, factor).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)


def build(options):
    n = cute.sym_int32()
    x, out = (make_fake_tensor(Float32, (n,), (1,), assumed_align=4) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(scale, x, out, Float32(1.0), stream, options=options)
"""

# Tensors that say that they are on a GPU. The first CUDA call tells that there is none: by then
# arguments were checked, and code of the object has called into both runtime libraries.
PRELUDE = """
import ctypes, json, logging, sys
from pathlib import Path

sys.path.insert(0, TESTS)
import conftest
import torch
from hopper_sol.kernels import jit
from hopper_sol.kernels.jit import cute, kernels

logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(levelname)s %(message)s")
for name in ("matplotlib", "torch", "cutlass", "CUTE_DSL"):
    logging.getLogger(name).setLevel(logging.ERROR)

source = Path(SOURCE)


def build(options):
    sys.path.insert(0, str(source.parent))
    from scale_kernel import build

    return build(options)


kernel = jit.Kernel("scale", build, (source,), seconds=1)


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("dimensions", ctypes.c_int32),
        ("type", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


kept = []


class OnGpu:
    def __init__(self, size, bits):
        self.values, self.bits = torch.zeros(size, dtype=torch.float64), bits

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        size, one = (ctypes.c_int64 * 1)(len(self.values)), (ctypes.c_int64 * 1)(1)
        made = Tensor(
            *(self.values.data_ptr(), Device(2, 0), 1, DataType(2, self.bits, 1)),
            *(size, one, 0, None, None),
        )
        kept.append((self.values, size, one, made))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(made), b"dltensor", None)


def on_gpu(size, bits=32):
    import tvm_ffi

    return tvm_ffi.from_dlpack(OnGpu(size, bits))


def answer(function, *arguments):
    try:
        return repr(function(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def answers(function):
    return {
        "nothing": answer(function),
        "on the CPU": answer(function, torch.zeros(8), torch.zeros(8), 2.0),
        "another type": answer(function, on_gpu(8), on_gpu(8, bits=64), 2.0),
        "other sizes": answer(function, on_gpu(8), on_gpu(9), 2.0),
        "right": answer(function, on_gpu(8), on_gpu(8), 2.0),
    }


"""

LOAD = """
result = answers(jit.load(kernel))
print(json.dumps({"answers": result, "dsl": "cutlass" in sys.modules}))
"""

LOAD_BOTH_WAYS = """
first = answers(jit.load(kernel))
loader = kernels.default_kernels()
data = loader._store.read(loader._entry(kernel))
second = answers(cute._link_with_compiler(data))
flavour = dict(cute._identity())["flavour"]
chosen = sys.modules["cutlass._mlir._mlir_libs._cutlass_ir"].__file__
third = answers(jit.load(jit.Kernel("scale", build, (source,), settings="again")))
print(json.dumps({"same": first == second == third, "flavour": flavour, "chosen": chosen}))
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs code after PRELUDE, where no C compiler is found and HOME can't be written.

    Returns (what it printed as JSON, its log).
    """
    root = tmp_path_factory.mktemp("jit")
    (root / "file").touch()
    source = root / "scale_kernel.py"
    source.write_text(KERNEL)
    os.utime(source, (1_000_000_000, 1_000_000_000))
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CUTE_DSL", "TVM_FFI", "PYTEST", "CC", "CXX", "XDG"))
    }
    environment |= {
        "PATH": str(root / "nothing"),
        "HOME": str(root / "file" / "home"),
        "HOPPER_SOL_CACHE": str(root / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(code, **variables):
        script = f"TESTS, SOURCE = {str(TESTS)!r}, {str(source)!r}\n" + PRELUDE
        done = subprocess.run(
            [sys.executable, "-c", script + code],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment | variables,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    run.cache = root / "cache"
    return run


def check(answers):
    assert answers["nothing"].startswith("TypeError: Expects 3 parameters")
    assert "Mismatched" in answers["on the CPU"] and "device_type" in answers["on the CPU"]
    assert "Mismatched" in answers["another type"] and "dtype" in answers["another type"]
    assert "Mismatched" in answers["other sizes"] and "shape" in answers["other sizes"]
    assert "cudaError" in answers["right"]


def test_round_trip(start):
    made, log = start(LOAD)
    check(made["answers"])
    assert made["dsl"]
    assert f"INFO compiling scale for SM90, about 1 s, kept in {start.cache}" in log
    (path,) = start.cache.glob("*.kernel")
    assert path.name.startswith("scale-")

    again, log = start(LOAD)
    assert again["answers"] == made["answers"]
    assert not again["dsl"]  # its import takes longer than all the rest
    assert "compiling" not in log and "DEBUG scale: loaded a kept object" in log
    assert "linked by the compiler" not in log

    # Nothing can be written: compiled again, and it runs.
    blocked = str(start.cache.parent / "file")
    nowhere = f"import tempfile\ntempfile.tempdir = {blocked!r}\n"
    alone, log = start(nowhere + LOAD, HOPPER_SOL_CACHE=blocked)
    check(alone["answers"])
    assert "INFO compiling scale for SM90, about 1 s, not kept" in log


def test_both_linkers_agree(start):
    """Ours, and the DSL's on the same object; and the flavour in the key is the one in use."""
    start(LOAD)
    result, _ = start(LOAD_BOTH_WAYS)
    assert result["same"]
    assert f"_cutlass_ir.{result['flavour']}." in result["chosen"]
