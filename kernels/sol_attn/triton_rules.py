"""What the Triton backend can't take or should not be chosen for. Imports no Triton."""

from .config import SolAttnCall, num_blocks

FP8_CAPABILITY = (8, 9)
MAX_RANGES = 4  # separate ranges of sink blocks, and of dense query blocks
MAX_BLOCKS = 2**15 - 1  # block numbers are int16
MAX_HEADS = 2**16 - 1  # batch times heads is a launch dimension


def defaults(call: SolAttnCall) -> tuple[tuple[str, str], ...]:
    """FP8 where the GPU has it: it is the faster one."""
    fp8 = call.device.capability is not None and call.device.capability >= FP8_CAPABILITY
    return (("precision", "fp8" if fp8 else "bf16"),)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options and sizes that the Triton kernels do not have."""
    config, layout = call.config, call.layout
    if config.block_skip is not None:
        return "block_skip is not in the Triton kernels"
    for name, ranges in (("sink_kv", layout.sink_kv), ("dense_q", layout.dense_q)):
        if len(ranges) > MAX_RANGES:
            return f"{name} has {len(ranges)} ranges, the Triton kernels take {MAX_RANGES}"
    if num_blocks(call.tokens) > MAX_BLOCKS:
        return f"{call.tokens} tokens, the Triton kernels take {MAX_BLOCKS * 64}"
    heads = call.shape[0] * call.shape[2]
    if heads > MAX_HEADS:
        return f"batch times heads is {heads}, the Triton kernels take {MAX_HEADS}"
    if config.precision != "fp8":
        return None
    if call.device.capability is not None and call.device.capability < FP8_CAPABILITY:
        return f"FP8 needs SM89 or newer, this GPU is {call.device.describe()}"
    if config.qk_dtype != "e4m3":
        return f"qk_dtype {config.qk_dtype!r} is not in the Triton kernels, which have e4m3"
    if config.exp_mode != "exp2":
        return f"exp_mode {config.exp_mode!r} is not in the Triton kernels, which have exp2"
    if config.probability_scale != 256:
        return (
            f"probability_scale {config.probability_scale:g} is not in the kernels, which have 256"
        )
    return None


def slower_than_dense(call: SolAttnCall) -> str | None:
    """With every block exact, BF16 dense kernels do the same sum faster."""
    config = call.config
    if config.precision == "bf16" and (not config.routing or config.tau == -1000.0):
        return "BF16 with every block exact is slower than dense attention, runs only when named"
    return None
