"""What the patches need to know of a model family. Pure description: no patching, no kernels."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

Grid = tuple[int, int, int]
TokenRange = tuple[int, int]
ATTENTION = "attention"
FFN = "ffn"
ADALN = "adaln"


@dataclass(frozen=True)
class LinearLayer:
    """A Linear of a transformer block: its name below the diffusion model, block index and role.

    role: "attention", "ffn", or "adaln" (modulation, which is only ever stored in FP8).
    """

    name: str
    block: int
    role: str


@dataclass(frozen=True)
class TokenSequence:
    """Where the tokens of one forward lie: conditioning, then the video, then more conditioning.

    Attributes:
        grid: (t, h, w) of the video.
        before, after: tokens of references and the like in front of the video and behind it.
        audio: (start, stop) of the audio that is made along with the video, one of the ranges in
            front; None where there is none.
        parts: (what, tokens) of the tokens in front, for reports; empty where there is one kind.
    """

    grid: Grid
    before: int = 0
    after: int = 0
    audio: TokenRange | None = None
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def video(self) -> TokenRange:
        """(start, stop) of the video."""
        return self.before, self.before + math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """Length of the whole sequence."""
        return self.video[1] + self.after

    @property
    def conditioning(self) -> tuple[TokenRange, ...]:
        """(start, stop) of everything that is not video; empty ranges left out."""
        ranges = ((0, self.before), (self.video[1], self.tokens))
        return tuple((start, stop) for start, stop in ranges if start < stop)


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
        nested_blocks: further blocks with self-attention run in a block's turn, under its index.
        linears: the Linears of the blocks that FP8 may take over, in the order they run.
        stored: further Linears whose weights are worth keeping in FP8 but not their arithmetic: large
            ones that see a few rows.
    """

    family: ClassVar[str]
    temporal_stride: ClassVar[int] = 1  # video frames per latent frame, after the first
    default_estimator: ClassVar[str] = "diag"
    default_smoothing: ClassVar[str] = "none"
    default_token_order: ClassVar[str] = "none"
    default_dense_layers: ClassVar[str] = "none"
    default_sinks: ClassVar[str] = "kv"
    prefix_words: ClassVar[str] = ""  # what stands in front of the video tokens, if anything
    before_blocks: ClassVar[str] = ""  # attention of another length that runs ahead of the blocks

    name: str
    num_blocks: int
    num_heads: int
    head_dim: int
    text_dim: int
    publishes_block_index: bool
    unsupported: str | None
    linears: tuple[LinearLayer, ...] = ()
    nested_blocks: bool = False
    stored: tuple[LinearLayer, ...] = ()

    @classmethod
    @abstractmethod
    def describe(cls, diffusion_model) -> "ModelAdapter | None":
        """Adapter of a diffusion model of this family, None for any other."""

    def video_shape(
        self, latent_shape: tuple[int, ...], inputs: Mapping
    ) -> tuple[int, int, int, int, int] | None:
        """(B, C, T, H, W) of the video in what the sampler carries; None if that is no video.

        inputs: as for ``sequence``; ``latent_shapes`` matters where several streams are carried.
        """
        return tuple(latent_shape) if len(latent_shape) == 5 else None

    def video_frames(self, latent_frames: int) -> list[int]:
        """Video frames that each of so many latent frames stands for."""
        return [1, *[self.temporal_stride] * (latent_frames - 1)][:latent_frames]

    @abstractmethod
    def grid(self, latent_shape: tuple[int, ...]) -> Grid:
        """(t, h, w) tokens of a latent (B, C, T, H, W)."""

    def sequence(self, latent_shape: tuple[int, ...], inputs: Mapping) -> TokenSequence:
        """Where the tokens of a forward lie.

        Args:
            latent_shape: (B, C, T, H, W).
            inputs: the forward's conditioning by name, as ComfyUI hands it to the model.
        """
        return TokenSequence(self.grid(latent_shape))

    def published(self, options: Mapping) -> TokenSequence | None:
        """Where the tokens lie as the model itself says it in transformer_options; None if not."""
        return None

    def default_fp8_layers(self) -> str:
        """Layer text of the blocks whose attention runs in FP8 by default."""
        return "all"


def named_linears(blocks, parts: dict[str, tuple[str, ...]]) -> tuple[LinearLayer, ...]:
    """The Linears that the modules ``blocks``, called "blocks.N", have of ``parts``.

    Args:
        blocks: modules.
        parts: role -> names below a block; a block need not have all of them.
    """
    found = []
    for index, block in enumerate(blocks):
        for role, names in parts.items():
            for name in names:
                if _has(block, name):
                    found.append(LinearLayer(f"blocks.{index}.{name}", index, role))
    return tuple(found)


def _has(module, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module is not None


def uses_constant(function, constant: str) -> bool:
    """Whether the code of ``function`` mentions the string ``constant``.

    A feature test for keys that a model's forward publishes: it looks at what this ComfyUI does
    rather than at its version number.
    """
    code = getattr(function, "__code__", None)
    return code is not None and constant in code.co_consts
