"""Node: Synthetic Conditioning."""

import torch
from comfy_api.latest import io

from .models import family_names, find_adapter
from .schema import schema


class HopperSolSyntheticConditioning(io.ComfyNode):
    """Random conditioning of the right width, for benchmarks and tests."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolSyntheticConditioning",
            display_name="Synthetic Conditioning",
            description=(
                "Random text conditioning of the width a model expects. For benchmarks and tests "
                "without a text encoder; it describes no picture."
            ),
            inputs=[
                io.Model.Input("model", tooltip="Decides the width of a token."),
                # Not "seed": frontends add a randomize control to an input of that name, and a
                # benchmark should stay as it is.
                io.Int.Input(
                    "variant",
                    default=0,
                    min=0,
                    max=2**31 - 1,
                    optional=True,
                    tooltip="Seed of the random tokens. Same number, same tokens.",
                ),
                io.Int.Input(
                    "tokens",
                    default=512,
                    min=1,
                    max=8192,
                    optional=True,
                    tooltip="Text tokens; Wan prompts have up to 512.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, model, variant=0, tokens=512) -> io.NodeOutput:
        adapter = find_adapter(model)
        if adapter is None:
            kind = type(model.get_model_object("diffusion_model")).__name__
            raise ValueError(f"Synthetic Conditioning: got a {kind} model, need {family_names()}")
        generator = torch.Generator().manual_seed(variant)
        tensor = torch.randn(1, tokens, adapter.text_dim, generator=generator)
        return io.NodeOutput([[tensor, {}]])
