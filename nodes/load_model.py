"""Node: Load Video Model."""

import logging

import comfy.model_management
import comfy.sd
import folder_paths
from comfy_api.latest import io

from .models.checkpoint import CheckpointFacts, inspect_checkpoint
from .models.memory_plan import FP8, FP8_KEEP_ADALN
from .models.stored_formats import COMFY_QUANT_FP8
from .patching.linear_formats import reads_comfy_quant
from .patching.linear_load import load_or_reuse
from .patching.linear_ops import why_no_fp8_load
from .schema import schema

log = logging.getLogger("hopper_sol")
FOLDER = "diffusion_models"
DEFAULT = "default"
PRECISIONS = (DEFAULT, FP8, FP8_KEEP_ADALN)  # stored in workflows: new ones go last


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
                "Loads a Wan or MiniMax-H3 video model, on request with its Linears in FP8: half the "
                "memory. Its header is read first: a wrong or truncated file, or one in a format "
                "that does not suit, is refused with a reason before anything is loaded."
            ),
            inputs=[
                io.Combo.Input(
                    "file",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A file of models/diffusion_models: plain weights or FP8.",
                ),
                io.Combo.Input(
                    "linear_precision",
                    options=list(PRECISIONS),
                    default=DEFAULT,
                    optional=True,
                    tooltip=(
                        "default loads the weights as ComfyUI does. fp8 keeps those of the blocks' "
                        "Linears in FP8 (E4M3, a scale for every output channel) from the moment the "
                        "file is read: half the memory, and they run in FP8 as with an FP8 Linear "
                        "node, which is then not needed. fp8_keep_adaln is the same, but MiniMax-H3's "
                        "adaLN weights, two fifths of the model, stay in 16 bits."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, file=None, linear_precision=None):
        # None stands for a link, whose value is not there before execution.
        if linear_precision is not None and linear_precision not in PRECISIONS:
            return _no_precision(linear_precision)
        if file is None:
            return True
        try:
            facts = inspect_checkpoint(_resolve(file))
        except ValueError as error:
            return str(error)
        return True if linear_precision is None else _why_not(facts, linear_precision) or True

    @classmethod
    def execute(cls, file, linear_precision=DEFAULT) -> io.NodeOutput:
        if linear_precision not in PRECISIONS:
            raise ValueError(_no_precision(linear_precision))
        path = _resolve(file)
        facts = inspect_checkpoint(path)
        reason = _why_not(facts, linear_precision)
        if reason is not None:
            raise ValueError(reason)
        _announce(facts, linear_precision)
        if linear_precision == DEFAULT:
            return io.NodeOutput(comfy.sd.load_diffusion_model(path, model_options={}))
        # Without adaLN both values are one model, which is then loaded once.
        keep_adaln = linear_precision == FP8_KEEP_ADALN and bool(facts.weights.layers.store)
        return io.NodeOutput(load_or_reuse(path, keep_adaln))


def _why_not(facts: CheckpointFacts, precision: str) -> str | None:
    """Why this ComfyUI can't load such a file in ``precision``, or None."""
    if precision != DEFAULT:
        reason = why_no_fp8_load()
        where = f"linear_precision {precision}"
        return None if reason is None else f"{where}: {reason}; choose 'default'"
    if facts.weights.format.name == COMFY_QUANT_FP8 and not reads_comfy_quant():
        return (
            "file: its FP8 weights have scales (comfy_quant) that this ComfyUI does not read; set "
            "linear_precision to 'fp8', which reads them, or update ComfyUI to 0.3.76 or newer"
        )
    if facts.weights.format.rows:
        return (
            "file: its FP8 weights have a scale for every row, which ComfyUI itself does not read; "
            "set linear_precision to 'fp8'"
        )
    return None


def _announce(facts: CheckpointFacts, precision: str) -> None:
    """Log what is loaded, what it takes, and whether the device can hold it."""
    memory = facts.weights.memory
    log.info("Load Video Model: %s; %s", facts.describe(), memory.describe())
    if precision == FP8_KEEP_ADALN and not facts.weights.layers.store:
        log.info(
            "Load Video Model: linear_precision fp8_keep_adaln is the same as fp8 here: this model "
            "has no adaLN that fp8 would take"
        )
    device = comfy.model_management.get_torch_device()
    if comfy.model_management.is_device_cpu(device):
        return
    total = comfy.model_management.get_total_memory(device)
    warning = memory.warning(precision, total, comfy.model_management.get_torch_device_name(device))
    if warning is not None:
        log.warning("Load Video Model: %s", warning)


def _no_precision(found) -> str:
    return f"linear_precision: got {found!r}, need one of {', '.join(PRECISIONS)}"
