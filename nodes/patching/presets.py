"""Named settings of the Sol Attention node.

A preset stands for values of some inputs and is no setting of its own: it fills in inputs that a
prompt leaves out, and the browser writes it into the node's widgets, where people may change it.
``web/lib/presets.mjs`` holds the same table for the browser; a test compares the two.
"""

CUSTOM = "custom"

# Every preset but custom fills the same inputs. Starting points, from published settings:
# - balanced is the node's defaults: tau 1.0 and 20 % dense steps as the article's Wan runs.
# - quality keeps the first 30 % and the last step dense, and two layers, as published for other
#   video models at tau 0.5; no FP8.
# - fast differs in tau: 1.5 was published as 15 % density of a 14B Wan in Z-order.
# - few-step models (Lightning and other distilled ones) make up for an error of one step in few
#   others: two layers stay dense, and with 4 steps the threshold is lower. dense_steps -1 is 2 of 8
#   and 1 of 4, and of two models in turn 1 for the first and none for the second.
# - turbo models (MiniMax-H3's) also keep their last step: there the fine structure and the end of
#   the sound are settled. Their one model sees the whole schedule, so the steps are plain numbers.
_BALANCED = {
    "tau": 1.0,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": -1,
    "dense_last_steps": 0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "auto",
}
PRESETS: dict[str, dict[str, object]] = {
    CUSTOM: {},
    "quality": {
        **_BALANCED,
        "tau": 0.5,
        "precision": "bf16",
        "dense_last_steps": 1,
        "start_percent": 0.3,
        "dense_layers": "0-1",
    },
    "balanced": _BALANCED,
    "fast": {**_BALANCED, "tau": 1.5},
    "few-step 8": {**_BALANCED, "dense_layers": "0-1"},
    "few-step 4": {**_BALANCED, "tau": 0.75, "dense_layers": "0-1"},
    "turbo-8": {**_BALANCED, "dense_steps": 2, "dense_last_steps": 1, "dense_layers": "0-1"},
    "turbo-4": {
        **_BALANCED,
        "tau": 0.75,
        "dense_steps": 1,
        "dense_last_steps": 1,
        "dense_layers": "0-1",
    },
}


def with_preset(preset: str, inputs: dict[str, object]) -> dict[str, object]:
    """``inputs`` of the node, those that ``preset`` fills and the prompt left out added.

    Inputs that are given always win, whatever their value. Raises ValueError for an unknown preset.
    """
    if preset not in tuple(PRESETS):
        raise ValueError(f"preset: got {preset!r}, need one of {', '.join(PRESETS)}")
    return {**PRESETS[preset], **inputs}


def overridden(preset: str, values: dict[str, object]) -> dict[str, object]:
    """What ``preset`` stands for where ``values`` say something else: input -> the preset's value."""
    return {name: value for name, value in PRESETS[preset].items() if values[name] != value}
