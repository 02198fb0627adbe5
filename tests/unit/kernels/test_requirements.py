"""Requirements: every condition says in words what is missing, and nothing raises."""

import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.requirements import Requirements

H100 = DeviceFacts("cuda", "NVIDIA H100", (9, 0))
ADA = DeviceFacts("cuda", "RTX 4090", (8, 9))
B200 = DeviceFacts("cuda", "NVIDIA B200", (10, 0))
ROCM = DeviceFacts("cuda", "AMD MI300X", is_rocm=True)
MPS = DeviceFacts("mps", "mps")
CPU = DeviceFacts("cpu", "cpu")
CUDA = frozenset({"cuda"})


def call(device=H100, dtype=torch.bfloat16, head_dim=128):
    return SimpleNamespace(device=device, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize("device", [H100, ADA, B200, ROCM, MPS, CPU], ids=lambda d: d.name)
def test_why_not_empty_requirements_take_anything(device):
    assert Requirements().why_not(call(device, torch.int8, 1)) is None


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H100, None),
        (ADA, "needs SM90 or newer, this GPU is RTX 4090 (SM89)"),
        (B200, None),
        (ROCM, "needs an NVIDIA GPU, tensors are on AMD MI300X (ROCm)"),
        (MPS, "needs a cuda device, tensors are on mps"),
        (CPU, "needs a cuda device, tensors are on cpu"),
    ],
    ids=["H100", "RTX4090", "B200", "ROCm", "mps", "cpu"],
)
def test_why_not_min_capability(device, reason):
    needs = Requirements(device_types=CUDA, min_capability=(9, 0))
    assert needs.why_not(call(device)) == reason


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H100, None),
        (ADA, "needs SM9x, this GPU is RTX 4090 (SM89)"),
        (B200, "needs SM9x, this GPU is NVIDIA B200 (SM100)"),
        (ROCM, "needs an NVIDIA GPU, tensors are on AMD MI300X (ROCm)"),
        (CPU, "needs an NVIDIA GPU, tensors are on cpu"),
    ],
    ids=["H100", "RTX4090", "B200", "ROCm", "cpu"],
)
def test_why_not_arch_major(device, reason):
    assert Requirements(arch_major=9).why_not(call(device)) == reason


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 0), True), ((8, 6), True), ((7, 5), False), ((12, 0), True)]
)
def test_why_not_min_capability_compares_major_first(capability, fits):
    reason = Requirements(min_capability=(8, 0)).why_not(
        call(DeviceFacts("cuda", "GPU", capability))
    )
    assert (reason is None) == fits


def test_why_not_lists_alternatives_sorted():
    needs = Requirements(
        device_types=frozenset({"cuda", "cpu"}),
        head_dims=frozenset({64, 128}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
    )
    assert needs.why_not(call()) is None
    assert needs.why_not(call(MPS)) == "needs a cpu or cuda device, tensors are on mps"
    assert needs.why_not(call(head_dim=96)) == "needs head_dim 128 or 64, got 96"
    assert needs.why_not(call(dtype=torch.float32)) == (
        "needs torch.bfloat16 or torch.float16, got torch.float32"
    )


@pytest.mark.parametrize("system", ["Linux", "Windows", "Darwin"])
def test_why_not_systems(monkeypatch, system):
    monkeypatch.setattr(platform, "system", lambda: system)
    reason = Requirements(systems=frozenset({"Linux"})).why_not(call())
    assert reason == (None if system == "Linux" else f"needs Linux, this is {system}")


def test_why_not_modules(monkeypatch, tmp_path):
    (tmp_path / "sol_present.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Requirements(modules=("json", "sol_present")).why_not(call()) is None
    assert "sol_present" not in sys.modules
    assert Requirements(modules=("json", "sol_absent", "sol_gone")).why_not(call()) == (
        "needs the Python module 'sol_absent', which is not installed"
    )


@pytest.mark.parametrize(
    "body",
    ["raise RuntimeError('no driver')\n", "import sol_absent_too\n", "1 +\n", ""],
    ids=["raises", "imports-missing", "syntax-error", "no-submodule"],
)
def test_why_not_survives_a_broken_parent_package(monkeypatch, tmp_path, body):
    package = tmp_path / "sol_broken"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        reason = Requirements(modules=("sol_broken.kernel",)).why_not(call())
    finally:
        sys.modules.pop("sol_broken", None)
    assert reason == "needs the Python module 'sol_broken.kernel', which is not installed"


def test_why_not_survives_modules_without_a_spec(monkeypatch):
    monkeypatch.setitem(sys.modules, "sol_blocked", None)  # the usual way to forbid an import
    monkeypatch.setitem(sys.modules, "sol_bare", SimpleNamespace())  # find_spec raises ValueError
    for name in ("sol_blocked", "sol_bare", "sol_bare.sub"):
        assert Requirements(modules=(name,)).why_not(call()) == (
            f"needs the Python module {name!r}, which is not installed"
        )


def test_why_not_names_the_first_unmet_condition():
    needs = Requirements(
        device_types=CUDA,
        arch_major=9,
        head_dims=frozenset({128}),
        dtypes=frozenset({torch.bfloat16}),
        modules=("sol_absent",),
    )
    hopeless = call(CPU, torch.float32, 96)
    assert needs.why_not(hopeless).startswith("needs a cuda device")
    assert needs.why_not(call(ADA, torch.float32, 96)).startswith("needs SM9x")
    assert needs.why_not(call(H100, torch.float32, 96)).startswith("needs head_dim")
    assert needs.why_not(call(H100, torch.float32)).startswith("needs torch.bfloat16")
    assert needs.why_not(call(H100)).startswith("needs the Python module")
