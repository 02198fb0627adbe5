"""Random inputs of Wan variants, which ComfyUI's own nodes make from pictures and encoders."""

from types import SimpleNamespace

import torch


def _random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator)


# kind -> what it puts into a conditioning, for (frames, height, width) of a latent
KINDS = {
    "reference": lambda t, h, w: {"reference_latents": [_random(1, 16, t, h, w)]},
    "frames behind": lambda t, h, w: {"time_dim_concat": _random(1, 16, t, h, w)},
    "contexts": lambda t, h, w: {"context_latents": [_random(1, 16, t, h, w)] * 2},
    "motion": lambda t, h, w: {"reference_motion": _random(1, 16, t, h, w)},
    "camera": lambda t, h, w: {"camera_conditions": _random(1, 24, t, 8 * h, 8 * w)},
    "pose": lambda t, h, w: {"pose_video_latent": _random(1, 16, t, h, w)},
    "clip vision": lambda t, h, w: {
        "clip_vision_output": SimpleNamespace(penultimate_hidden_states=_random(1, t, 1280))
    },
}


class ProbeConditioning:
    """Adds an input of a Wan variant to a conditioning. For clip vision, frames are tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "add"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"min": 1, "max": 4096})
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "kind": (list(KINDS),),
                "frames": size,
                "height": size,
                "width": size,
            }
        }

    def add(self, conditioning, kind, frames, height, width):
        values = KINDS[kind](frames, height, width)
        return ([[tensor, {**options, **values}] for tensor, options in conditioning],)


class ProbeLatent:
    """An empty latent of any number of channels; keep_first keeps its first frame (image to video
    of Wan 2.2 5B, whose frames then have timesteps of their own)."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"min": 1, "max": 4096})
        names = ("channels", "frames", "height", "width")
        return {"required": {**dict.fromkeys(names, size), "keep_first": ("BOOLEAN", {})}}

    def make(self, channels, frames, height, width, keep_first):
        latent = {"samples": torch.zeros(1, channels, frames, height, width)}
        if keep_first:
            latent["samples"][:, :, 0] = _random(1, channels, height, width)
            latent["noise_mask"] = torch.ones(1, 1, frames, height, width)
            latent["noise_mask"][:, :, 0] = 0.0
        return (latent,)


NODES = (ProbeConditioning, ProbeLatent)
