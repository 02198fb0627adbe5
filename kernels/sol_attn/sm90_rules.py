"""What the SM90 backend can't take or should not be chosen for. Imports no compiler."""

import functools

import torch

from .config import SolAttnCall, num_blocks
from .rules import unsupported_call, unsupported_fp8
from .sm90_variant import CONSUMERS

KERNELS = "the SM90 kernels"


def defaults(call: SolAttnCall) -> tuple[tuple[str, str], ...]:
    """FP8: it is the faster one."""
    return (("precision", "fp8"),)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options and sizes that the kernel or its preparation does not have."""
    config = call.config
    reason = unsupported_call(call, KERNELS)
    if reason or config.precision == "bf16":
        return reason
    if config.k_smoothing == "block":
        return f"k_smoothing 'block' is not in {KERNELS}, which have none and mean"
    return unsupported_fp8(config, KERNELS)


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
