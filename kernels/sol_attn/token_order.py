"""Orders in which the tokens of a video grid are laid out before they are cut into blocks.

Raster order makes a 64-token block a thin strip of one frame. Along a Z-order (Morton) curve a
block is about 4 x 4 x 4 tokens: its mean represents it better and attention mass concentrates in
fewer blocks. Attention does not care about token order, so permuting q, k and v alike and
un-permuting the output changes nothing but the blocks.

An order is an int64 permutation ``order`` with ``permuted = x[order]``; ``inverse`` undoes it.
"""

import functools

import torch

from .config import BLOCK_SIZE

_MAX_BITS = 21  # three coordinates in one int64


def _spread(coordinate: torch.Tensor, stride: int) -> torch.Tensor:
    """Move bit b of ``coordinate`` to bit ``stride * b``."""
    out = torch.zeros_like(coordinate)
    for bit in range(_MAX_BITS):
        out |= ((coordinate >> bit) & 1) << (stride * bit)
    return out


@functools.lru_cache(maxsize=16)
def morton_order(grid: tuple[int, int, int], per_frame: bool = False) -> torch.Tensor:
    """Z-order of a (t, h, w) grid whose tokens are stored t-major, then h, then w.

    Args:
        grid: sizes in tokens; they need not be powers of two.
        per_frame: keep frames one after another and curve inside each (for models whose latent
            frames are not equally spaced in time).

    Returns:
        (t * h * w,) int64 on the CPU. Cached: do not write into it.
    """
    t, h, w = grid
    index = torch.arange(t * h * w, device="cpu")
    frame, row, column = index // (h * w), index // w % h, index % w
    if per_frame:
        cells = _spread(row, 2) | _spread(column, 2) << 1
        return torch.argsort(frame * (1 << (2 * max(h, w).bit_length())) + cells)
    return torch.argsort(_spread(frame, 3) | _spread(row, 3) << 1 | _spread(column, 3) << 2)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    out = torch.zeros_like(order)  # what is no permutation must not index anywhere
    out[order] = torch.arange(order.numel(), device=order.device)
    return out


def span_order(order: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
    """Apply ``order`` to the span [start, start + len(order)) of a longer sequence.

    Blocks are cut from row 0 of the whole sequence. When the span starts inside a block, the
    order is rotated so that its cells, not straddled halves of two cells, fill whole blocks: the
    last (-start mod 64) tokens of the curve share the ragged first block.
    """
    stop = start + order.numel()
    if stop > tokens:
        raise ValueError(f"order: a span of {order.numel()} tokens at {start} ends past {tokens}")
    lead = min(-start % BLOCK_SIZE, order.numel())
    rotated = torch.roll(order, lead) + start
    index = torch.arange(tokens, device=order.device)
    return torch.cat([index[:start], rotated, index[stop:]])
