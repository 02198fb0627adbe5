"""Tiny checkpoints of the Wan variants that ComfyUI tells apart, on top of the plain tiny one.

A variant gets the tensors by which ComfyUI recognises it and those that the tests' inputs reach. The
rest (audio and face encoders) is missing from the file; ComfyUI says so and never calls it here.
"""

import zlib

import torch

DIM = 256
BLOCKS = 4
IN_DIM_VACE = 96  # 32 control and 64 mask channels


def _normal(name, *shape, std=None, mean=0.0):
    fan_in = torch.Size(shape[1:]).numel() if len(shape) > 1 else shape[0]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator) * (fan_in**-0.5 if std is None else std)
    return (values + mean).to(torch.bfloat16)


def _layer(name, *shape):
    return {
        f"{name}.weight": _normal(f"{name}.weight", *shape),
        f"{name}.bias": _normal(f"{name}.bias", shape[0], std=0.02),
    }


def state_dicts(wan_state_dict) -> dict[str, dict[str, torch.Tensor]]:
    """Variant -> tensors, made with ``tiny_wan.wan_state_dict``."""

    def plain(**changes):
        return wan_state_dict(dim=DIM, blocks=BLOCKS, **changes)

    def vace_block(index):
        """A main block's tensors under another name, and projections before and after it."""
        source = f"blocks.{index}."
        renamed = {
            f"vace_blocks.{index}.{name.removeprefix(source)}": tensor
            for name, tensor in plain(seed=7).items()
            if name.startswith(source)
        }
        before = _layer("vace_blocks.0.before_proj", DIM, DIM) if index == 0 else {}
        return {**renamed, **before, **_layer(f"vace_blocks.{index}.after_proj", DIM, DIM)}

    def marker(name, *shape):
        return {name: _normal(name, *shape)}

    residual = "control_adapter.residual_blocks.0"
    return {
        "2.1-i2v": plain(in_dim=36, image_embedding=True),
        "2.2-i2v": plain(in_dim=36),
        "2.2-5b": plain(in_dim=48, out_dim=48),
        "fun-control": {**plain(), **_layer("ref_conv", DIM, 16, 2, 2)},
        "vace": {
            **plain(),
            **_layer("vace_patch_embedding", DIM, IN_DIM_VACE, 1, 2, 2),
            **vace_block(0),
            **vace_block(1),
        },
        "fun-camera": {
            **plain(in_dim=36),
            **_layer("control_adapter.conv", DIM, 24 * 64, 2, 2),
            **_layer(f"{residual}.conv1", DIM, DIM, 3, 3),
            **_layer(f"{residual}.conv2", DIM, DIM, 3, 3),
        },
        "animate": {
            **plain(in_dim=36, image_embedding=True),
            **marker("face_adapter.fuser_blocks.0.k_norm.weight", 128),
            **_layer("pose_patch_embedding", DIM, 16, 1, 2, 2),
        },
        "humo": {
            **plain(),
            **marker("audio_proj.audio_proj_glob_1.layer.bias", 512),
        },
        "s2v": {
            **plain(),
            **marker("casual_audio_encoder.encoder.final_linear.weight", DIM, DIM),
            **marker("trainable_cond_mask.weight", 3, DIM),
            **_layer("frame_packer.proj", DIM, 16, 1, 2, 2),
            **_layer("frame_packer.proj_2x", DIM, 16, 2, 4, 4),
            **_layer("frame_packer.proj_4x", DIM, 16, 4, 8, 8),
        },
        "scail": {
            **plain(in_dim=20, image_embedding=True),
            **_layer("patch_embedding_pose", DIM, 20, 1, 2, 2),
        },
    }
