"""Node: Run Report."""

import platform

import torch
from comfy_api.latest import io, ui

from .patching import report
from .patching.apply import runtime_of
from .patching.history import Selection
from .patching.latent_mark import mark_of
from .patching.run import executing
from .schema import schema


def _versions() -> dict:
    try:
        from comfyui_version import __version__ as comfyui
    except ImportError:
        comfyui = None
    return {"comfyui": comfyui, "torch": torch.__version__, "python": platform.python_version()}


class HopperSolRunReport(io.ComfyNode):
    """What the sampler runs of a model really did."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolRunReport",
            display_name="Run Report",
            description=(
                "Says what ran: sparse and dense attention calls by reason, density per step and "
                "layer, backends, and anything that went wrong."
            ),
            inputs=[
                io.Latent.Input("latent", tooltip="The sampler's output; handed on unchanged."),
                io.Model.Input("model", tooltip="The model that was sampled."),
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.String.Output(display_name="text"),
                io.Image.Output(display_name="density"),
                io.String.Output(display_name="json"),
            ],
            is_output_node=True,
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, latent, model) -> io.NodeOutput:
        runtime = runtime_of(model)
        prompt_id, _ = executing()
        selection = Selection([])
        if runtime:
            selection = runtime.history.select(mark_of(latent["samples"]), prompt_id)
        data = report.report_json(selection, _versions())
        if selection.runs:
            text = report.report_text(data)
        else:
            text = report.NO_RUN if runtime else report.NOTHING
        picture = report.report_picture(data)
        dump = report.report_dump(data)
        shown = {**ui.PreviewImage(picture, cls=cls).as_dict(), "text": [text], "json": [dump]}
        return io.NodeOutput(latent, text, picture, dump, ui=shown)
