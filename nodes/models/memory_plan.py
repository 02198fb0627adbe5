"""What a model takes on the device, estimated from its file's header before anything is loaded."""

import math
from dataclasses import dataclass

from .stored_formats import FP8Layers

GIB = 2**30
FP8, FP8_KEEP_ADALN = "fp8", "fp8_keep_adaln"  # of the loader's linear_precision
# What sampling needs beside the weights, for a first answer. Wan 14B at 832x480x81 (32,760 tokens):
# q, k, v, output, residual and normed input of 32,760 x 5120 BF16 are 6 x 0.31 GiB, the
# feed-forward's two of 32,760 x 13,824 are 2 x 0.84 GiB: 3.6 GiB, with CFG in one batch twice that.
SAMPLING_BYTES = 4 * GIB
_BYTES = {"F64": 2, "F32": 2, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model's weights on the device.

    Attributes:
        default_bytes: as ComfyUI loads them: 16 bits a weight, FP8 as it is stored.
        fp8_bytes: with the Linears of the blocks in FP8 and a scale for each of their rows.
        adaln_bytes: how much more than that if layers which FP8 only stores (adaLN) stay in 16
            bits; 0 where there are none.
    """

    default_bytes: int
    fp8_bytes: int
    adaln_bytes: int = 0

    def of(self, precision: str) -> int:
        """Bytes for a value of the loader's linear_precision."""
        if precision == FP8_KEEP_ADALN:
            return self.fp8_bytes + self.adaln_bytes
        return self.fp8_bytes if precision == FP8 else self.default_bytes

    def describe(self) -> str:
        """One line for logs."""
        text = (
            f"weights take {self.default_bytes / GIB:.2f} GiB, with FP8 Linears "
            f"{self._share_of(FP8)}"
        )
        if self.adaln_bytes:
            text += f", with adaLN kept in 16 bits {self._share_of(FP8_KEEP_ADALN)}"
        return text

    def _share_of(self, precision: str) -> str:
        need = self.of(precision)
        return f"{need / GIB:.2f} GiB ({need / max(1, self.default_bytes):.0%})"

    def warning(self, precision: str, device_bytes: int, device: str) -> str | None:
        """What to tell the user if the weights do not fit, else None.

        Args:
            device_bytes: memory of the whole device. device: its name, in words.
        """
        need = self.of(precision)
        if need + SAMPLING_BYTES <= device_bytes:
            return None
        text = (
            f"will not fit: {need / GIB:.1f} GiB of weights and about {SAMPLING_BYTES / GIB:.0f} "
            f"GiB for sampling, {device} has {device_bytes / GIB:.1f} GiB; ComfyUI keeps the rest "
            "in system memory and sends it over in every step"
        )
        if precision == FP8 or (precision == FP8_KEEP_ADALN and not self.adaln_bytes):
            return text
        if self.fp8_bytes + SAMPLING_BYTES <= device_bytes:
            return f"{text}; linear_precision 'fp8' takes {self.fp8_bytes / GIB:.1f} GiB and fits"
        return f"{text}; linear_precision 'fp8' would take {self.fp8_bytes / GIB:.1f} GiB"


def estimate(
    header, prefix: str, layers: FP8Layers, extras: frozenset[str] = frozenset()
) -> MemoryEstimate:
    """Estimate of the model below ``prefix`` in a file; ``extras`` are no weights."""
    default = fp8 = adaln = 0
    stored = {f"{prefix}{layer}.weight" for layer in layers.store}
    small = {f"{prefix}{layer}.weight" for layer in layers.compute | layers.store}
    for key in header.keys:
        if not key.startswith(prefix) or key in extras:
            continue
        shape, size = header.shape(key), _BYTES.get(header.dtype(key), 1)
        elements = math.prod(shape)
        default += elements * size
        # FP8 that is no such layer is widened when it is loaded.
        wide = elements * max(size, 2)
        taken = elements + 4 * shape[0] if key in small else wide
        fp8 += taken
        adaln += wide - taken if key in stored else 0
    return MemoryEstimate(default, fp8, adaln)
