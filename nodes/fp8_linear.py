"""Node: FP8 Linear."""

from comfy_api.latest import io

from .patching.apply import apply_fp8_linear
from .patching.layers import EXAMPLE, check_layer_text
from .patching.linear import SCOPES
from .patching.linear_load import is_loaded_fp8
from .patching.plan import FP8LinearRequest
from .schema import known, schema


class HopperSolFP8Linear(io.ComfyNode):
    """Adds an FP8 Linear request to a model."""

    @classmethod
    def define_schema(cls):
        return schema(
            node_id="HopperSolFP8Linear",
            display_name="FP8 Linear",
            description=(
                "Runs the Linear layers of a video model's blocks in FP8 (W8A8, E4M3), with a scale "
                "for every output channel and every token. LoRAs work, before or after this node. "
                "Needs an NVIDIA GPU of SM89 or newer to be faster. Add a Run Report to see what ran."
            ),
            # Widgets are stored in workflows by position: append new ones, never reorder. All are
            # optional, so that a prompt written for an older version stays valid.
            inputs=[
                io.Model.Input("model"),
                known(
                    io.Boolean.Input,
                    id="enabled",
                    default=True,
                    tooltip="Off hands the model on untouched, as if the node were not there.",
                    optional=True,
                ),
                known(
                    io.Combo.Input,
                    id="scope",
                    options=list(SCOPES),
                    default="all",
                    tooltip=(
                        "Which Linears of a block: attention takes q, k, v and output of self- and "
                        "cross-attention, ffn the two of the feed-forward. Embeddings, time "
                        "projection and head are never touched. Narrow it if the picture suffers."
                    ),
                    optional=True,
                ),
                known(
                    io.String.Input,
                    id="layers",
                    default="all",
                    tooltip=(
                        f"Transformer blocks, inclusive, {EXAMPLE}; 'all'. Leaving out the first and "
                        "last few is the usual cure for artefacts: '2-37' of 40."
                    ),
                    optional=True,
                ),
                known(
                    io.String.Input,
                    id="skip",
                    default="",
                    tooltip=(
                        "Linears to leave alone: names or ends of names, separated by commas, with "
                        "* and ?. 'ffn.2' is that Linear of every block, 'cross_attn.*' all of "
                        "cross-attention, 'blocks.3.*' a block."
                    ),
                    optional=True,
                    advanced=True,
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, layers="all"):
        if layers is None:
            return True
        return check_layer_text("layers", layers) or True

    @classmethod
    def execute(cls, model, enabled=True, **inputs) -> io.NodeOutput:
        if not enabled:
            return io.NodeOutput(model)
        if is_loaded_fp8(model):
            raise ValueError(
                "FP8 Linear: this model's Linears are FP8 since it was loaded (by "
                "linear_precision); remove this node, or load the model with 'default' to choose "
                "layers here"
            )
        return io.NodeOutput(apply_fp8_linear(model, FP8LinearRequest(**inputs)))
