"""What the SM90 backend can't take or should not be chosen for. Imports no compiler."""

import functools

import torch

from .config import BLOCK_SIZE, SolAttnCall, num_blocks
from .rules import unsupported_call, unsupported_fp8
from .sm90_variant import CONSUMERS, WORDS_INSIDE

KERNELS = "the SM90 kernels"
MOST_TOKENS = WORDS_INSIDE * 32 * BLOCK_SIZE  # whose bits fit when they are decided inside


def defaults(call: SolAttnCall) -> tuple[tuple[str, str], ...]:
    """FP8: it is the faster one."""
    return (("precision", "fp8"),)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options and sizes that the kernel or its preparation does not have."""
    config = call.config
    reason = unsupported_call(call, KERNELS)
    if not reason and config.route_source == "kernel" and not fits_inside(call.tokens):
        reason = f"route_source 'kernel' with {call.tokens} tokens, {KERNELS} take {MOST_TOKENS}"
    if reason or config.precision == "bf16":
        return reason
    if config.k_smoothing == "block":
        return f"k_smoothing 'block' is not in {KERNELS}, which have none and mean"
    return unsupported_fp8(config, KERNELS)


def fits_inside(tokens: int) -> bool:
    """Whether the bits of a query block fit into the kernel's shared memory."""
    return 2 * num_blocks(num_blocks(tokens)) <= WORDS_INSIDE


def choose_splits(shape: tuple[int, int, int, int], device: torch.device) -> int:
    """Parts of the keys: as few of 1, 2, 4 as give every multiprocessor an item of work."""
    batch, tokens, heads, _ = shape
    blocks = num_blocks(tokens)
    items = (blocks + CONSUMERS - 1) // CONSUMERS * batch * heads
    groups = num_blocks(blocks)
    for splits in (1, 2, 4):
        if items * splits >= multiprocessors(device) or 2 * splits > groups:
            return splits
    return 4


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
