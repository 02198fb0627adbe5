"""Dense attention: what a user has without sparsity. (B, T, H, 128) in and out."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .base import Peer

# BF16 probabilities and a BF16 output leave 0.002 - 0.003; a wrong mask or scale is off by order 1.
BOUND = 1e-2


def _load_fa4():
    from flash_attn.cute import flash_attn_func

    def run(q, k, v, *, tau, scale, sink_blocks):
        out = flash_attn_func(q, k, v, softmax_scale=scale)
        return out[0] if isinstance(out, tuple) else out

    return run


def _load_sdpa(backend: SDPBackend):
    def run(q, k, v, *, tau, scale, sink_blocks):
        with sdpa_kernel([backend]):
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), scale=scale
            )
        return out.transpose(1, 2)

    return run


FA4 = Peer("peer:fa4", "bf16", BOUND, _load_fa4)
SDPA_CUDNN = Peer("peer:sdpa_cudnn", "bf16", BOUND, lambda: _load_sdpa(SDPBackend.CUDNN_ATTENTION))
SDPA_FLASH = Peer("peer:sdpa_flash", "bf16", BOUND, lambda: _load_sdpa(SDPBackend.FLASH_ATTENTION))
