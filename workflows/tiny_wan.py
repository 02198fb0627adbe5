"""Write a random-weight Wan 2.1 checkpoint, small enough to sample on a CPU in seconds.

ComfyUI detects a checkpoint by its tensors' names and shapes, so this one goes through the same
loader, model class and sampler as the real 1.3B and 14B. What it draws is noise: it is there to
run the machinery, not to look at.

    python workflows/tiny_wan.py OUT.safetensors [--dim 256 --blocks 4 --ffn 512]
"""

import argparse
import os
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

HEAD_DIM = 128  # ComfyUI derives the number of heads from it: dim // 128
TEXT_DIM = 4096  # width of the text encoder's states; fixed in ComfyUI, not detected
TIME_DIM = 256  # width of the sinusoidal timestep embedding; fixed in ComfyUI as well
IMAGE_DIM = 1280  # width of CLIP vision's states (image-to-video of Wan 2.1)
PATCH = (1, 2, 2)  # frames, rows, columns of the latent in one token


def wan_state_dict(
    *,
    dim: int = 256,
    blocks: int = 4,
    ffn: int = 512,
    in_dim: int = 16,
    out_dim: int = 16,
    text_dim: int = TEXT_DIM,
    image_embedding: bool = False,
    prefix: str = "",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """The tensors of a Wan transformer, by name; the same for the same arguments.

    A tensor's values depend on the seed, its name and its shape only: adding blocks leaves those
    that were there as they are.

    Args:
        dim: width, a multiple of 128; dim // 128 attention heads.
        blocks: number of transformer blocks.
        ffn: width of the feed-forward layers.
        in_dim, out_dim: latent channels; in_dim 36 for image-to-video (16 noise, 20 condition).
        text_dim: width of the text states; ComfyUI accepts 4096 only.
        image_embedding: with the CLIP-vision branch that Wan 2.1's image-to-video models have and
            Wan 2.2's do not.
        prefix: put before each name, such as "model.diffusion_model.".
        dtype: of every tensor.
        seed: any integer.

    Raises:
        ValueError: `dim` is not a multiple of 128, or there is not at least one block.
    """
    if dim < HEAD_DIM or dim % HEAD_DIM:
        raise ValueError(f"dim: got {dim}, need a multiple of {HEAD_DIM}, at least {HEAD_DIM}")
    if blocks < 1:
        raise ValueError(f"blocks: got {blocks}, need at least 1")

    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        # torch's CPU generator uses 32 bits of its seed only, so both go into one checksum.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.randn(shape, generator=generator) * std + mean
        tensors[prefix + name] = values.to(dtype)

    def linear(name: str, out_features: int, in_features: int) -> None:
        # Variance-preserving, so that no depth or width makes the activations explode or vanish.
        normal(f"{name}.weight", out_features, in_features, std=in_features**-0.5)
        normal(f"{name}.bias", out_features, std=0.02)

    def rms_norm(name: str, width: int) -> None:
        normal(f"{name}.weight", width, std=0.1, mean=1.0)

    def layer_norm(name: str, width: int) -> None:
        normal(f"{name}.weight", width, std=0.1, mean=1.0)
        normal(f"{name}.bias", width, std=0.02)

    patch_inputs = in_dim * PATCH[0] * PATCH[1] * PATCH[2]
    normal("patch_embedding.weight", dim, in_dim, *PATCH, std=patch_inputs**-0.5)
    normal("patch_embedding.bias", dim, std=0.02)
    linear("text_embedding.0", dim, text_dim)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, TIME_DIM)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)

    for index in range(blocks):
        block = f"blocks.{index}"
        normal(f"{block}.modulation", 1, 6, dim, std=dim**-0.5)
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            for projection in "qkvo":
                linear(f"{attention}.{projection}", dim, dim)
            rms_norm(f"{attention}.norm_q", dim)
            rms_norm(f"{attention}.norm_k", dim)
        if image_embedding:
            linear(f"{block}.cross_attn.k_img", dim, dim)
            linear(f"{block}.cross_attn.v_img", dim, dim)
            rms_norm(f"{block}.cross_attn.norm_k_img", dim)
        layer_norm(f"{block}.norm3", dim)
        linear(f"{block}.ffn.0", ffn, dim)
        linear(f"{block}.ffn.2", dim, ffn)

    if image_embedding:
        layer_norm("img_emb.proj.0", IMAGE_DIM)
        linear("img_emb.proj.1", IMAGE_DIM, IMAGE_DIM)
        linear("img_emb.proj.3", dim, IMAGE_DIM)
        layer_norm("img_emb.proj.4", dim)

    normal("head.modulation", 1, 2, dim, std=dim**-0.5)
    linear("head.head", out_dim * PATCH[0] * PATCH[1] * PATCH[2], dim)
    return tensors


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write `tensors` to `path` as safetensors, whole or not at all; `path`.

    Raises:
        ValueError: the name does not end in .safetensors (ComfyUI would not read it as such).
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"out: got {path.name!r}, need a name that ends in .safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename is atomic; not ending in .safetensors, so that a
    # ComfyUI that looks there meanwhile does not list it.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def main(argv: list[str] | None = None) -> int:
    """The command line; 0, or 2 for arguments that make no checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write, *.safetensors")
    parser.add_argument("--dim", type=int, default=256, help="width, a multiple of 128")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=512, help="width of the feed-forward layers")
    parser.add_argument("--in-dim", type=int, default=16, help="36 for image-to-video")
    parser.add_argument("--out-dim", type=int, default=16)
    parser.add_argument(
        "--image-embedding", action="store_true", help="the CLIP-vision branch of Wan 2.1 I2V"
    )
    parser.add_argument("--prefix", default="", help="such as model.diffusion_model.")
    parser.add_argument("--fp32", action="store_true", help="float32 instead of bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        tensors = wan_state_dict(
            dim=options.dim,
            blocks=options.blocks,
            ffn=options.ffn,
            in_dim=options.in_dim,
            out_dim=options.out_dim,
            image_embedding=options.image_embedding,
            prefix=options.prefix,
            dtype=torch.float32 if options.fp32 else torch.bfloat16,
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
