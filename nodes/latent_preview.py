"""Node: Latent Preview Frames."""

import torch
from comfy_api.latest import io

from .models import find_adapter
from .schema import schema


class HopperSolLatentPreviewFrames(io.ComfyNode):
    """Rough RGB frames of a video latent, without a VAE."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolLatentPreviewFrames",
            display_name="Latent Preview Frames",
            description=(
                "Rough RGB frames straight from a video latent, with the linear factors ComfyUI "
                "uses for its live previews. Needs no VAE; good for a first look."
            ),
            inputs=[
                io.Latent.Input("latent"),
                io.Model.Input("model", tooltip="Decides the latent format."),
                io.Int.Input(
                    "scale",
                    default=8,
                    min=1,
                    max=16,
                    optional=True,
                    tooltip="Pixels per latent cell.",
                ),
            ],
            outputs=[io.Image.Output(display_name="frames")],
        )

    @classmethod
    def execute(cls, latent, model, scale=8) -> io.NodeOutput:
        samples = latent["samples"]
        if getattr(samples, "is_nested", False):  # video beside audio: the video comes first
            samples = samples.unbind()[0]
        latent_format = model.get_model_object("latent_format")
        factors = getattr(latent_format, "latent_rgb_factors", None)
        if factors is None or samples.shape[1] != len(factors):
            raise ValueError(
                f"Latent Preview Frames: got a latent with {samples.shape[1]} channels, this model's "
                f"preview factors are for {len(factors) if factors else 'no'} channels"
            )
        if samples.dim() == 4:
            samples = samples.unsqueeze(2)
        samples = latent_format.process_in(samples.float().cpu())
        bias = getattr(latent_format, "latent_rgb_factors_bias", None)
        rgb = torch.einsum("bcthw,cr->bthwr", samples, torch.tensor(factors))
        if bias is not None:
            rgb = rgb + torch.tensor(bias)
        adapter = find_adapter(model)
        count = rgb.shape[1]
        repeats = torch.tensor(adapter.video_frames(count) if adapter else [1] * count)
        frames = rgb.repeat_interleave(repeats, 1).flatten(0, 1)
        frames = frames.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        return io.NodeOutput(((frames + 1) / 2).clamp(0, 1))
