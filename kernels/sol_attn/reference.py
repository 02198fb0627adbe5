"""Sol-Attn in plain PyTorch: the specification every kernel is tested against.

One query row r of query block i attends to two populations in one softmax (README.md, eq. 4-6):

    exact blocks    j in E(i):   every token t with logit  s Q_r . K_t          and weight 1
    summary blocks  j not in E:  one pseudo-token with logit  s Q_r . mean(K_j)  and weight L_j,
                                 value mean(V_j)

so the whole sequence always stays in the denominator. Block j is exact for block i when its score
is above a threshold taken from the spread of all block scores, when it is i or a neighbour, when
it holds a sink token, or when block i holds a dense query.

Order-free, in the input's own precision (BF16 and FP16 are computed in FP32). Works on any device
and for any head dimension. Source: arXiv 2607.24027.
"""

import math
from typing import NamedTuple

import torch

BLOCK_SIZE = 64
EVERYTHING = -1000.0  # tau at and below which every block is exact, whatever its score
SIGMA_FLOOR = 1e-6  # added to the variance of the block scores, in squared log2 units
# Elements of the largest intermediate; bounds memory, not results.
CHUNK_ELEMENTS = 1 << 26

TokenRanges = "tuple[tuple[int, int], ...]"


class ReferenceOutput(NamedTuple):
    """out: as q; lse: (B, H, T) natural log; exact_mask: (B, H, NT, NT) bool, [query, key] blocks."""

    out: torch.Tensor
    lse: torch.Tensor
    exact_mask: torch.Tensor


def sol_attention_reference(
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
    exact_mask: torch.Tensor | None = None,
) -> ReferenceOutput:
    """softmax over exact tokens and block summaries, in the precision of the input.

    Args:
        q, k, v: (B, T, H, D), floating point, any strides.
        tau: route threshold in standard deviations above the mean block score.
        estimator: "diag" or "exact" (see ``route_threshold``).
        routing: False makes every block exact.
        scale: multiplies q k^T; D ** -0.5 if None.
        sink_kv: (start, stop) token ranges whose blocks are exact for every query.
        dense_q: (start, stop) token ranges whose query blocks are exact against every key.
        exact_mask: (B, H, NT, NT) bool that replaces the routing decision, for same-mask parity.

    Returns:
        out (B, T, H, D) in q's dtype, contiguous; lse; the mask that was used.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    qc, kc, vc = (x.to(dtype) for x in (q, k, v))
    if exact_mask is None:
        exact_mask = route_mask(
            block_mean(qc),
            block_mean(kc),
            tau=tau if routing else EVERYTHING,
            estimator=estimator,
            scale=scale,
            forced=forced_blocks(q.shape[1], sink_kv, dense_q, q.device),
        )
    out, lse = attend(qc, kc, vc, exact_mask, scale)
    return ReferenceOutput(out.to(q.dtype), lse, exact_mask)


def num_blocks(tokens: int) -> int:
    """Blocks of ``tokens`` tokens; the last may be partial."""
    return (tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


def block_lengths(tokens: int, device=None) -> torch.Tensor:
    """(NT,) real tokens of every block: 64, and what is left for the last."""
    starts = torch.arange(0, tokens, BLOCK_SIZE, device=device)
    return (tokens - starts).clamp(max=BLOCK_SIZE)


def block_mean(x: torch.Tensor) -> torch.Tensor:
    """(B, T, H, D) -> (B, NT, H, D): mean over the real tokens of every block."""
    batch, tokens, heads, dim = x.shape
    blocks = num_blocks(tokens)
    padded = x.new_zeros(batch, blocks * BLOCK_SIZE, heads, dim)
    padded[:, :tokens] = x
    total = padded.view(batch, blocks, BLOCK_SIZE, heads, dim).sum(2)
    return total / block_lengths(tokens, x.device).to(x.dtype).view(1, blocks, 1, 1)


def block_scores(q_mean: torch.Tensor, k_mean: torch.Tensor, scale: float) -> torch.Tensor:
    """(B, H, NT, NT) score of [query block, key block] in log2 units: s log2(e) q_mean . k_mean.

    Equal to the mean over the block's rows of their summary logits, since the dot is linear.
    """
    return torch.einsum("bihd,bjhd->bhij", q_mean, k_mean) * (scale * math.log2(math.e))


def route_threshold(
    q_mean: torch.Tensor, k_mean: torch.Tensor, *, tau: float, estimator: str, scale: float
) -> torch.Tensor:
    """(B, H, NT) threshold of every query block: mean + tau * sigma of its block scores.

    The population is all NT key blocks, each with weight 1 (a partial block, sinks and the
    diagonal included); the variance divides by NT. "diag" takes the variance per channel,
    dropping covariance; "exact" takes the full second moment, which equals the variance of the
    scores themselves. Moments are centred first: a raw second moment loses all digits when the
    mean key is large against its spread.
    """
    scale_log2 = scale * math.log2(math.e)
    mu = k_mean.mean(1, keepdim=True)  # (B, 1, H, D)
    centred = k_mean - mu
    mean = (q_mean * mu).sum(-1) * scale_log2  # (B, NT, H)
    if estimator == "diag":
        variance = (q_mean.square() * centred.square().mean(1, keepdim=True)).sum(-1)
    elif estimator == "exact":
        moment = torch.einsum("bjhd,bjhe->bhde", centred, centred) / k_mean.shape[1]
        variance = torch.einsum("bihd,bhde,bihe->bih", q_mean, moment, q_mean)
    else:
        raise ValueError(f"estimator: got {estimator!r}, need 'diag' or 'exact'")
    sigma = (variance.clamp(min=0) * scale_log2**2 + SIGMA_FLOOR).sqrt()
    return (mean + tau * sigma).transpose(1, 2)


def route_mask(
    q_mean: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    tau: float,
    estimator: str,
    scale: float,
    forced: torch.Tensor,
) -> torch.Tensor:
    """(B, H, NT, NT) bool: which key blocks are exact for which query block.

    score > threshold (strictly), or ``forced`` (NT, NT). tau <= ``EVERYTHING`` makes everything exact
    without looking at the scores.
    """
    if tau <= EVERYTHING:
        batch, blocks, heads, _ = q_mean.shape
        return forced.new_ones(batch, heads, blocks, blocks)
    threshold = route_threshold(q_mean, k_mean, tau=tau, estimator=estimator, scale=scale)
    scores = block_scores(q_mean, k_mean, scale)
    return (scores > threshold.unsqueeze(-1)) | forced


def forced_blocks(
    tokens: int, sink_kv: TokenRanges = (), dense_q: TokenRanges = (), device=None
) -> torch.Tensor:
    """(NT, NT) bool [query, key]: own block, both neighbours, sink columns, dense rows.

    A token range acts on every block it touches.
    """
    index = torch.arange(num_blocks(tokens), device=device)
    forced = (index.unsqueeze(1) - index.unsqueeze(0)).abs() <= 1
    for start, stop in sink_kv:
        forced[:, start // BLOCK_SIZE : num_blocks(stop)] = True
    for start, stop in dense_q:
        forced[start // BLOCK_SIZE : num_blocks(stop), :] = True
    return forced


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact_mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact tokens and block summaries in one softmax, for a given mask.

    Args:
        q, k, v: (B, T, H, D) FP32 or FP64.
        exact_mask: (B, H, NT, NT) bool.

    Returns:
        out (B, T, H, D) contiguous, lse (B, H, T).
    """
    batch, tokens, heads, dim = q.shape
    blocks = num_blocks(tokens)
    scale_log2 = scale * math.log2(math.e)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    k_mean, v_mean = (block_mean(x).transpose(1, 2) for x in (k, v))  # (B, H, NT, D)
    lengths = block_lengths(tokens, q.device).to(q.dtype)
    values = torch.cat([vh, v_mean], 2)

    out = q.new_empty(batch, tokens, heads, dim)
    lse = q.new_empty(batch, heads, tokens)
    rows = batch * heads * BLOCK_SIZE * (tokens + blocks)
    step = max(1, min(blocks, CHUNK_ELEMENTS // rows))
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        row = slice(first * BLOCK_SIZE, min(last * BLOCK_SIZE, tokens))
        exact = exact_mask[:, :, first:last].repeat_interleave(BLOCK_SIZE, 2)
        exact = exact[:, :, : row.stop - row.start]  # (B, H, R, NT)
        exact_tokens = exact.repeat_interleave(BLOCK_SIZE, 3)[..., :tokens]

        token_logits = qh[:, :, row] @ kh.transpose(2, 3) * scale_log2
        token_logits.masked_fill_(~exact_tokens, -math.inf)
        summary_logits = qh[:, :, row] @ k_mean.transpose(2, 3) * scale_log2
        summary_logits.masked_fill_(exact, -math.inf)

        peak = torch.maximum(token_logits.amax(-1), summary_logits.amax(-1)).unsqueeze(-1)
        weights = torch.cat(
            [(token_logits - peak).exp2_(), (summary_logits - peak).exp2_() * lengths], -1
        )
        total = weights.sum(-1, keepdim=True)
        out[:, row] = (weights @ values / total).transpose(1, 2)
        lse[:, :, row] = ((peak + total.log2()) * math.log(2)).squeeze(-1)
    return out, lse
