"""What the SM90 backend can't take or should not be chosen for. Imports no compiler."""

import functools

import torch

from .config import num_blocks
from .sm90_variant import CONSUMERS


def choose_splits(shape: tuple[int, int, int, int], device: torch.device) -> int:
    """Parts of the keys: as few of 1, 2, 4 as give every multiprocessor an item of work."""
    batch, tokens, heads, _ = shape
    blocks = num_blocks(tokens)
    items = (blocks + CONSUMERS - 1) // CONSUMERS * batch * heads
    groups = num_blocks(blocks)
    for splits in (1, 2, 4):
        if items * splits >= _multiprocessors(device) or 2 * splits > groups:
            return splits
    return 4


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
