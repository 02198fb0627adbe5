"""What an FP8 Linear call is, and the rules that hold for every backend. Plain data."""

from dataclasses import dataclass, field

import torch

from ..arch import DeviceFacts

# The GEMM reads rows in 16-byte pieces.
ALIGNMENT = 16
# Activations that can be fused with the quantisation of their result.
GELU = "gelu_tanh"
SWIGLU = "swiglu"
LAYER_NORM = "layer"
RMS_NORM = "rms"
# Fast accumulation keeps the sum of a whole row in the tensor cores' own accumulator of about 22
# bits, and cuts the more the larger that sum is. From this K on promoting to FP32 is the faster way
# on an H200 as well; below it costs 4 to 25 % (times and errors: README.md).
SLOW_ACCUM_FROM_K = 8192


@dataclass(frozen=True)
class FP8LinearCall:
    """The facts of a call that backends decide on.

    Attributes:
        m, n, k: rows of the activations, output features, input features.
        dtype: of the activations; float8_e4m3fn where they come already quantised.
        device: of the activations.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: DeviceFacts


@dataclass(frozen=True)
class QuantizeCall:
    """The facts of a row quantisation: (rows, columns) of ``dtype`` on ``device``."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: DeviceFacts


@dataclass(frozen=True)
class NormSettings:
    """A norm and how its result is modulated.

    Attributes:
        kind: LAYER_NORM or RMS_NORM.
        eps: added to the variance, or to the mean square.
        round_product: whether norm (1 + scale) is rounded before shift is added: two operations,
            as in MiniMax-H3. Else it is one, as in Wan's ``addcmul``.
        scale_has_one: whether scale is 1 + scale already, rounded by whoever added them.
    """

    kind: str = LAYER_NORM
    eps: float = 1e-6
    round_product: bool = False
    scale_has_one: bool = False


@dataclass
class FP8LinearStats:
    """Filled in by ``fp8_linear``.

    Attributes:
        backend: the one that ran.
        fast_accum: whether the GEMM was asked to accumulate fast.
        declined: preferred backends that declined, with reasons.
    """

    backend: str = ""
    fast_accum: bool = False
    declined: dict[str, str] = field(default_factory=dict)


def use_fast_accum(k: int) -> bool:
    """Whether a GEMM over ``k`` input features accumulates fast."""
    return k < SLOW_ACCUM_FROM_K


def unaligned(call: FP8LinearCall) -> str | None:
    """K and N of the FP8 GEMM."""
    if call.k % ALIGNMENT == 0 and call.n % ALIGNMENT == 0:
        return None
    return f"needs K and N that are multiples of {ALIGNMENT}, got K {call.k}, N {call.n}"


def needs_fp8_tensor_cores(call: FP8LinearCall) -> str | None:
    """CUDA devices before SM89 have no FP8 GEMM; a CPU computes it in software."""
    device = call.device
    if device.type == "cuda" and (device.capability or (0, 0)) < (8, 9):
        return f"needs an NVIDIA GPU of SM89 or newer, this is {device.describe()}"
    return None


def slower_than_linear(call: FP8LinearCall) -> str | None:
    """Hold the reference back from "auto" wherever a fast BF16 Linear exists."""
    if call.device.type == "cpu":
        return None
    return f"slower than F.linear on {call.device.describe()}, runs there only when named"
