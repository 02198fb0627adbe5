"""Wan 2.1 and 2.2 and their variants: video transformers, tokens t-major, then h, then w."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .base import (
    ATTENTION,
    FFN,
    Grid,
    ModelAdapter,
    TokenSequence,
    named_linears,
    uses_constant,
)

# Embeddings, the time projection and the head stay as they are: little work, and what they make
# reaches every block. k_img and v_img exist in image-to-video models of Wan 2.1.
_LINEARS = {
    ATTENTION: (
        *(f"self_attn.{name}" for name in "qkvo"),
        *(f"cross_attn.{name}" for name in ("q", "k", "v", "k_img", "v_img", "o")),
    ),
    FFN: ("ffn.0", "ffn.2"),
}

# ComfyUI's classes whose self-attention we know, and what people call them. Each was read: one
# self-attention over the whole sequence comes first in a block. What a variant adds (audio and face
# attention) calls attention without the run's options and never reaches us.
_VARIANTS = {
    "WanModel": None,
    "VaceWanModel": "VACE",
    "CameraWanModel": "Fun-Camera",
    "AnimateWanModel": "Animate",
    "HumoWanModel": "HuMo",
    "WanModel_S2V": "S2V",
}
_REFERENCE_BEHIND = {"HumoWanModel", "WanModel_S2V"}
# S2V packs the frames before the video, coarser the older they are: (steps in time, latent cells of a
# token along h and w) of each pack.
_MOTION = ((1, 2), (1, 4), (4, 8))


@dataclass(frozen=True)
class WanAdapter(ModelAdapter):
    """See ModelAdapter.

    Attributes:
        patch_size: (t, h, w) latent cells of a token.
        reference: where the tokens of a reference latent go: "front", "behind", or "none".
        motion: whether tokens of preceding frames (S2V) may follow.
    """

    family: ClassVar[str] = "Wan"
    temporal_stride: ClassVar[int] = 4
    default_estimator: ClassVar[str] = "diag"
    # FP8 error against FP32 on structured inputs, 32,760 tokens, density 16 %: none 0.0135,
    # k 0.0111, kv 0.0108, block 0.0093 (BENCHMARKS.md). k costs nothing to speak of; with
    # block a call takes 1.5 times as long.
    default_smoothing: ClassVar[str] = "k"
    default_token_order: ClassVar[str] = "morton_3d"
    default_dense_layers: ClassVar[str] = "0"
    prefix_words: ClassVar[str] = "reference tokens"

    patch_size: Grid = (1, 2, 2)
    reference: str = "none"
    motion: bool = False

    @classmethod
    def describe(cls, diffusion_model) -> "WanAdapter | None":
        from comfy.ldm.wan.model import WanModel

        if not isinstance(diffusion_model, WanModel):
            return None
        kind = type(diffusion_model)
        dim, heads = diffusion_model.dim, diffusion_model.num_heads
        blocks = len(diffusion_model.blocks)
        variant = _VARIANTS.get(kind.__name__)
        publishes = uses_constant(kind.forward_orig, "block_index")
        unsupported = None
        if kind.__name__ not in _VARIANTS:
            # A class of its own may run any attention in its blocks; each needs its own look.
            unsupported = f"Wan variant {kind.__name__} is not supported yet"
        elif variant == "S2V" and not publishes:
            unsupported = "Wan variant S2V needs a newer ComfyUI, this one hides its blocks' calls"
        if kind.__name__ in _REFERENCE_BEHIND:
            reference = "behind"
        else:
            reference = "none" if getattr(diffusion_model, "ref_conv", None) is None else "front"
        return cls(
            name=f"Wan {variant or diffusion_model.model_type} ({blocks} blocks, {heads} heads)",
            num_blocks=blocks,
            num_heads=heads,
            head_dim=dim // heads,
            text_dim=diffusion_model.text_embedding[0].in_features,
            publishes_block_index=publishes,
            unsupported=unsupported,
            nested_blocks=variant == "VACE",
            linears=named_linears(diffusion_model.blocks, _LINEARS),
            patch_size=tuple(diffusion_model.patch_size),
            reference=reference,
            motion=variant == "S2V",
        )

    def grid(self, latent_shape: tuple[int, ...]) -> Grid:
        # ComfyUI pads the latent up to whole patches.
        t, h, w = (-(-n // p) for n, p in zip(latent_shape[-3:], self.patch_size, strict=True))
        return (t, h, w)

    def sequence(self, latent_shape: tuple[int, ...], inputs: Mapping) -> TokenSequence:
        grid = self.grid(latent_shape)
        before = after = 0
        reference = inputs.get("reference_latent")
        if reference is not None and self.reference != "none":
            # A convolution without padding; one without frames (B, C, H, W) in front.
            sizes, patch = reference.shape[2:], self.patch_size[-(reference.dim() - 2) :]
            tokens = math.prod(n // p for n, p in zip(sizes, patch, strict=True))
            before, after = (tokens, 0) if self.reference == "front" else (0, tokens)
        frames = inputs.get("time_dim_concat")  # frames that follow the latent's
        if frames is not None:
            after += math.prod(self.grid(tuple(frames.shape)))
        latents = inputs.get("context_latents")
        for latent in () if latents is None else latents:
            after += math.prod(self.grid(tuple(latent.shape)))
        motion = inputs.get("reference_motion")
        if motion is not None and self.motion:
            height, width = motion.shape[-2:]
            after += sum(t * (height // cells) * (width // cells) for t, cells in _MOTION)
        return TokenSequence(grid, before, after)

    def default_fp8_layers(self) -> str:
        # FP8 attention in every layer visibly degrades Wan; the middle third does not (article,
        # 1.3B: layers 10-19 of 30).
        third = self.num_blocks // 3
        return f"{third}-{self.num_blocks - third - 1}"
