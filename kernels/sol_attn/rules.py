"""Options and sizes that our GPU kernels share. Imports no compiler."""

from .config import SolAttnCall, SolAttnConfig, num_blocks

MAX_RANGES = 4  # separate ranges of sink blocks, and of dense query blocks
MAX_BLOCKS = 2**15 - 1  # block numbers are int16 in lists
MAX_HEADS = 2**16 - 1  # batch times heads is a launch dimension


def unsupported_call(call: SolAttnCall, kernels: str) -> str | None:
    """What no precision can take; ``kernels`` names them in the reason."""
    if call.config.block_skip is not None:
        return f"block_skip is not in {kernels}"
    for name, ranges in (("sink_kv", call.layout.sink_kv), ("dense_q", call.layout.dense_q)):
        if len(ranges) > MAX_RANGES:
            return f"{name} has {len(ranges)} ranges, {kernels} take {MAX_RANGES}"
    if num_blocks(call.tokens) > MAX_BLOCKS:
        return f"{call.tokens} tokens, {kernels} take {MAX_BLOCKS * 64}"
    heads = call.shape[0] * call.shape[2]
    if heads > MAX_HEADS:
        return f"batch times heads is {heads}, {kernels} take {MAX_HEADS}"
    return None


def unsupported_fp8(config: SolAttnConfig, kernels: str) -> str | None:
    """FP8 settings that are not compiled."""
    if config.qk_dtype != "e4m3":
        return f"qk_dtype {config.qk_dtype!r} is not in {kernels}, which have e4m3"
    if config.exp_mode != "exp2":
        return f"exp_mode {config.exp_mode!r} is not in {kernels}, which have exp2"
    if config.probability_scale != 256:
        return f"probability_scale {config.probability_scale:g} is not in {kernels}, which have 256"
    return None


def slower_than_dense(call: SolAttnCall) -> str | None:
    """With every block exact, BF16 dense kernels do the same sum faster."""
    config = call.config
    if config.precision == "bf16" and (not config.routing or config.tau == -1000.0):
        return "BF16 with every block exact is slower than dense attention, runs only when named"
    return None
