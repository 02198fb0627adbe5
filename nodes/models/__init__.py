"""Model families: what patches must know of them. One file a family, listed here."""

from .base import ADALN, ATTENTION, FFN, LinearLayer, ModelAdapter, TokenSequence
from .h3 import H3Adapter
from .wan import WanAdapter

ADAPTERS: tuple[type[ModelAdapter], ...] = (WanAdapter, H3Adapter)


def find_adapter(model) -> ModelAdapter | None:
    """The adapter of a ComfyUI ModelPatcher's diffusion model, or None for an unknown family."""
    diffusion_model = model.get_model_object("diffusion_model")
    # torch.compile hands out a wrapper module; the family is that of the module inside.
    diffusion_model = getattr(diffusion_model, "_orig_mod", diffusion_model)
    for adapter in ADAPTERS:
        found = adapter.describe(diffusion_model)
        if found is not None:
            return found
    return None


def family_names() -> str:
    """Supported families in words, for messages."""
    return " or ".join(adapter.family for adapter in ADAPTERS)


__all__ = [
    "ADALN",
    "ADAPTERS",
    "ATTENTION",
    "FFN",
    "LinearLayer",
    "ModelAdapter",
    "TokenSequence",
    "family_names",
    "find_adapter",
]
