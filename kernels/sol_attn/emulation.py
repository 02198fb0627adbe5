"""FP8 Sol-Attn emulated in PyTorch: the roundings and the order of the FP8 kernels.

Same decisions and the same two populations as ``reference.py``; what differs is written down here
because it is part of the contract (README.md, "FP8"):

* Q, K: E4M3, one scale per (batch, head, 64-token block); V: E4M3, one scale per (batch, head,
  channel); mean keys: E4M3, one scale per 64 of them; mean values: E4M3 in units of V's scale,
  taken from the already rounded V so that exact and summary blocks agree. A scale is amax times
  FP32(1 / 448), a code E4M3(x times FP32(1 / scale)).
* Route scores come from the rounded Q and mean keys, thresholds from the unrounded ones.
* A summary carries log2(L_j) in its logit and in the running maximum, so no probability leaves
  the range of E4M3.
* Order: all summaries of a row first (groups of 64, ascending), then the exact blocks in
  descending index order. Conditioning and sinks stand in front of the sequence and come last,
  when the running maximum has settled.
* Probabilities are cast at scale 2^8 through the exponent. The row sum is FP32 over the unrounded
  probabilities for exp2 ("exact"; the SM90 kernel: "cast", over the rounded ones, which keeps a
  constant V constant), over the decoded bytes for expcast. LSE subtracts the 8 again.
* PV is accumulated per block and promoted to FP32.

All rows advance together: a row whose mask does not hold a block sees only -inf there, which
leaves its state exactly as it was.
"""

import math
from typing import NamedTuple

import torch

from .reference import (
    BLOCK_SIZE,
    EVERYTHING,
    TokenRanges,
    block_lengths,
    block_mean,
    forced_blocks,
    num_blocks,
    route_threshold,
)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SAMPLED_BLOCKS = 32  # at least, of a sequence that has twice as many
AMAX_FLOOR = 1e-6  # an all-zero block or channel still gets a usable scale
# ExpCast writes the byte round(8 (x + 7) - 0.35) for 2^x; the offset removes the mean error of
# reading a linear mantissa as a logarithm. Bytes above 126 would be NaN.
EXPCAST_OFFSET = 0.35
EXPCAST_MAX_BYTE = 126


class EmulationOutput(NamedTuple):
    """out: as q, rounded to BF16; lse: (B, H, T) natural log; exact_mask: (B, H, NT, NT) bool."""

    out: torch.Tensor
    lse: torch.Tensor
    exact_mask: torch.Tensor


def sol_attention_fp8_emulation(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tau: float = 1.0,
    estimator: str = "diag",
    routing: bool = True,
    scale: float | None = None,
    sink_kv: TokenRanges = (),
    dense_q: TokenRanges = (),
    k_smoothing: str = "none",
    v_smoothing: str = "none",
    v_bias_correction: bool = False,
    exp_mode: str = "exp2",
    probability_scale: float = 256.0,
    kv_splits: int = 1,
    row_sums: str = "exact",
    whole_maximum: bool = False,
    exact_mask: torch.Tensor | None = None,
) -> EmulationOutput:
    """Sol-Attn with the roundings of the FP8 kernels. Arguments as ``sol_attention_reference``.

    Args:
        q, k, v: (B, T, H, D); rounded to BF16 first, as the kernels do.
        k_smoothing: "none", "mean" (``sampled_mean``), or "block": K holds what is left after the
            rounded mean key of its block, whose logit is added again in FP32.
        v_smoothing: "none" or "mean".
        v_bias_correction: restore the mean of the *rounded* V to that of V.
        exp_mode: "exp2" or "expcast".
        probability_scale: scale of the E4M3 cast; the kernels use 256.
        kv_splits: parts of the KV range, each a whole number of 64-block groups, that are
            normalised and rounded to BF16 apart and merged by their LSE.
        row_sums: with exp2, sum "exact" probabilities or the "cast" ones.
        whole_maximum: round the running maximum up to a whole number, as the SM90 kernel does: then
            the E4M3 codes of normal numbers don't depend on when the maximum moves.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = q.shape[1]
    q32, k32, v32 = (x.to(torch.bfloat16).float() for x in (q, k, v))
    k_offset = sampled_mean(k32) if k_smoothing == "mean" else None
    v_offset = sampled_mean(v32) if v_smoothing == "mean" else None
    ks = k32 if k_offset is None else k32 - k_offset
    vs = v32 if v_offset is None else v32 - v_offset

    q8, q_scale = quantize_blocks(q32)
    v8, v_scale = quantize_channels(vs)
    k_mean = block_mean(ks)
    mean_k8, mean_k_scale = quantize_blocks(padded(k_mean))
    if k_smoothing == "block":
        ks = ks - dequantized_means(mean_k8, mean_k_scale, tokens)
    k8, k_scale = quantize_blocks(ks)
    mean_v8 = padded(block_mean(v8)).to(E4M3).float()

    route = _scaled_logits(q8, mean_k8, q_scale, mean_k_scale, scale)  # (B, H, NTpad*64, groups*64)
    blocks = num_blocks(tokens)
    route = route[:, :, :tokens, :blocks]
    if exact_mask is None:
        exact_mask = _routed(
            route,
            block_mean(q32),
            k_mean,
            tau=tau if routing else EVERYTHING,
            estimator=estimator,
            scale=scale,
            forced=forced_blocks(tokens, sink_kv, dense_q, q.device),
        )

    rows = exact_mask.repeat_interleave(BLOCK_SIZE, 2)[:, :, :tokens]  # (B, H, T, NT)
    log_lengths = block_lengths(tokens, q.device).float().log2()
    summaries = (route + log_lengths).masked_fill(rows, -math.inf)

    def part(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = _OnlineSoftmax(q32, exp_mode, probability_scale, row_sums, whole_maximum)
        for start in range(first, last, BLOCK_SIZE):
            group = slice(start, min(start + BLOCK_SIZE, last))
            state.update(summaries[..., group], mean_v8[:, group])
        for block in reversed(range(first, last)):
            if not bool(exact_mask[..., block].any()):
                continue
            span = slice(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, tokens))
            logits = _scaled_logits(q8, k8[:, span], q_scale, k_scale[:, block : block + 1], scale)
            logits = logits[:, :, :tokens]
            if k_smoothing == "block":
                logits = logits + route[..., block : block + 1]
            logits = logits.masked_fill(~rows[..., block : block + 1], -math.inf)
            state.update(logits, v8[:, span])
        out, lse = state.finish()
        return out * v_scale, lse

    groups = num_blocks(blocks)  # a group is 64 blocks
    per_split = (groups + kv_splits - 1) // kv_splits * BLOCK_SIZE
    parts = [part(first, min(first + per_split, blocks)) for first in range(0, blocks, per_split)]
    out, lse = _merged(parts)
    if v_offset is not None:
        moved = (v8 * v_scale - vs).mean(1, keepdim=True)
        out = out + (v_offset - moved if v_bias_correction else v_offset)
    if k_offset is not None:  # the subtracted logit is the same for every key of a row
        lse = lse + torch.einsum("bthd,bxhd->bht", q32, k_offset) * scale
    return EmulationOutput(out.to(torch.bfloat16).to(q.dtype).contiguous(), lse, exact_mask)


def sample_stride(blocks: int) -> int:
    """Every how many-th block smoothing looks at. Odd: a video's frames are often 2^n blocks long,
    and a sample should not see the same part of every frame."""
    return max(1, blocks // SAMPLED_BLOCKS) | 1


def sampled_mean(x: torch.Tensor) -> torch.Tensor:
    """(B, T, H, D) -> (B, 1, H, D): mean over the tokens of blocks 0, s, 2 s, ... (``sample_stride``).

    Smoothing is exact for whatever vector it subtracts; it only has to take out what all tokens
    share. So a fraction of the sequence is enough, and costs a fraction of a pass.
    """
    block = torch.arange(x.shape[1], device=x.device) // BLOCK_SIZE
    return x[:, block % sample_stride(num_blocks(x.shape[1])) == 0].mean(1, keepdim=True)


def padded(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) with N rounded up to whole blocks by zero rows."""
    batch, rows, heads, dim = x.shape
    out = x.new_zeros(batch, num_blocks(rows) * BLOCK_SIZE, heads, dim)
    out[:, :rows] = x
    return out


def dequantized_means(
    mean_k8: torch.Tensor, mean_k_scale: torch.Tensor, tokens: int
) -> torch.Tensor:
    """(B, T, H, D): the rounded mean key of every token's block."""
    means = mean_k8 * mean_k_scale.repeat_interleave(BLOCK_SIZE, 1).unsqueeze(-1)
    return means.repeat_interleave(BLOCK_SIZE, 1)[:, :tokens]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Values of ``x`` rounded to E4M3, as FP32. Saturates, as the hardware conversion does."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float()


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values (B, Npad, H, D) as FP32 and scales (B, Npad / 64, H): one per 64 rows."""
    x = padded(x)
    batch, rows, heads, dim = x.shape
    tiles = x.view(batch, rows // BLOCK_SIZE, BLOCK_SIZE, heads, dim)
    scale = _scale(tiles.abs().amax((2, 4)))  # (B, N, H)
    return to_e4m3(tiles * (1.0 / scale)[:, :, None, :, None]).view_as(x), scale


def quantize_channels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values (B, T, H, D) as FP32 and scales (B, 1, H, D): one per channel over T."""
    scale = _scale(x.abs().amax(1, keepdim=True))
    return to_e4m3(x * (1.0 / scale)), scale


def _scale(amax: torch.Tensor) -> torch.Tensor:
    """Scale of values up to ``amax``: amax FP32(1 / 448).

    Products with a constant and with a reciprocal, never quotients: BF16 inputs often land exactly
    between two E4M3 codes, and a quotient that one device computes through a reciprocal would put
    them on the other side there.
    """
    return amax.clamp(min=AMAX_FLOOR) * (1.0 / E4M3_MAX)


def _scaled_logits(q8, k8, q_scale, k_scale, scale: float) -> torch.Tensor:
    """(B, H, Nq, Nk) log2 logits of E4M3 operands with one scale per 64 rows of each."""
    acc = torch.einsum("bihd,bjhd->bhij", q8, k8)
    rows = q_scale.transpose(1, 2).repeat_interleave(BLOCK_SIZE, 2)[..., : acc.shape[2]]
    columns = k_scale.transpose(1, 2).repeat_interleave(BLOCK_SIZE, 2)[..., : acc.shape[3]]
    return acc * (rows.unsqueeze(-1) * columns.unsqueeze(-2) * (scale * math.log2(math.e)))


def _routed(route, q_mean, k_mean, *, tau, estimator, scale, forced) -> torch.Tensor:
    """(B, H, NT, NT) bool: mean route score of a block's real rows strictly above its threshold."""
    batch, heads, _, blocks = route.shape
    if tau <= EVERYTHING:
        return forced.new_ones(batch, heads, blocks, blocks)
    scores = block_mean(route.transpose(1, 2)).transpose(1, 2)
    threshold = route_threshold(q_mean, k_mean, tau=tau, estimator=estimator, scale=scale)
    return (scores > threshold.unsqueeze(-1)) | forced


def _merged(parts) -> tuple[torch.Tensor, torch.Tensor]:
    """One (out, lse) from several over disjoint parts of the KV range; partial outputs in BF16."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part_lse for _, part_lse in parts])  # (S, B, H, T)
    total = torch.logsumexp(lse, 0)
    weights = (lse - total).exp().transpose(2, 3).unsqueeze(-1)  # (S, B, T, H, 1)
    outs = torch.stack([out.to(torch.bfloat16).float() for out, _ in parts])
    return (weights * outs).sum(0), total


class _OnlineSoftmax:
    """Running maximum, row sum and output of every row, in log2 units."""

    def __init__(
        self,
        q: torch.Tensor,
        exp_mode: str,
        probability_scale: float,
        row_sums: str = "exact",
        whole_maximum: bool = False,
    ):
        if exp_mode not in ("exp2", "expcast"):
            raise ValueError(f"exp_mode: got {exp_mode!r}, need 'exp2' or 'expcast'")
        if row_sums not in ("exact", "cast"):
            raise ValueError(f"row_sums: got {row_sums!r}, need 'exact' or 'cast'")
        self.sum_cast = row_sums == "cast"
        self.whole_maximum = whole_maximum
        batch, tokens, heads, dim = q.shape
        self.exp_mode = exp_mode
        self.offset = math.log2(probability_scale)
        self.row_max = q.new_full((batch, heads, tokens), -math.inf)
        self.row_sum = q.new_zeros(batch, heads, tokens)
        self.acc = q.new_zeros(batch, heads, tokens, dim)

    def update(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        """Add columns: logits (B, H, T, N) with -inf where masked, values (B, N, H, D)."""
        peak = logits.amax(-1)
        row_max = torch.maximum(self.row_max, peak.ceil() if self.whole_maximum else peak)
        base = row_max.masked_fill(row_max == -math.inf, 0.0)  # no column yet: avoid -inf - -inf
        rescale = (self.row_max - base).exp2()
        exponent = logits - base.unsqueeze(-1) + self.offset
        if self.exp_mode == "exp2":
            exact = exponent.exp2()
            probabilities = to_e4m3(exact)
            row_sum = (probabilities if self.sum_cast else exact).sum(-1)
        else:
            code = (8.0 * (exponent + 7.0) - EXPCAST_OFFSET).round().clamp(0, EXPCAST_MAX_BYTE)
            probabilities = code.to(torch.uint8).view(E4M3).float()
            row_sum = probabilities.sum(-1)
        self.acc = self.acc * rescale.unsqueeze(-1) + probabilities @ values.transpose(1, 2)
        self.row_sum = self.row_sum * rescale + row_sum
        self.row_max = row_max

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, T, H, D) in units of V's scale and LSE (B, H, T), natural log."""
        out = (self.acc / self.row_sum.unsqueeze(-1)).transpose(1, 2)
        lse = (self.row_max + self.row_sum.log2() - self.offset) * math.log(2)
        return out, lse
