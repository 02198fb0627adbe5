"""Host side of the SM90 Sol-Attn kernel: views of the operands, launch, merge of splits."""

import functools
import math
import os
from pathlib import Path

import torch

from .. import jit
from .config import BLOCK_SIZE, HEAD_DIM, num_blocks
from .prepare import Prepared
from .sm90_rules import multiprocessors
from .sm90_variant import CONSUMERS, Variant
from .triton_fwd import merge
from .triton_thresholds import Thresholds

TRACED_SWITCH = "HOPPER_SOL_TRACED"  # for compute-sanitizer --tool racecheck: see README.md


def attend(
    operands: Prepared,
    route: torch.Tensor | Thresholds | None,
    *,
    scale_log2: float,
    with_lse: bool,
    splits: int = 1,
    order: torch.Tensor | None = None,
    skipped_blocks: int = 0,
    decided: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """out (B, T, H, 128) BF16 contiguous, lse (B, H, T) FP32 natural log if asked for, and the
    number of exact blocks of every query block (B, H, NT) int32.

    Args:
        operands: FP8 ones with V in "k32" order.
        route: (B, H, NT, NW) packed bits of exact blocks; or ``Thresholds`` to decide by; None takes
            every block exactly.
        splits: parts of the keys, merged afterwards.
        decided: (B, H, NT, NW) int32 for the packed bits that thresholds led to, if wanted. Words of
            query blocks that nobody computed are those of ``Thresholds.forced``.
    Row i of the operands goes to row order[i] of the results. The LSE does not hold the logit of
    ``operands.k_offset``. Rows of the first ``skipped_blocks`` blocks may be left undefined.
    """
    batch, heads, blocks, _ = operands.q_mean.shape
    tokens = operands.tokens
    device = operands.q.device
    offset = operands.out_offset if splits == 1 else None
    none = _placeholder(device)
    words, limits, source = none.words, None, "all"
    if isinstance(route, Thresholds):
        words, limits, source = route.forced.expand(batch * heads, -1, -1), route.limits, "scores"
        if decided is not None:
            words = decided.view(batch * heads, blocks, -1).copy_(words)
        words = words.permute(2, 1, 0)
    elif route is not None:
        words, source = route.view(batch * heads, blocks, -1).permute(2, 1, 0), "words"
    variant = Variant(
        operands.precision,
        source=source,
        with_lse=with_lse or splits > 1,
        ordered=order is not None,
        with_offset=offset is not None,
        traced=os.environ.get(TRACED_SWITCH, "0") != "0",
        keeps_words=source == "scores" and decided is not None,
    )
    parts = torch.empty(splits, batch, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    lse = None
    if variant.with_lse:
        lse = torch.empty(splits, batch, heads, tokens, dtype=torch.float32, device=device)
    if variant.fp8:
        # Heads first, V with channels first: as the kernel wants them, but for the order.
        tensors = (operands.q, operands.k, operands.v, operands.mean_k, operands.mean_v)
        tensors = tuple(x.view(torch.uint8).permute(2, 3, 1, 0) for x in tensors)
    else:
        q, k, v = (_tma_view(x) for x in (operands.q, operands.k, operands.v))
        tensors = (
            *(q.permute(1, 3, 2, 0), k.permute(1, 3, 2, 0), v.permute(3, 1, 2, 0)),
            *(operands.mean_k.permute(2, 3, 1, 0), operands.mean_v.permute(3, 2, 1, 0)),
        )

    def per_head(x, count):
        """(B, H, count) -> (count, B H)."""
        if x is None:
            return none.floats
        return x.reshape(batch * heads, count).T

    counts = torch.empty(splits, batch, heads, blocks, dtype=torch.int32, device=device)
    first_tile = skipped_blocks // CONSUMERS
    row_tiles = (blocks + CONSUMERS - 1) // CONSUMERS - first_tile
    items = row_tiles * batch * heads * splits
    _compiled(variant)(
        *tensors,
        *(per_head(operands.q_scale, blocks), per_head(operands.k_scale, blocks)),
        per_head(operands.mean_k_scale, num_blocks(blocks)),
        *(per_head(operands.v_scale, HEAD_DIM), per_head(offset, HEAD_DIM)),
        *(words, per_head(limits, blocks)),
        none.order if order is None else order,
        parts.view(splits * batch, tokens, heads, HEAD_DIM).permute(3, 2, 1, 0),
        none.floats if lse is None else lse.view(splits * batch * heads, tokens).T,
        counts.view(splits * batch * heads, blocks).T,
        torch.zeros(1, dtype=torch.int32, device=device),
        *(scale_log2, math.log2(tokens - (blocks - 1) * BLOCK_SIZE)),
        *(tokens, splits, first_tile, min(items, multiprocessors(device))),
    )
    counts[..., :skipped_blocks] = 0
    if splits == 1:
        return parts[0], lse[0] if with_lse else None, counts[0]
    return *merge(parts, lse, operands.out_offset), counts.sum(0, dtype=torch.int32)


@functools.cache
def _compiled(variant: Variant):
    def build(options: str):
        from .sm90_compile import compile_variant

        return compile_variant(variant, options)

    return jit.load(jit.Kernel(variant.name, build, sources(), settings=repr(variant)))


def sources() -> tuple[Path, ...]:
    """Files that decide what is generated; a few too many, so that none is forgotten."""
    folder = Path(__file__).parent
    return (folder / "config.py", *sorted(folder.glob("sm90_*.py")))


class _Placeholder:
    """Arguments that a variant does not read."""

    def __init__(self, device):
        self.floats = torch.ones(1, 1, device=device)
        self.words = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        self.order = torch.zeros(1, dtype=torch.int64, device=device)


@functools.cache
def _placeholder(device: torch.device) -> _Placeholder:
    return _Placeholder(device)


def _tma_view(x: torch.Tensor) -> torch.Tensor:
    """``x`` if TMA can read it (16-byte address and strides), else a contiguous copy."""
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(
        stride * size % 16 == 0 or n == 1
        for stride, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )
    return x if aligned else x.contiguous()
