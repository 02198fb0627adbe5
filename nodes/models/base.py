"""What the patches need to know of a model family. Pure description: no patching, no kernels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ModelAdapter(ABC):
    """One diffusion model, described by plain values.

    Holds no module: ComfyUI clones models, and a kept module may belong to another clone.

    Attributes:
        name: the model in words, for reports.
        num_blocks: transformer blocks, the range of every layer text.
        num_heads, head_dim: of the self-attention.
        text_dim: width of the conditioning tokens.
        publishes_block_index: this ComfyUI tells attention calls their block.
        unsupported: why our attention leaves this model dense, or None.
    """

    family: ClassVar[str]
    temporal_stride: ClassVar[int] = 1  # video frames per latent frame, after the first
    default_estimator: ClassVar[str] = "diag"
    default_smoothing: ClassVar[str] = "none"
    default_token_order: ClassVar[str] = "none"
    default_dense_layers: ClassVar[str] = "none"
    prefix_words: ClassVar[str] = ""  # what stands in front of the video tokens, if anything

    name: str
    num_blocks: int
    num_heads: int
    head_dim: int
    text_dim: int
    publishes_block_index: bool
    unsupported: str | None

    @classmethod
    @abstractmethod
    def describe(cls, diffusion_model) -> "ModelAdapter | None":
        """Adapter of a diffusion model of this family, None for any other."""

    @abstractmethod
    def grid(self, latent_shape: tuple[int, ...]) -> Grid:
        """(t, h, w) tokens of a latent (B, C, T, H, W)."""

    def default_fp8_layers(self) -> str:
        """Layer text of the blocks whose attention runs in FP8 by default."""
        return "all"


def uses_constant(function, constant: str) -> bool:
    """Whether the code of ``function`` mentions the string ``constant``.

    A feature test for keys that a model's forward publishes: it looks at what this ComfyUI does
    rather than at its version number.
    """
    code = getattr(function, "__code__", None)
    return code is not None and constant in code.co_consts
