"""Wan 2.1 and 2.2: a plain video transformer, tokens t-major, then h, then w."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Grid, ModelAdapter, uses_constant


@dataclass(frozen=True)
class WanAdapter(ModelAdapter):
    """See ModelAdapter. patch_size: (t, h, w) latent cells of a token."""

    family: ClassVar[str] = "Wan"
    temporal_stride: ClassVar[int] = 4
    default_estimator: ClassVar[str] = "diag"
    default_token_order: ClassVar[str] = "morton_3d"
    default_dense_layers: ClassVar[str] = "0"

    patch_size: Grid = (1, 2, 2)

    @classmethod
    def describe(cls, diffusion_model) -> "WanAdapter | None":
        from comfy.ldm.wan.model import WanModel

        if not isinstance(diffusion_model, WanModel):
            return None
        kind = type(diffusion_model)
        dim, heads = diffusion_model.dim, diffusion_model.num_heads
        blocks = len(diffusion_model.blocks)
        unsupported = None
        if kind is not WanModel:
            # Variants run further attention inside or between the blocks; each needs its own look.
            unsupported = f"Wan variant {kind.__name__} is not supported yet"
        return cls(
            name=f"Wan {diffusion_model.model_type} ({blocks} blocks, {heads} heads)",
            num_blocks=blocks,
            num_heads=heads,
            head_dim=dim // heads,
            text_dim=diffusion_model.text_embedding[0].in_features,
            publishes_block_index=uses_constant(kind.forward_orig, "block_index"),
            unsupported=unsupported,
            patch_size=tuple(diffusion_model.patch_size),
        )

    def grid(self, latent_shape: tuple[int, ...]) -> Grid:
        # ComfyUI pads the latent up to whole patches.
        t, h, w = (-(-n // p) for n, p in zip(latent_shape[-3:], self.patch_size, strict=True))
        return (t, h, w)

    def default_fp8_layers(self) -> str:
        # FP8 attention in every layer visibly degrades Wan; the middle third does not (article,
        # 1.3B: layers 10-19 of 30).
        third = self.num_blocks // 3
        return f"{third}-{self.num_blocks - third - 1}"
