"""Operands as the kernels read them: rounded tensors, their scales, and block summaries.

``Prepared`` is the contract between preparation and attention; ``prepare_reference`` makes it in
plain PyTorch (README.md, "Operands"). A backend's own preparation is tested against it.
"""

from dataclasses import dataclass

import torch

from .config import BLOCK_SIZE, num_blocks
from .emulation import (
    E4M3,
    dequantized_means,
    padded,
    quantize_blocks,
    quantize_channels,
    sampled_mean,
)
from .reference import block_mean

# "k32" order of V's tokens: slot k of every 32 holds token TOKEN_OF_SLOT[k]. A warpgroup's
# accumulator of Q K^T, rounded to E4M3 where it lies, is then the operand that multiplies V: no
# shuffles between threads. Follows from the fragment layouts of m64nNk32.
TOKEN_OF_SLOT = tuple(
    16 * (k // 16) + 8 * (k % 4 // 2) + 2 * (k % 16 // 4) + k % 2 for k in range(32)
)
V_ORDERS = ("natural", "k32")


@dataclass(frozen=True)
class Prepared:
    """Operands of one attention call. NT blocks of 64 tokens, NG groups of 64 blocks.

    "bf16": q, k, v are the given (B, T, H, 128) BF16 tensors, strides and all. "fp8": E4M3,
    padded to whole blocks with zeros.

    Attributes:
        tokens: T.
        q, k: "fp8": (B, H, 64 NT, 128).
        v: "fp8": (B, H, 128, 64 NT), tokens contiguous, as an FP8 tensor core wants them, in
            ``v_order``.
        q_mean, k_mean: (B, H, NT, 128) FP32, means of the unrounded blocks, which routing reads;
            k_mean without k_offset.
        mean_k: (B, H, 64 NG, 128) BF16 or E4M3, zero past NT.
        mean_v: "bf16": (B, H, 64 NG, 128) BF16; "fp8": (B, H, 128, 64 NG) E4M3, means of the
            rounded V in units of v_scale, in ``v_order``.
        q_scale, k_scale: (B, H, NT) FP32, value = code * scale; None for "bf16".
        mean_k_scale: (B, H, NG) FP32 or None.
        v_scale: (B, H, 128) FP32 or None.
        k_offset: (B, H, 128) FP32 that was subtracted from every key, or None. Shifts all logits
            of a row alike: only the LSE has to know.
        out_offset: (B, H, 128) FP32 to add to every output row, or None.
        k_residual: k holds what is left of each key after its block's rounded mean, which the
            logit of an exact token gets back from the summary's logit.
        v_order: order of the tokens in v and mean_v, "natural" or "k32" (``TOKEN_OF_SLOT``).
    """

    tokens: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_mean: torch.Tensor
    k_mean: torch.Tensor
    mean_k: torch.Tensor
    mean_v: torch.Tensor
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    mean_k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_offset: torch.Tensor | None = None
    out_offset: torch.Tensor | None = None
    k_residual: bool = False
    v_order: str = "natural"

    @property
    def precision(self) -> str:
        """ "bf16" or "fp8"."""
        return "bf16" if self.q_scale is None else "fp8"

    def dequant(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v (B, T, H, 128) FP32 that the rounded operands stand for, offsets given back."""
        if self.precision == "bf16":
            return self.q.float(), self.k.float(), self.v.float()
        q = self._tokens(self.q.float() * _per_token(self.q_scale))
        k = self.k.float() * _per_token(self.k_scale)
        if self.k_residual:
            k = k + self.dequant_mean_k().repeat_interleave(BLOCK_SIZE, 2)
        k = self._tokens(k if self.k_offset is None else k + self.k_offset.unsqueeze(2))
        v = in_natural_order(self.v.float(), self.v_order) * self.v_scale.unsqueeze(-1)
        v = v.transpose(2, 3)
        v = self._tokens(v if self.out_offset is None else v + self.out_offset.unsqueeze(2))
        return q, k, v

    def dequant_mean_k(self) -> torch.Tensor:
        """(B, H, NT, 128) FP32 mean keys as the kernels read them, without k_offset."""
        mean_k = self.mean_k.float()
        if self.mean_k_scale is not None:
            mean_k = mean_k * _per_token(self.mean_k_scale)
        return mean_k[:, :, : num_blocks(self.tokens)]

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : self.tokens].transpose(1, 2)


def prepare_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    k_smoothing: str = "none",
    v_smoothing: str = "none",
    v_bias_correction: bool = False,
    v_order: str = "natural",
) -> Prepared:
    """``Prepared`` of q, k, v (B, T, H, 128) BF16. Smoothing and v_order act on "fp8" only."""
    tokens = q.shape[1]
    q32, k32, v32 = q.float(), k.float(), v.float()
    if precision == "bf16":
        k_mean, v_mean = block_mean(k32), block_mean(v32)
        return Prepared(
            tokens=tokens,
            q=q,
            k=k,
            v=v,
            q_mean=_heads_first(block_mean(q32)),
            k_mean=_heads_first(k_mean),
            mean_k=_heads_first(padded(k_mean).to(torch.bfloat16)),
            mean_v=_heads_first(padded(v_mean).to(torch.bfloat16)),
        )
    k_offset = sampled_mean(k32) if k_smoothing == "mean" else None
    v_offset = sampled_mean(v32) if v_smoothing == "mean" else None
    if k_offset is not None:
        k32 = k32 - k_offset
    if v_offset is not None:
        v32 = v32 - v_offset
    k_mean = block_mean(k32)
    mean_k8, mean_k_scale = quantize_blocks(padded(k_mean))
    if k_smoothing == "block":
        k32 = k32 - dequantized_means(mean_k8, mean_k_scale, tokens)
    q8, q_scale = quantize_blocks(q32)
    k8, k_scale = quantize_blocks(k32)
    v8, v_scale = quantize_channels(v32)
    out_offset = v_offset
    if v_bias_correction:
        out_offset = v_offset - (v8 * v_scale - v32).mean(1, keepdim=True)
    return Prepared(
        tokens=tokens,
        q=_heads_first(q8).to(E4M3),
        k=_heads_first(k8).to(E4M3),
        v=in_order(_channels_first(padded(v8)), v_order).to(E4M3),
        q_mean=_heads_first(block_mean(q.float())),
        k_mean=_heads_first(k_mean),
        mean_k=_heads_first(mean_k8).to(E4M3),
        mean_v=in_order(_channels_first(padded(block_mean(v8))), v_order).to(E4M3),
        q_scale=q_scale.transpose(1, 2).contiguous(),
        k_scale=k_scale.transpose(1, 2).contiguous(),
        mean_k_scale=mean_k_scale.transpose(1, 2).contiguous(),
        v_scale=v_scale[:, 0],
        k_offset=None if k_offset is None else k_offset[:, 0],
        out_offset=None if out_offset is None else out_offset[:, 0],
        k_residual=k_smoothing == "block",
        v_order=v_order,
    )


def in_order(x: torch.Tensor, v_order: str) -> torch.Tensor:
    """(..., N) in natural order, N a multiple of 32, to ``v_order``."""
    return _reordered(x, TOKEN_OF_SLOT) if v_order == "k32" else x


def in_natural_order(x: torch.Tensor, v_order: str) -> torch.Tensor:
    """Inverse of ``in_order``."""
    slot_of_token = sorted(range(32), key=TOKEN_OF_SLOT.__getitem__)
    return _reordered(x, slot_of_token) if v_order == "k32" else x


def _reordered(x: torch.Tensor, places) -> torch.Tensor:
    return x.unflatten(-1, (-1, 32))[..., list(places)].flatten(-2)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def _per_token(scale: torch.Tensor) -> torch.Tensor:
    """(B, H, N) one scale per 64 rows -> (B, H, 64 N, 1)."""
    return scale.repeat_interleave(BLOCK_SIZE, 2).unsqueeze(-1)
