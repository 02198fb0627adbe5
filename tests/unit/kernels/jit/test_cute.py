"""What of the CuTe DSL is in use, without importing it."""

import importlib.metadata
import importlib.util
import os
import sys
import types

import pytest
import torch

from hopper_sol.kernels.jit import cute

VARIABLE = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs flavours of a DSL that is not there, and a driver."""

    def install(flavours, driver):
        for flavour in flavours:
            folder = tmp_path / "nvidia_cutlass_dsl" / flavour / "lib"
            folder.mkdir(parents=True)
            (folder / "libcute_dsl_runtime.so").touch()
        spec = types.SimpleNamespace(
            submodule_search_locations=[str(tmp_path / "nvidia_cutlass_dsl")]
        )
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: {"nvidia_cutlass_dsl": spec}[name]
        )
        monkeypatch.setattr(cute, "_driver_major", lambda: driver)
        return tmp_path / "nvidia_cutlass_dsl"

    return install


@pytest.mark.parametrize(
    ("flavours", "driver", "chosen"),
    [
        (["cu12"], None, "cu12"),
        (["cu12"], 12, "cu12"),
        (["cu12"], 13, "cu12"),
        (["cu12", "cu13"], None, "cu13"),
        (["cu12", "cu13"], 12, "cu12"),
        (["cu12", "cu13"], 13, "cu13"),
        (["cu9", "cu12"], 14, "cu12"),  # by number, not by letter
        (["cu12", "cuda", "cu"], 13, "cu12"),
    ],
)
def test_flavour(installed, flavours, driver, chosen):
    root = installed(flavours, driver)
    flavour, path = cute._runtime.__wrapped__()
    assert flavour == chosen
    assert path == root / chosen / "lib" / "libcute_dsl_runtime.so"


@pytest.mark.parametrize(
    ("flavours", "driver", "text"),
    [
        (["cu13"], 12, "installed for CUDA 13, the driver knows CUDA 12"),
        (["cu13", "cu14"], 12, "installed for CUDA 13 and CUDA 14, the driver knows CUDA 12"),
        ([], None, "installed for nothing, there is no driver"),
    ],
)
def test_no_flavour_fits(installed, flavours, driver, text):
    installed(flavours, driver)
    with pytest.raises(ImportError, match=text):
        cute._runtime.__wrapped__()


def test_dsl_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="installed for nothing"):
        cute._runtime.__wrapped__()


def test_identity(monkeypatch):
    monkeypatch.setattr(cute, "_runtime", lambda: ("cu12", None))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")
    identity = dict(cute._identity.__wrapped__())
    assert identity.pop("machine")
    assert identity == {
        "compiler": "nvidia-cutlass-dsl 1",
        "flavour": "cu12",
        "ffi": "apache-tvm-ffi 1",
    }


@pytest.mark.parametrize("name", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_identity_without_a_package(monkeypatch, name):
    def version(asked):
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return "1"

    monkeypatch.setattr(cute, "_runtime", lambda: ("cu12", None))
    monkeypatch.setattr(importlib.metadata, "version", version)
    # An ImportError, whose advice is how to install it.
    with pytest.raises(ImportError, match=name):
        cute._identity.__wrapped__()


def test_another_cutlass(monkeypatch, tmp_path):
    other = types.ModuleType("cutlass")
    other.__file__ = str(tmp_path / "cutlass.py")
    monkeypatch.setitem(sys.modules, "cutlass", other)
    monkeypatch.delitem(sys.modules, "cutlass.cute", raising=False)
    with pytest.raises(ImportError, match="no CuTe DSL in cutlass, which is ") as caught:
        cute._import_dsl()
    assert other.__file__ in str(caught.value)


def test_no_cutlass(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="which is None: No module named 'cutlass'"):
        cute._import_dsl()


class Plain:
    """A torch.Tensor of before 2.10."""


@pytest.fixture
def torch_of_age(monkeypatch):
    def make(*, fast_path, extension=False):
        tensor = type("Tensor", (), {"__dlpack_c_exchange_api__": 1}) if fast_path else Plain
        monkeypatch.setattr(torch, "Tensor", tensor)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: extension or None)
        monkeypatch.delenv(VARIABLE, raising=False)

    return make


def test_old_torch_starts_no_c_compiler(torch_of_age):
    torch_of_age(fast_path=False)
    with cute._no_c_compiler():
        assert os.environ[VARIABLE] == "1"
    assert VARIABLE not in os.environ
    with pytest.raises(ValueError), cute._no_c_compiler():
        raise ValueError
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("what", [{"fast_path": True}, {"fast_path": False, "extension": True}])
def test_nothing_to_build(torch_of_age, what):
    torch_of_age(**what)
    with cute._no_c_compiler():
        assert VARIABLE not in os.environ


def test_what_a_user_set_stays(torch_of_age, monkeypatch):
    torch_of_age(fast_path=False)
    monkeypatch.setenv(VARIABLE, "0")
    with cute._no_c_compiler():
        assert os.environ[VARIABLE] == "0"
    assert os.environ[VARIABLE] == "0"


def test_memory_file():
    with cute._memory_file() as (file, path):
        with open(path, "wb") as other:
            other.write(b"\x7fELF")
        file.seek(0)
        assert file.read() == b"\x7fELF"


def test_no_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with cute._memory_file() as (file, path):
        with open(path, "wb") as other:
            other.write(b"\x7fELF")
        file.seek(0)
        assert file.read() == b"\x7fELF"
        assert path.endswith(".o")
    assert not os.path.exists(path)


def test_objects_that_are_not_handled_go_to_the_compiler(monkeypatch, kernel):
    """An object for another machine, for one: the DSL links it, after a longer import."""
    monkeypatch.setitem(sys.modules, "tvm_ffi", types.ModuleType("tvm_ffi"))
    monkeypatch.setattr(cute, "_link_with_compiler", lambda data: ("linked", data))
    assert cute.CuteToolchain().link(kernel(), b"no object") == ("linked", b"no object")
