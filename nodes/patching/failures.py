"""What to do when a kernel raises: the same for every op."""

import logging
import traceback

import torch

log = logging.getLogger("hopper_sol")


def is_interrupt(error: BaseException) -> bool:
    """Whether a person pressed Cancel; that is no failure."""
    return type(error).__name__ == "InterruptProcessingException"


def raise_if_sticky(node: str, backend: str, error: Exception, device: torch.device) -> None:
    """Raise RuntimeError if ``error`` left the GPU in a state in which every later call fails."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as sticky:
        raise RuntimeError(
            f"{node}: backend {backend!r} left the GPU in an error state "
            f"({sticky}); every later call would fail: restart ComfyUI"
        ) from error


def describe_failure(node: str, backend: str, error: Exception) -> str:
    """Log the failure of ``backend`` with its traceback; the error in one short line."""
    log.error(
        "%s: backend %r failed and is off for the rest of this run; the call is computed again "
        "without it\n%s",
        node, backend, "".join(traceback.format_exception(error)),
    )  # fmt: skip
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
