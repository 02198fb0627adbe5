"""Linear layers as models have them."""

import torch

from .base import Peer


def _load_f_linear():
    # (x, weight (N, K), bias) in BF16.
    return torch.nn.functional.linear


# FP32 sums rounded to BF16 once: 2^-9 / sqrt(3) = 0.0011 of every element, and the order of sums.
F_LINEAR_BF16 = Peer("peer:f_linear_bf16", "bf16", 5e-3, _load_f_linear)
