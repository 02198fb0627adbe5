"""Node: Load Video Model."""

import logging

import comfy.sd
import folder_paths
from comfy_api.latest import io

from .models.checkpoint import inspect_checkpoint
from .schema import schema

log = logging.getLogger("hopper_sol")
FOLDER = "diffusion_models"


def _resolve(file: str) -> str:
    """Full path of a listed file; either path separator, since workflows travel between systems."""
    if not isinstance(file, str):
        raise ValueError(
            f"file: got {file!r}, need the name of a file in ComfyUI's {FOLDER} folders"
        )
    names = folder_paths.get_filename_list(FOLDER)
    wanted = file.replace("\\", "/")
    for name in names:
        if name.replace("\\", "/") == wanted:
            return folder_paths.get_full_path_or_raise(FOLDER, name)
    close = [
        name
        for name in names
        if name.replace("\\", "/").rsplit("/", 1)[-1] == wanted.rsplit("/", 1)[-1]
    ]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"file: {file!r} is not among the {len(names)} files of ComfyUI's {FOLDER} folders{hint}"
    )


class HopperSolLoadVideoModel(io.ComfyNode):
    """Loads a video diffusion model through ComfyUI, after a look at its header."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolLoadVideoModel",
            display_name="Load Video Model (Hopper-Sol)",
            description=(
                "Loads a Wan video model. Its header is read first: a wrong, truncated or quantised "
                "file is refused with a reason before anything is loaded."
            ),
            inputs=[
                io.Combo.Input(
                    "file",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A file of models/diffusion_models with plain weights.",
                ),
                io.Combo.Input(
                    "linear_precision",
                    options=["default", "fp8"],
                    default="default",
                    optional=True,
                    tooltip=(
                        "default loads the weights as ComfyUI does. fp8 (W8A8 Linears, half the "
                        "memory) is not in this version; for the speed of FP8 put an FP8 Linear "
                        "node behind the loader."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, file=None, linear_precision=None):
        # None stands for a link, whose value is not there before execution.
        if linear_precision not in (None, "default"):
            return _no_precision(linear_precision)
        if file is None:
            return True
        try:
            inspect_checkpoint(_resolve(file))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, file, linear_precision="default") -> io.NodeOutput:
        if linear_precision != "default":
            raise ValueError(_no_precision(linear_precision))
        path = _resolve(file)
        facts = inspect_checkpoint(path)
        log.info("Load Video Model: %s", facts.describe())
        return io.NodeOutput(comfy.sd.load_diffusion_model(path, model_options={}))


def _no_precision(found: str) -> str:
    return (
        f"linear_precision: got {found!r}, this version has 'default' only; for FP8 Linears put an "
        "FP8 Linear node behind the loader"
    )
