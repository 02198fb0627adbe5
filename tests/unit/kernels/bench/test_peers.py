"""Adapters of peers: what they call, and what they say where there is nothing to call."""

import sys
import types

import pytest
import torch

from hopper_sol.kernels.bench.base import Declined
from hopper_sol.kernels.bench.peers import PEER_PREFIX, PEERS, dense_attention, sparse_attention

Q, K, V = torch.randn(3, 1, 70, 2, 128)
ARGUMENTS = {"tau": 0.5, "scale": 0.25, "sink_blocks": (0, 1)}


class Recorder:
    """Keeps the arguments of a call and returns what it is told to."""

    def __init__(self, result):
        self.result, self.args, self.kwargs = result, None, None

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.result


@pytest.fixture
def module(monkeypatch):
    """Puts modules with given attributes where import finds them."""

    def put(name, **attributes):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        for key, value in attributes.items():
            setattr(sys.modules[name], key, value)

    return put


def test_names_carry_the_prefix_once():
    for peers in PEERS.values():
        for name, peer in peers.items():
            assert name == peer.name and name.startswith(PEER_PREFIX) and peer.bound <= 6e-2


@pytest.mark.parametrize("result", [V, (V, None)])
def test_fa4(module, result):
    call = Recorder(result)
    module("flash_attn.cute", flash_attn_func=call)
    out = dense_attention.FA4.load()(Q, K, V, **ARGUMENTS)
    assert out is V and call.args == (Q, K, V) and call.kwargs == {"softmax_scale": 0.25}


def test_sdpa_is_attention_in_our_layout():
    out = dense_attention.SDPA_FLASH.load()(Q, K, V, **ARGUMENTS)
    logits = torch.einsum("bthd,bshd->bhts", Q.double(), K.double()) * 0.25
    want = torch.einsum("bhts,bshd->bthd", logits.softmax(-1), V.double())
    assert out.shape == Q.shape and (out - want).abs().max() < 1e-5


def test_kitchen(module):
    call = Recorder(V)
    module("comfy_kitchen", sol_attn=call, sol_attn_is_available=lambda device: True)
    assert sparse_attention.KITCHEN.load()(Q, K, V, **ARGUMENTS) is V
    assert call.kwargs == {"tau": 0.5, "scale": 0.25, "sink_blocks": [0, 1]}


def test_kitchen_without_its_kernels(module):
    """Its slow fallback must not be timed as if it were the kernel."""
    module("comfy_kitchen", sol_attn=None, sol_attn_is_available=lambda device: False)
    with pytest.raises(Declined, match="compiled"):
        sparse_attention.KITCHEN.load()


PACKS = [
    (sparse_attention.KIJAI, "HOPPER_SOL_PEER_KIJAI", "_tri_fwd.py", "sol_attn", {}),
    (sparse_attention.KIJAI_INT8, "HOPPER_SOL_PEER_KIJAI", "_int8_fwd.py", "sol_attn_int8", {}),
    (
        sparse_attention.SAGANAKI,
        "HOPPER_SOL_PEER_SAGANAKI",
        "sol_kernel.py",
        "sol_attn",
        {"int8_qk": False},
    ),
    (
        sparse_attention.SAGANAKI_INT8,
        "HOPPER_SOL_PEER_SAGANAKI",
        "sol_kernel.py",
        "sol_attn",
        {"int8_qk": True},
    ),
]


@pytest.mark.parametrize(("peer", "variable", "file", "function", "more"), PACKS)
def test_packs_by_path(monkeypatch, tmp_path, peer, variable, file, function, more):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    # The pack's own __init__ needs ComfyUI and must not run; relative imports must work.
    (tmp_path / "__init__.py").write_text("raise RuntimeError('ran')")
    (tmp_path / "helper.py").write_text("NAME = 'helper'")
    (tmp_path / file).write_text(
        "from .helper import NAME\n"
        f"def {function}(q, k, v, **options):\n    return NAME, q, k, v, options\n"
    )
    monkeypatch.setenv(variable, str(tmp_path))
    name, q, k, v, options = peer.load()(Q, K, V, **ARGUMENTS)
    assert (name, options) == ("helper", {**ARGUMENTS, **more}) and q is Q and k is K and v is V


@pytest.mark.parametrize(("peer", "variable"), [row[:2] for row in PACKS])
def test_packs_that_are_not_there(monkeypatch, tmp_path, peer, variable):
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(Declined, match=f"not asked for: {variable}"):
        peer.load()
    monkeypatch.setenv(variable, str(tmp_path / "nothing"))
    with pytest.raises(Declined, match="does not exist") as declined:
        peer.load()
    assert str(tmp_path) not in str(declined.value)  # the text goes into a public file
