"""Other implementations that are measured beside ours, one line each.

A peer that is not installed, declines or crashes is a row with an error. Peers that are no packages
are found by an environment variable that holds the path of a checkout:

    HOPPER_SOL_PEER_KIJAI       kijai/ComfyUI-SolAttn_triton
    HOPPER_SOL_PEER_SAGANAKI    Saganaki22/ComfyUI-sol-attn
"""

from . import dense_attention, linear, sparse_attention
from .base import PEER_PREFIX, Peer

__all__ = ["PEERS", "PEER_PREFIX", "Peer"]

PEERS: dict[str, dict[str, Peer]] = {
    "sol_attention": {
        peer.name: peer
        for peer in (
            dense_attention.FA4,
            dense_attention.SDPA_CUDNN,
            dense_attention.SDPA_FLASH,
            sparse_attention.KITCHEN,
            sparse_attention.KIJAI,
            sparse_attention.KIJAI_INT8,
            sparse_attention.SAGANAKI,
            sparse_attention.SAGANAKI_INT8,
        )
    },
    "fp8_linear": {peer.name: peer for peer in (linear.F_LINEAR_BF16,)},
}
