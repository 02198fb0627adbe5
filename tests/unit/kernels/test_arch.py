"""Facts about devices, including devices this machine does not have."""

import pytest
import torch

from hopper_sol.kernels import arch
from hopper_sol.kernels.arch import DeviceFacts, device_facts


@pytest.fixture
def fake_cuda(monkeypatch):
    """Two NVIDIA GPUs, the second one current."""
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 9), (9, 0)][index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    arch._facts.cache_clear()
    yield monkeypatch
    arch._facts.cache_clear()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (DeviceFacts("cpu", "cpu"), "cpu"),
        (DeviceFacts("mps", "mps"), "mps"),
        (DeviceFacts("cuda", "NVIDIA H200", (9, 0)), "NVIDIA H200 (SM90)"),
        (
            DeviceFacts("cuda", "NVIDIA GeForce RTX 5090", (12, 0)),
            "NVIDIA GeForce RTX 5090 (SM120)",
        ),
        (DeviceFacts("cuda", "AMD MI300X", is_rocm=True), "AMD MI300X (ROCm)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_describe(facts, words):
    assert facts.describe() == words


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_device_facts_cpu(device):
    assert device_facts(device) == DeviceFacts("cpu", "cpu", None, False)


def test_device_facts_meta():
    assert device_facts(torch.empty(1, device="meta").device) == DeviceFacts("meta", "meta")


def test_device_facts_looks_at_the_device_asked_for(fake_cuda):
    assert device_facts("cuda:0") == DeviceFacts("cuda", "NVIDIA GeForce RTX 4090", (8, 9))
    assert device_facts("cuda:1") == DeviceFacts("cuda", "NVIDIA H200", (9, 0))
    assert device_facts("cuda") == device_facts("cuda:1")  # no index means the current one
    fake_cuda.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_facts("cuda") == device_facts("cuda:0")


def test_device_facts_rocm_has_no_capability(fake_cuda):
    fake_cuda.setattr(torch.version, "hip", "6.4")
    facts = device_facts("cuda:1")
    assert facts.is_rocm and facts.capability is None
    assert facts.describe() == "NVIDIA H200 (ROCm)"
