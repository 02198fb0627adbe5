"""Write a random-weight MiniMax-H3 checkpoint, small enough to sample on a CPU in seconds.

ComfyUI (0.29 or newer) detects a checkpoint by its tensors' names and shapes, so this one goes
through the same loader, model class and sampler as the real one. What it draws and sounds like is
noise: it is there to run the machinery, not to look at.

    python workflows/tiny_h3.py OUT.safetensors [--hidden 256 --heads 2 --blocks 4 --ffn 512]
"""

import argparse
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

HEAD_DIM = 128
VIDEO_CHANNELS, AUDIO_CHANNELS = 24, 32  # of the latents
PATCH_CELLS = 4  # latent cells of a video token: 1 frame, 2 rows, 2 columns
ROPE_FREQUENCIES = 16  # of each of three axes, two channels each: 96 of 128 channels turn
MODALITIES = 3  # video, text, audio: a row of modulation each
MODULATIONS = 6  # shift, scale and gate of attention and of the feed-forward
CURVE_POINTS, CURVE_WIDTH = 33, 8  # of the adaLN curves that some checkpoints have


def _load_sibling(name: str):
    # By path: this file may itself have been loaded by path, and workflows/ is not a package.
    path = Path(__file__).absolute().with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hopper_sol_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_checkpoint = _load_sibling("tiny_wan").write_checkpoint


class Drawn(NamedTuple):
    """A tensor of normally distributed values."""

    shape: tuple[int, ...]
    std: float
    mean: float
    dtype: torch.dtype


def h3_tensors(
    *,
    hidden: int = 256,
    heads: int = 2,
    blocks: int = 4,
    refiner_blocks: int = 1,
    ffn: int = 512,
    text_dim: int = 64,
    time_dim: int = 128,
    time_input: int = 256,
    curves: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Drawn]:
    """The tensors of a MiniMax-H3 transformer, by name, but for rope.inv_freq.

    What the real checkpoint keeps in FP32 (patch projections, time embedder, output heads) is FP32
    here as well.

    Args:
        hidden: width of the stream; heads * 128 is that of attention.
        heads, blocks, refiner_blocks, ffn: of the transformer and of its text refiner.
        text_dim: width of the text states.
        time_dim, time_input: width of the time embedding, and of the sinusoids it is made of.
        curves: adaLN over a table of curve points in place of the time embedder.
        dtype: of what is not FP32.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {"hidden": hidden, "heads": heads, "blocks": blocks, "ffn": ffn, "text_dim": text_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, need at least 1")
    inner = heads * HEAD_DIM
    time_dim = CURVE_WIDTH if curves else time_dim
    adaln_dtype = torch.float32 if curves else dtype
    tensors: dict[str, Drawn] = {}

    def normal(name, *shape, std, mean=0.0, dtype=dtype):
        tensors[name] = Drawn(shape, std, mean, dtype)

    def linear(name, out_features, in_features, *, bias=True, dtype=dtype):
        # Variance-preserving, so that no depth or width makes the activations explode or vanish.
        normal(f"{name}.weight", out_features, in_features, std=in_features**-0.5, dtype=dtype)
        if bias:
            normal(f"{name}.bias", out_features, std=0.02, dtype=dtype)

    def norm(name, width):
        normal(f"{name}.weight", width, std=0.1, mean=1.0)

    def block(name):
        linear(f"{name}.attn.qkv_proj", 3 * inner, hidden, bias=False)
        linear(f"{name}.attn.out_proj", hidden, inner, bias=False)
        norm(f"{name}.attn.q_norm", HEAD_DIM)
        norm(f"{name}.attn.k_norm", HEAD_DIM)
        linear(f"{name}.mlp.fc1", 2 * ffn, hidden, bias=False)
        linear(f"{name}.mlp.fc2", hidden, ffn, bias=False)
        norm(f"{name}.norm1", hidden)
        norm(f"{name}.norm2", hidden)

    linear("video_patch_proj", hidden, VIDEO_CHANNELS * PATCH_CELLS, dtype=torch.float32)
    linear("audio_patch_proj", hidden, AUDIO_CHANNELS, dtype=torch.float32)
    linear("condition_proj", hidden, text_dim)
    if curves:
        normal("adaln_t_table", CURVE_POINTS, CURVE_WIDTH, std=1.0, dtype=torch.float32)
    else:
        linear("time_embedder.proj_in", hidden, time_input, dtype=torch.float32)
        linear("time_embedder.proj_out", time_dim, hidden, dtype=torch.float32)
    for index in range(refiner_blocks):
        block(f"token_refiner.blocks.{index}")
    norm("token_refiner.final_norm", hidden)
    for index in range(blocks):
        block(f"blocks.{index}")
        width = MODULATIONS * MODALITIES * hidden
        linear(f"blocks.{index}.adaln_proj.linear", width, time_dim, dtype=adaln_dtype)
    norm("final_layer.norm", hidden)
    linear("final_layer.adaln_proj.linear", 2 * hidden, time_dim, dtype=adaln_dtype)
    video_out = VIDEO_CHANNELS * PATCH_CELLS
    linear("final_layer.video_out", video_out, hidden, dtype=torch.float32)
    linear("final_layer.audio_out", AUDIO_CHANNELS, hidden, dtype=torch.float32)
    return tensors


def rope_frequencies() -> torch.Tensor:
    """The one tensor that is not random."""
    steps = torch.arange(ROPE_FREQUENCIES, dtype=torch.float32) / ROPE_FREQUENCIES
    return 10000.0**-steps


def h3_state_dict(*, seed: int = 0, prefix: str = "", **sizes) -> dict[str, torch.Tensor]:
    """The tensors of a MiniMax-H3 transformer, by name; the same for the same arguments.

    A tensor's values depend on the seed, its name and its shape only: adding blocks leaves those
    that were there as they are.

    Args:
        seed: any integer.
        prefix: put before each name, such as "model.diffusion_model.".
        sizes: as for ``h3_tensors``.

    Raises:
        ValueError: a size below 1.
    """
    tensors = {}
    for name, drawn in h3_tensors(**sizes).items():
        # torch's CPU generator uses 32 bits of its seed only, so both go into one checksum.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.randn(drawn.shape, generator=generator) * drawn.std + drawn.mean
        tensors[prefix + name] = values.to(drawn.dtype)
    tensors[prefix + "rope.inv_freq"] = rope_frequencies()
    return tensors


def main(argv: list[str] | None = None) -> int:
    """The command line; 0, or 2 for arguments that make no checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write, *.safetensors")
    parser.add_argument("--hidden", type=int, default=256, help="width of the stream")
    parser.add_argument("--heads", type=int, default=2, help="of 128 channels each")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=512, help="width of the feed-forward layers")
    parser.add_argument("--text-dim", type=int, default=64, help="width of the text states")
    parser.add_argument("--curves", action="store_true", help="adaLN over a table of curve points")
    parser.add_argument("--prefix", default="", help="such as model.diffusion_model.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        tensors = h3_state_dict(
            hidden=options.hidden,
            heads=options.heads,
            blocks=options.blocks,
            ffn=options.ffn,
            text_dim=options.text_dim,
            curves=options.curves,
            prefix=options.prefix,
            seed=options.seed,
        )
        path = write_checkpoint(options.out, tensors)
    except ValueError as error:
        parser.error(str(error))
    size = path.stat().st_size / 1e6
    sys.stdout.write(f"{path}: {len(tensors)} tensors, {size:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
