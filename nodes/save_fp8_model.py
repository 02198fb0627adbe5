"""Node: Save FP8 Model."""

import logging
import os
import re

import comfy.model_management
import comfy.utils
import folder_paths
from comfy_api.latest import io

from .patching.linear_save import save_fp8_model
from .schema import known, schema

log = logging.getLogger("hopper_sol")
FOLDER = "diffusion_models"  # of the output folder; ComfyUI's loaders list what is in it
# A part of a name that every system can have.
_PART = re.compile(r"[^\x00-\x1f\\/:*?\"<>|]+")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class HopperSolSaveFP8Model(io.ComfyNode):
    """Writes a model with its Linears in FP8."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolSaveFP8Model",
            display_name="Save FP8 Model",
            description=(
                "Saves a video model with the Linears of its blocks in FP8, LoRAs merged, to "
                "output/diffusion_models. ComfyUI's own loader (0.3.76 and newer) and Load Video "
                "Model read the file."
            ),
            # Widgets are stored in workflows by position: append new ones, never reorder.
            inputs=[
                io.Model.Input("model"),
                known(
                    io.String.Input,
                    id="name",
                    default="video_model_fp8",
                    tooltip=(
                        "Name of the file below output/diffusion_models; folders with '/'. "
                        "'.safetensors' is added."
                    ),
                    optional=True,
                ),
                known(
                    io.Boolean.Input,
                    id="overwrite",
                    default=False,
                    tooltip="Replace a file of this name. Off: a file that is there stops the node.",
                    optional=True,
                ),
                known(
                    io.Boolean.Input,
                    id="core_matmul",
                    default=False,
                    tooltip=(
                        "Lets ComfyUI's own loader multiply in FP8 where the GPU can. It does not "
                        "scale activations, so the picture suffers; off, it widens the weights. Load "
                        "Video Model and FP8 Linear pay no heed to it."
                    ),
                    optional=True,
                    advanced=True,
                ),
            ],
            outputs=[io.String.Output(display_name="file")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, name="video_model_fp8"):
        return True if name is None else _why_no_name(name) or True

    @classmethod
    def execute(
        cls, model, name="video_model_fp8", overwrite=False, core_matmul=False
    ) -> io.NodeOutput:
        reason = _why_no_name(name)
        if reason is not None:
            raise ValueError(reason)
        file = _file(name)
        bar = comfy.utils.ProgressBar(max(1, model.model_size()))

        def done(nbytes: int) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            bar.update(nbytes)

        device = comfy.model_management.get_torch_device()
        saved = save_fp8_model(
            model,
            _path(file),
            overwrite=overwrite,
            core_matmul=core_matmul,
            device=device if device.type == "cuda" else None,
            done=done,
        )
        text = (
            f"{FOLDER}/{file}: {saved.linears} Linears in FP8, {saved.others} other tensors, "
            f"{saved.size_bytes / 2**30:.2f} GiB"
        )
        log.info("Save FP8 Model: %s", text)
        return io.NodeOutput(file, ui={"text": [text]})


def _why_no_name(name) -> str | None:
    """Why ``name`` can't be a file below the folder, or None."""
    if not isinstance(name, str) or not name.strip():
        return f"name: got {name!r}, need a name for the file"
    parts = name.strip().split("/")
    for part in parts:
        bad = part in ("", ".", "..") or part != part.strip() or part.endswith(".")
        if bad or not _PART.fullmatch(part) or _RESERVED.fullmatch(part):
            return (
                f"name: got {name!r}, need names of folders and a file separated by '/', without "
                "'..' and characters that some systems forbid"
            )
    return None


def _file(name: str) -> str:
    name = name.strip()
    return name if name.lower().endswith(".safetensors") else name + ".safetensors"


def _path(file: str) -> str:
    """Where ``file`` goes; raises ValueError if a link leads out of the folder."""
    folder = os.path.join(folder_paths.get_output_directory(), FOLDER)
    path = os.path.join(folder, *file.split("/"))
    inside = os.path.realpath(folder)
    if os.path.commonpath((inside, os.path.realpath(path))) != inside:
        raise ValueError(f"name: {file!r} leads out of output/{FOLDER} by a link")
    return path
