"""Public Sol-Attn kernels: (B, T, H, 128) in and out, tau in standard deviations, diag estimator."""

import importlib
import os
import sys
import types
from pathlib import Path

import torch

from ..base import Declined
from .base import Peer

BF16_BOUND = 1e-2
# 8-bit integers in Q and K, one of them also in P and V: about 0.03 against BF16.
INT8_BOUND = 6e-2
KITCHEN_PACKAGE = "comfy_kitchen"


def _load_kitchen():
    kitchen = importlib.import_module(KITCHEN_PACKAGE)
    if not kitchen.sol_attn_is_available(torch.device("cuda")):
        raise Declined("its compiled Sol-Attn kernels can't run here")

    def run(q, k, v, *, tau, scale, sink_blocks):
        return kitchen.sol_attn(q, k, v, tau=tau, scale=scale, sink_blocks=list(sink_blocks))

    return run


def _submodule(variable: str, name: str):
    """Module ``name`` of the checkout that ``variable`` names, without running the pack's own init.

    The packs' __init__ files need ComfyUI; their kernels do not.
    """
    path = os.environ.get(variable)
    if not path:
        raise Declined(f"not asked for: {variable} does not name a checkout")
    if not Path(path).is_dir():
        raise Declined(f"{variable} names a folder that does not exist")
    parent = f"bench_{variable.lower()}"
    if parent not in sys.modules:
        package = types.ModuleType(parent)
        package.__path__ = [path]
        sys.modules[parent] = package
    return importlib.import_module(f"{parent}.{name}")


def _load_kijai(module: str, function: str):
    sol_attn = getattr(_submodule("HOPPER_SOL_PEER_KIJAI", module), function)

    def run(q, k, v, *, tau, scale, sink_blocks):
        return sol_attn(q, k, v, tau=tau, scale=scale, sink_blocks=sink_blocks)

    return run


def _load_saganaki(int8: bool):
    sol_attn = _submodule("HOPPER_SOL_PEER_SAGANAKI", "sol_kernel").sol_attn

    def run(q, k, v, *, tau, scale, sink_blocks):
        return sol_attn(q, k, v, tau=tau, scale=scale, sink_blocks=sink_blocks, int8_qk=int8)

    return run


KITCHEN = Peer("peer:kitchen", "int8", INT8_BOUND, _load_kitchen, sparse=True)
KIJAI = Peer(
    "peer:kijai", "bf16", BF16_BOUND, lambda: _load_kijai("_tri_fwd", "sol_attn"), sparse=True
)
KIJAI_INT8 = Peer(
    "peer:kijai_int8",
    "int8",
    INT8_BOUND,
    lambda: _load_kijai("_int8_fwd", "sol_attn_int8"),
    sparse=True,
)
SAGANAKI = Peer("peer:saganaki", "bf16", BF16_BOUND, lambda: _load_saganaki(False), sparse=True)
SAGANAKI_INT8 = Peer(
    "peer:saganaki_int8", "int8", INT8_BOUND, lambda: _load_saganaki(True), sparse=True
)
