"""MiniMax-H3: video and audio in one packed sequence, with everything they are made from in front.

Tokens lie in this order: text, then what the run is conditioned on (keyframes, or references), then
the audio that is made, then the video that is made. Video rows are t-major, then h, then w.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from .base import (
    ADALN,
    ATTENTION,
    FFN,
    Grid,
    ModelAdapter,
    TokenSequence,
    named_linears,
    uses_constant,
)

# Embeddings, the text refiner and the output heads stay as they are: they are FP32 islands or run
# once, and what they make reaches every block.
_LINEARS = {ATTENTION: ("attn.qkv_proj", "attn.out_proj"), FFN: ("mlp.fc1", "mlp.fc2")}
# Two fifths of a block's weights, for a handful of rows: worth storing small, not computing fast.
_STORED = {ADALN: ("adaln_proj.linear",)}

PATCH: Grid = (1, 2, 2)  # latent cells of a video token
# Kinds of ComfyUI's segments, in words.
_WORDS = {
    "text": "text",
    "cond": "keyframe",
    "cond_audio": "keyframe audio",
    "ref_img": "reference",
    "ref_audio": "reference audio",
    "audio": "audio",
    "video": "video",
}

Segments = Iterable[tuple[int, int, str]]


@dataclass(frozen=True)
class H3Adapter(ModelAdapter):
    """See ModelAdapter."""

    family: ClassVar[str] = "MiniMax-H3"
    temporal_stride: ClassVar[int] = 4
    default_estimator: ClassVar[str] = "exact"
    default_smoothing: ClassVar[str] = "kv"
    default_dense_layers: ClassVar[str] = "0-1"
    default_sinks: ClassVar[str] = "kv_and_rows"
    prefix_words: ClassVar[str] = "conditioning tokens"
    before_blocks: ClassVar[str] = "text refiner"

    @classmethod
    def describe(cls, diffusion_model) -> "H3Adapter | None":
        try:
            from comfy.ldm.minimax.model import MiniMaxH3Model
        except ImportError:  # ComfyUI before 0.29
            return None
        if not isinstance(diffusion_model, MiniMaxH3Model):
            return None
        kind = type(diffusion_model)
        blocks = diffusion_model.blocks
        attention = blocks[0].attn
        curves = getattr(diffusion_model, "use_adaln_curves", False)
        unsupported = None
        if kind.__name__ != "MiniMaxH3Model":
            # A class of its own may pack its sequence in another way.
            unsupported = f"MiniMax-H3 variant {kind.__name__} is not supported yet"
        return cls(
            name=f"MiniMax-H3 ({len(blocks)} blocks, {attention.heads} heads)",
            num_blocks=len(blocks),
            num_heads=attention.heads,
            head_dim=attention.head_dim,
            text_dim=diffusion_model.condition_proj.in_features,
            publishes_block_index=uses_constant(kind._forward, "block_index"),
            unsupported=unsupported,
            linears=named_linears(blocks, _LINEARS),
            # Over curve points they are FP32 and a few columns wide.
            stored=() if curves else named_linears(blocks, _STORED),
        )

    def video_shape(self, latent_shape, inputs: Mapping) -> tuple[int, ...] | None:
        # The sampler carries video and audio as one flat row, and their shapes beside it.
        shapes = inputs.get("latent_shapes") or (latent_shape,)
        return super().video_shape(tuple(shapes[0]), inputs)

    def video_frames(self, latent_frames: int) -> list[int]:
        # Every fifth one begins a chunk of 17 frames.
        return [1 if n % 5 == 0 else self.temporal_stride for n in range(latent_frames)]

    def grid(self, latent_shape: tuple[int, ...]) -> Grid:
        # ComfyUI pads the latent up to whole patches.
        t, h, w = (-(-n // p) for n, p in zip(latent_shape[-3:], PATCH, strict=True))
        return (t, h, w)

    def sequence(self, latent_shape: tuple[int, ...], inputs: Mapping) -> TokenSequence:
        grid = self.grid(latent_shape)
        text = inputs.get("c_crossattn")
        text_tokens = 0 if text is None else text.shape[1]
        shapes = inputs.get("latent_shapes") or ()
        audio_frames = shapes[1][-1] if len(shapes) > 1 else 0
        payload = inputs.get("minimax_payload") or {}
        layout = payload.get("layout")
        cells = (grid[0], grid[1] * PATCH[1], grid[2] * PATCH[2])
        signature = (text_tokens, *cells, audio_frames)
        # ComfyUI packs anew where the prepared layout is one of other sizes (context windows).
        if getattr(layout, "signature", None) == signature:
            return sequence_of(grid, layout.segments)
        rows = count_rows(grid, text_tokens, audio_frames, payload)
        return sequence_of(grid, segments_of(rows))

    def published(self, options: Mapping) -> TokenSequence | None:
        layout = options.get("minimax_h3_layout")
        if layout is None:
            return None
        grid = self.grid(layout.signature[1:4])
        return sequence_of(grid, layout.segments)


def count_rows(
    grid: Grid, text_tokens: int, audio_frames: int, payload: Mapping
) -> list[tuple[str, int]]:
    """(kind, rows) of every segment in the order of the sequence, as ComfyUI packs it.

    Args:
        grid: (t, h, w) tokens of the video.
        audio_frames: latent frames of the audio; each is a row for either ear.
        payload: ComfyUI's "minimax_payload", of which "keyframes" and "refs" matter.
    """
    frame = grid[1] * grid[2]
    rows = [("text", text_tokens)]
    for keyframe in payload.get("keyframes") or ():
        picture, sound = keyframe.get("latent"), keyframe.get("audio_latent")
        if picture is not None:
            rows.append(("cond", picture.shape[2] * frame))
        if sound is not None:
            rows.append(("cond_audio", 2 * sound.shape[-1]))
    for reference in payload.get("refs") or ():
        kind, sound = reference["kind"], reference.get("ref_audio_t", 0)
        if sound > 0 and kind in ("audio", "video", "video_audio"):
            rows.append(("ref_audio", 2 * sound))
        if kind in ("image", "video", "video_audio"):
            picture = (reference["latent_h"] // PATCH[1]) * (reference["latent_w"] // PATCH[2])
            frames = 1 if kind == "image" else reference["latent_t"]
            rows.append(("ref_img", frames * picture))
    return [*rows, ("audio", 2 * audio_frames), ("video", math.prod(grid))]


def segments_of(rows: Iterable[tuple[str, int]]) -> list[tuple[int, int, str]]:
    """(start, stop, kind) of segments that lie one after another."""
    segments, start = [], 0
    for kind, count in rows:
        segments.append((start, start + count, kind))
        start += count
    return segments


def sequence_of(grid: Grid, segments: Segments) -> TokenSequence:
    """The sequence of ComfyUI's (start, stop, kind) segments; the video comes last.

    Of a sequence that ends otherwise, or whose video is not ``grid``, the length comes out as
    another than the model's: its calls then stay dense.
    """
    segments = list(segments)
    before, parts, audio = 0, {}, None
    for start, stop, kind in segments:
        if kind == "video":
            before = start
            continue
        if stop > start:
            words = _WORDS.get(kind, kind)
            parts[words] = parts.get(words, 0) + stop - start
            if kind == "audio":
                audio = (start, stop)
    return TokenSequence(grid, before, audio=audio, parts=tuple(parts.items()))
