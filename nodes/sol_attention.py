"""Node: Sol Attention."""

from comfy_api.latest import io

from .patching.apply import apply_sol_attention
from .patching.layers import EXAMPLE, check_layer_text
from .patching.plan import SolAttentionRequest
from .patching.presets import CUSTOM, PRESETS, with_preset
from .patching.resolve import CHOICES, RANGES
from .schema import known, schema


class HopperSolAttention(io.ComfyNode):
    """Adds a Sol Attention request to a model."""

    @classmethod
    def define_schema(cls):
        def combo(name, options, tooltip, advanced=False):
            return known(
                io.Combo.Input, id=name, options=options, default=options[0], tooltip=tooltip,
                optional=True, advanced=advanced,
            )  # fmt: skip

        def number(kind, name, default, step, tooltip, advanced=False):
            low, high = RANGES[name]
            return known(
                kind.Input, id=name, default=default, min=low, max=high, step=step,
                tooltip=tooltip, optional=True, advanced=advanced,
            )  # fmt: skip

        def switch(name, default, tooltip, advanced=False):
            return known(
                io.Boolean.Input, id=name, default=default, tooltip=tooltip, optional=True,
                advanced=advanced,
            )  # fmt: skip

        def text(name, tooltip):
            return known(
                io.String.Input, id=name, default="auto", tooltip=tooltip, optional=True,
                advanced=True,
            )  # fmt: skip

        return schema(
            node_id="HopperSolAttention",
            display_name="Sol Attention",
            description=(
                "Block-sparse attention for video models: blocks of 64 tokens that matter are "
                "computed exactly, the rest through their means. No training. Add a Run Report "
                "to see what ran."
            ),
            # Widgets are stored in workflows by position: append new ones, never reorder. All are
            # optional, so that a prompt written for an older version stays valid.
            inputs=[
                io.Model.Input("model"),
                switch(
                    "enabled",
                    True,
                    "Off hands the model on untouched, as if the node were not there.",
                ),
                combo(
                    "preset",
                    list(PRESETS),
                    "Choosing one fills in the inputs below, which stay editable; a change by hand sets "
                    "custom. few-step is for distilled models (Lightning) of 8 or 4 steps, turbo for "
                    "MiniMax-H3's. In an API prompt a preset fills in the inputs that are left out; "
                    "those given always win, and "
                    "the Run Report names them.",
                ),
                number(
                    io.Float,
                    "tau",
                    1.0,
                    0.05,
                    "Strictness of the route threshold in standard deviations. Higher is sparser and "
                    "faster: 1.0 keeps about 16 % of the blocks of a long video exact (more of a short one), "
                    "1.5 about 7 %. -1000 keeps all.",
                ),
                combo(
                    "estimator",
                    list(CHOICES["estimator"]),
                    "How the spread of block scores is estimated. exact takes the full second moment. "
                    "auto: diag for Wan, exact for MiniMax-H3. Compare the two at equal density, not at "
                    "equal tau.",
                    advanced=True,
                ),
                combo(
                    "precision",
                    list(CHOICES["precision"]),
                    "Precision inside sparse attention. fp8 applies to the layers of fp8_layers; "
                    "auto takes FP8 there if the GPU has a kernel for it.",
                ),
                number(
                    io.Int,
                    "dense_steps",
                    -1,
                    1,
                    "Steps at the start of each sampler run that stay dense. -1: 20 % of this run's "
                    "steps, at least 1, if it begins from noise (in the first tenth of the noise "
                    "schedule); 0 if it continues a denoise, as Wan 2.2's low-noise model and image to "
                    "image do. Any other number counts in every run.",
                ),
                number(
                    io.Int,
                    "dense_last_steps",
                    0,
                    1,
                    "Steps at the end of each sampler run that stay dense.",
                    advanced=True,
                ),
                number(
                    io.Float,
                    "start_percent",
                    0.0,
                    0.01,
                    "Sparse from this point of the whole noise schedule on. Unlike dense_steps it does "
                    "not start again with each sampler.",
                    advanced=True,
                ),
                number(
                    io.Float,
                    "end_percent",
                    1.0,
                    0.01,
                    "Sparse up to this point of the whole noise schedule.",
                    advanced=True,
                ),
                text(
                    "dense_layers",
                    f"Transformer blocks that stay dense in every step, {EXAMPLE}; 'none', 'all'. "
                    "auto: block 0 for Wan, 0-1 for MiniMax-H3.",
                ),
                text(
                    "fp8_layers",
                    f"Blocks whose sparse attention may run in FP8, {EXAMPLE}; 'none', 'all'. auto: "
                    "the middle third for Wan (10-19 of 30), where FP8 was seen to do no harm; all for "
                    "MiniMax-H3.",
                ),
                combo(
                    "smoothing",
                    list(CHOICES["smoothing"]),
                    "Subtract means before FP8 rounding: k the sequence mean of K, kv that of K and V, "
                    "block the mean of each K block. Without FP8 it changes nothing. auto: k for Wan, "
                    "where it lowers the FP8 error at next to no cost; kv for MiniMax-H3.",
                    advanced=True,
                ),
                switch(
                    "v_bias_correction",
                    True,
                    "With smoothing kv, also restore the mean that rounding V to FP8 shifts.",
                    advanced=True,
                ),
                combo(
                    "sinks",
                    list(CHOICES["sinks"]),
                    "Tokens beside the video in the sequence: Wan's reference latents, MiniMax-H3's "
                    "text, pictures and sound. kv: exact for every token; kv_and_rows: their own "
                    "attention is dense too; audio_rows: that of the sound that is made; off: treated "
                    "like the video. auto: kv for Wan, kv_and_rows for MiniMax-H3.",
                    advanced=True,
                ),
                combo(
                    "token_order",
                    list(CHOICES["token_order"]),
                    "Order in which tokens are cut into blocks. morton_3d makes a block a small cube of "
                    "the video instead of a strip of one frame, morton_2d a square of one frame. auto: "
                    "morton_3d for Wan, none for MiniMax-H3.",
                    advanced=True,
                ),
                number(
                    io.Int,
                    "min_tokens",
                    8192,
                    64,
                    "Shorter sequences stay dense, where sparse attention does not pay. For scale: Wan "
                    "480x832, 81 frames is 32,760 tokens; 33 frames 14,040; 256x256, 17 frames 1,280.",
                ),
                combo(
                    "on_decline",
                    list(CHOICES["on_decline"]),
                    "When no kernel can take the call or one fails: fallback computes it dense and says "
                    "so in the Run Report; error stops, before sampling where that can be known.",
                ),
                combo(
                    "kv_splits",
                    list(CHOICES["kv_splits"]),
                    "Split the keys of one head over several thread blocks. For kernels on small grids.",
                    advanced=True,
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, dense_layers="auto", fp8_layers="auto"):
        for name, value in (("dense_layers", dense_layers), ("fp8_layers", fp8_layers)):
            if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
                continue
            problem = check_layer_text(name, value)
            if problem:
                return problem
        return True

    @classmethod
    def execute(cls, model, enabled=True, preset=CUSTOM, **inputs) -> io.NodeOutput:
        if not enabled:
            return io.NodeOutput(model)
        # An input that the prompt leaves out is not among these.
        inputs = with_preset(preset, inputs)
        return io.NodeOutput(
            apply_sol_attention(model, SolAttentionRequest(preset=preset, **inputs))
        )
