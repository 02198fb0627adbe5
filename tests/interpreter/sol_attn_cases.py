"""Inputs and comparisons of the Sol-Attn interpreter tests."""

import torch

from hopper_sol.kernels.testing import fused_qkv_views, iid_qkv, poisoned_memory

__all__ = ["fused_qkv_views", "made", "poisoned_memory", "rel_l2", "same_bits", "spread"]

UNIT = 2.0**-24  # FP32 rounds by at most this part of a value
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def made(tokens, heads=2, batch=1, seed=0, offset=0.0):
    """BF16 q, k, v (B, T, H, 128), normal around ``offset``."""
    q, k, v = iid_qkv((batch, tokens, heads, 128), seed)
    return tuple((x.float() + offset).to(torch.bfloat16) for x in (q, k, v))


def spread(tokens, heads=2, batch=1, seed=0, size=0.3):
    """As ``made``, with a vector per block in q and k: routing has something to find."""
    q, k, v = (x.float() for x in made(tokens, heads, batch, seed))
    blocks = -(-tokens // 64)
    generator = torch.Generator().manual_seed(seed + 1000)
    for x in (q, k):
        vector = size * torch.randn(batch, blocks, heads, 128, generator=generator)
        x += vector.repeat_interleave(64, 1)[:, :tokens]
    return tuple(x.to(torch.bfloat16) for x in (q, k, v))


def same_bits(got, want):
    """Equal shapes, dtypes and bits, NaN and signs of zero included."""
    assert got.shape == want.shape and got.dtype == want.dtype
    as_bits = BITS[got.element_size()]
    return torch.equal(got.contiguous().view(as_bits), want.contiguous().view(as_bits))


def rel_l2(got, want):
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item()
