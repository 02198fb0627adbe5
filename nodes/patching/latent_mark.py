"""A few values of a latent, enough to tell whether a sampler run made it. No tensor is kept."""

import math
from dataclasses import dataclass

import torch

_SAMPLES = 64
# ComfyUI may hand a latent on in half precision.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class LatentMark:
    """Shape of a latent and evenly spaced values of it."""

    shape: tuple[int, ...]
    values: tuple[float, ...]

    def matches(self, other: "LatentMark | None") -> bool:
        """Whether both were taken of the same latent, up to rounding to half precision."""
        if other is None or self.shape != other.shape:
            return False
        return all(
            math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (a != a and b != b)
            for a, b in zip(self.values, other.values, strict=True)
        )


def mark_of(latent, shapes=None) -> LatentMark | None:
    """Mark of a latent tensor, or of the first of several; None for anything else.

    Args:
        latent: a tensor, a nested one, or with ``shapes`` several in one row.
        shapes: of the tensors that a sampler carries in one row, video first.
    """
    if getattr(latent, "is_nested", False):
        latent = latent.unbind()[0]
    if not isinstance(latent, torch.Tensor) or latent.numel() == 0:
        return None
    if shapes is not None and len(shapes) > 1:
        first = (latent.shape[0], *shapes[0][1:])
        latent = latent.flatten(1)[:, : math.prod(first[1:])].reshape(first)
    flat = latent.reshape(-1)
    index = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64)
    values = flat[index.long().to(flat.device)].float().cpu().tolist()
    return LatentMark(tuple(latent.shape), tuple(values))
