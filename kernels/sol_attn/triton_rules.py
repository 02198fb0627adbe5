"""What the Triton backend can't take, and what it fills in. Imports no Triton."""

from .config import SolAttnCall
from .rules import unsupported_call, unsupported_fp8

FP8_CAPABILITY = (8, 9)
KERNELS = "the Triton kernels"


def defaults(call: SolAttnCall) -> tuple[tuple[str, str], ...]:
    """FP8 where the GPU has it: it is the faster one."""
    fp8 = call.device.capability is not None and call.device.capability >= FP8_CAPABILITY
    return (("precision", "fp8" if fp8 else "bf16"),)


def unsupported_option(call: SolAttnCall) -> str | None:
    """Options and sizes that the Triton kernels do not have."""
    reason = unsupported_call(call, KERNELS)
    if reason:
        return reason
    if call.config.route_source == "kernel":
        return f"route_source 'kernel' is not in {KERNELS}, which have prepass"
    if call.config.precision != "fp8":
        return None
    if call.device.capability is not None and call.device.capability < FP8_CAPABILITY:
        return f"FP8 needs SM89 or newer, this GPU is {call.device.describe()}"
    return unsupported_fp8(call.config, KERNELS)
