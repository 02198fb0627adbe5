"""What the SM90 backend can't take or should not be chosen for. Imports no compiler."""

import functools

import torch

from .config import SolAttnCall, num_blocks
from .sm90_variant import CONSUMERS
from .triton_rules import MAX_BLOCKS, MAX_HEADS, MAX_RANGES


def defaults(call: SolAttnCall) -> tuple[tuple[str, str], ...]:
    """FP8: it is the faster one."""
    return (("precision", "fp8"),)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options and sizes that the kernel or its preparation does not have."""
    config, layout = call.config, call.layout
    if config.block_skip is not None:
        return "block_skip is not in the SM90 kernel"
    for name, ranges in (("sink_kv", layout.sink_kv), ("dense_q", layout.dense_q)):
        if len(ranges) > MAX_RANGES:
            return f"{name} has {len(ranges)} ranges, the SM90 backend takes {MAX_RANGES}"
    if num_blocks(call.tokens) > MAX_BLOCKS:
        return f"{call.tokens} tokens, the SM90 backend takes {MAX_BLOCKS * 64}"
    heads = call.shape[0] * call.shape[2]
    if heads > MAX_HEADS:
        return f"batch times heads is {heads}, the SM90 backend takes {MAX_HEADS}"
    if config.precision == "bf16":
        return None
    if config.qk_dtype != "e4m3":
        return f"qk_dtype {config.qk_dtype!r} is not in the SM90 kernel, which has e4m3"
    if config.exp_mode != "exp2":
        return f"exp_mode {config.exp_mode!r} is not in the SM90 kernel, which has exp2"
    if config.probability_scale != 256:
        return f"probability_scale {config.probability_scale:g} is not in the SM90 kernel, which has 256"
    if config.k_smoothing == "block":
        return "k_smoothing 'block' is not in the SM90 kernel, which has none and mean"
    return None


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
