"""A run's record as text, JSON and picture."""

import json

import pytest
import torch

from hopper_sol.nodes.patching.history import Selection
from hopper_sol.nodes.patching.report import (
    report_dump,
    report_json,
    report_picture,
    report_text,
)

SETTINGS = {
    "tau": 1.25,
    "estimator": "diag",
    "precision": "fp8",
    "smoothing": "kv",
    "token_order": "morton_3d",
}


def run(**changes):
    """A sealed record with something in every field."""
    record = {
        "prompt_id": "p1",
        "node_id": "3",
        "model": "Wan t2v (30 blocks, 12 heads)",
        "plan": "steps 1 dense, 2-3 sparse; dense layers 0",
        "settings": SETTINGS,
        "status": "finished",
        "error": None,
        "started": "2026-01-01T00:00:00+0000",
        "seconds": 1.5,
        "steps": 3,
        "num_blocks": 2,
        "forwards": 3,
        "tokens": 32760,
        "batch": 1,
        "self_attention_calls": 6,
        "sparse_calls": 2,
        "fp8_calls": 1,
        "row_calls": 0,
        "dense_calls": {"dense step": 2, "dense layer": 2},
        "other_calls": {"cross-attention": 6, "outside the patched model": 1},
        "backend": {"reference": 2},
        "precision": {"bf16": 1, "fp8": 1},
        "cast_from": {"float16": 2},
        "declined_backends": {"sm90": "needs SM90, this GPU is SM89"},
        "density": 0.25,
        "density_by_step": [None, 0.25, 0.25],
        "density_by_layer": [None, 0.25],
        "map": [[1.0, 1.0], [1.0, 0.25], [1.0, None]],
        "nonfinite": [{"step": 1, "layer": 1, "calls": 2}],
        "notes": ["backend 'triton' failed and was switched off: RuntimeError: boom"],
        "linear": None,
    }
    return {**record, **changes}


LINEAR = {
    "settings": {"scope": "attention", "layers": "1-3", "skip": "cross_attn.*"},
    "converted": 6,
    "converted_layers": {"self_attn.q": "1-3", "self_attn.k": "1-3"},
    "formats": {"bfloat16": 4, "raw float8_e4m3fn": 2},
    "skipped": [{"reason": "not in scope 'attention'", "count": 4, "layers": {"ffn.0": "0-3"}}],
    "calls": 18,
    "fp8_calls": 15,
    "backend": {"triton": 15},
    "fallbacks": {"fewer than 16 rows": 3},
    "fused": {"gelu": 4, "swiglu": 3, "norm": 8},
    "unfused": {"gelu failed": 2},
    "declined_backends": {"triton": "needs a cuda device"},
    "notes": ["skip pattern 'x' matches no Linear"],
}
LINEAR_LINE = (
    "6 Linears converted, 18 calls, 15 FP8, 3 not (3 x fewer than 16 rows); backend triton"
)


def linear_only(**changes):
    """A sealed record of a model without Sol Attention."""
    nothing = {
        "plan": None, "settings": None, "tokens": None, "batch": None, "forwards": 0,
        "self_attention_calls": 0, "sparse_calls": 0, "fp8_calls": 0, "row_calls": 0, "dense_calls": {},
        "other_calls": {}, "backend": {}, "precision": {}, "cast_from": {},
        "declined_backends": {}, "density": None, "map": [[None, None]] * 3, "nonfinite": [],
        "notes": [],
    }  # fmt: skip
    return run(**{**nothing, "linear": LINEAR, **changes})


def report(*runs, source="this_prompt", dropped=0):
    return report_json(Selection(list(runs), source, dropped), {"torch": "2.13.0", "comfyui": None})


def test_report_json_has_a_schema_version():
    data = report(run())
    assert data["schema_version"] == 1
    assert data["pack"] == "hopper-sol"
    assert (data["source"], data["dropped_runs"]) == ("this_prompt", 0)
    assert data["versions"] == {"torch": "2.13.0", "comfyui": None}
    assert data["runs"] == [run()]


def test_report_dump_is_one_line_of_json():
    data = report(run(), run())
    text = report_dump(data)
    assert "\n" not in text
    assert json.loads(text) == data


@pytest.mark.parametrize(
    "line",
    [
        "  model     Wan t2v (30 blocks, 12 heads)",
        "  plan      steps 1 dense, 2-3 sparse; dense layers 0",
        "  settings  tau 1.25, diag estimator, precision fp8, smoothing kv, token order morton_3d",
        "  dense     2 calls: dense step",
        "  dense     2 calls: dense layer",
        "  passed on 6 calls: cross-attention",
        "  passed on 1 calls: outside the patched model",
        "  cast      2 calls from float16 to bfloat16",
        "  backend   sm90 declined: needs SM90, this GPU is SM89",
        "  WARNING   non-finite output in 2 calls at step 2, layer 1 (it may have come in with the input)",
        "  note      backend 'triton' failed and was switched off: RuntimeError: boom",
        "  error     ValueError: too hot",
    ],
)
def test_report_text_has_the_line(line):
    assert line in report_text(report(run(error="ValueError: too hot"))).split("\n")


def test_report_text_starts_with_the_summary():
    first = report_text(report(run())).split("\n")[0]
    assert first.startswith("finished: 6 self-attention calls, 2 sparse (1 FP8), 4 dense")
    assert "density 25.0%" in first


def test_report_text_numbers_several_runs():
    text = report_text(report(run(), run(status="interrupted")))
    assert "Run 1 of 2: finished:" in text
    assert "Run 2 of 2: interrupted:" in text
    assert "Run 1" not in report_text(report(run()))


def test_report_text_earlier_run_says_so():
    earlier = report_text(report(run(), source="earlier_prompt"))
    assert earlier.startswith("The sampler's output was reused")
    unrelated = report_text(report(run(), source="unrelated"))
    assert unrelated.startswith("In this prompt no sampler run of this model made this latent")
    assert report_text(report(run())).startswith("finished: ")


def test_report_text_says_what_is_no_longer_kept():
    assert "3 earlier runs of this prompt" in report_text(report(run(), dropped=3))


def test_report_text_counts_steps_without_attention():
    skipped = run(map=[[1.0, 1.0], [None, None], [None, None]])
    assert "  skipped   2 of 3 steps made no attention call" in report_text(report(skipped))
    assert "skipped" not in report_text(report(run()))
    aborted = run(map=skipped["map"], status="interrupted")
    assert "skipped" not in report_text(report(aborted))


def test_report_text_keeps_a_flood_of_warnings_short():
    places = [{"step": s, "layer": 0, "calls": 1} for s in range(9)]
    text = report_text(report(run(nonfinite=places)))
    assert text.count("non-finite") == 5
    assert "and at 4 further places" in text
    five = report_text(report(run(nonfinite=places[:5])))
    assert five.count("non-finite") == 5
    assert "further" not in five


def test_report_text_nothing_happened():
    quiet = run(
        self_attention_calls=0, sparse_calls=0, fp8_calls=0, dense_calls={}, other_calls={},
        backend={}, cast_from={}, declined_backends={}, density=None, nonfinite=[], notes=[],
        tokens=None,
    )  # fmt: skip
    lines = report_text(report(quiet)).split("\n")
    assert len(lines) == 4
    assert "0 self-attention calls" in lines[0]


def cell(picture, step, layer, size=32):
    """Colour at the middle of a map cell of ``size`` pixels, 0 .. 255."""
    middle = size // 2 - 1
    y, x = 40 + size * step + middle, 56 + size * layer + middle
    return tuple((picture[y, x] * 255).round().int().tolist())


def test_report_picture_shape_and_range():
    picture = report_picture(report(run()))
    assert picture.dtype == torch.float32
    assert picture.shape == (1, 40 + 3 * 32 + 28, 460, 3)
    assert picture.min() >= 0 and picture.max() <= 1


def test_report_picture_colours():
    """Bright is exact, dark is summarised, grey was not called."""
    picture = report_picture(report(run()))[0]
    assert cell(picture, 0, 0) == cell(picture, 1, 0) == (252, 240, 170)
    assert cell(picture, 2, 1) == (90, 90, 90)
    assert sum(cell(picture, 1, 1)) < sum(cell(picture, 0, 0))
    assert cell(picture, 1, 1) != (90, 90, 90)


def test_report_picture_brightness_grows_with_density():
    densities = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
    picture = report_picture(report(run(map=[densities])))[0]
    brightness = [sum(cell(picture, 0, layer)) for layer in range(len(densities))]
    assert brightness == sorted(set(brightness))
    assert cell(picture, 0, 0) == (20, 20, 90)


def test_report_picture_density_out_of_range_is_clamped():
    """Rounding may push a mean just past 1."""
    picture = report_picture(report(run(map=[[1.0001, -0.0001]])))[0]
    assert cell(picture, 0, 0) == (252, 240, 170)
    assert cell(picture, 0, 1) == (20, 20, 90)


def test_report_picture_pads_runs_of_different_size():
    large = run(map=[[0.5] * 40] * 20)  # 40 layers: 12 pixels a cell
    picture = report_picture(report(run(), large))
    assert picture.shape == (2, 40 + 20 * 12 + 28, 56 + 40 * 12 + 16, 3)
    assert picture[0, 40 + 3 * 32 + 28 :].abs().max() == 0
    assert cell(picture[1], 19, 39, 12) == cell(picture[1], 0, 0, 12)


def test_report_picture_without_a_run_is_black():
    picture = report_picture(report())
    assert picture.shape == (1, 64, 64, 3)
    assert picture.abs().max() == 0


def test_report_picture_all_dense_run():
    report_picture(report(run(density=None, map=[[1.0, None]])))


@pytest.mark.parametrize("make", [run, linear_only])
@pytest.mark.parametrize(
    "line",
    [
        f"  linear    {LINEAR_LINE}",
        "  settings  scope attention, layers 1-3, skip cross_attn.*",
        "  converted 4 from bfloat16, 2 from raw float8_e4m3fn: self_attn.q 1-3; self_attn.k 1-3",
        "  left out  4 Linears, not in scope 'attention': ffn.0 0-3",
        "  fallback  3 Linear calls in the model's precision: fewer than 16 rows",
        "  fused     4 FP8 calls with GELU in front of them",
        "  fused     3 FP8 calls with SwiGLU in front of them",
        "  fused     8 FP8 calls with norm and modulation in front of them",
        "  not fused 2 FP8 calls: gelu failed",
        "  backend   triton declined Linears: needs a cuda device",
        "  note      skip pattern 'x' matches no Linear",
    ],
)
def test_report_text_has_the_linear_line(make, line):
    assert line in report_text(report(make(linear=LINEAR))).split("\n")


def test_report_text_of_both_nodes():
    text = report_text(report(run(linear=LINEAR)))
    assert text.startswith("finished: 6 self-attention calls") and "  plan      steps" in text
    assert f"  linear    {LINEAR_LINE}" in text


def test_report_text_without_sol_attention():
    lines = report_text(report(linear_only(error="ValueError: too hot"))).split("\n")
    assert lines[0] == f"finished: {LINEAR_LINE}, 1.5 s"
    assert lines[1] == "  model     Wan t2v (30 blocks, 12 heads)"
    assert not any("attention call" in line or "plan" in line for line in lines)
    assert lines[-1] == "  error     ValueError: too hot"


def test_report_text_leaves_out_what_is_empty():
    plain = {
        **LINEAR,
        "settings": {**LINEAR["settings"], "skip": " "},
        "fallbacks": {},
        "fused": {},
        "unfused": {},
        "calls": 15,
    }
    text = report_text(report(linear_only(linear=plain)))
    assert "skip" not in text.split("converted")[1].split("left out")[0] and ", skip" not in text
    assert "15 FP8, 0 not; backend triton" in text and "fallback" not in text
    assert "fused" not in text


def test_report_picture_without_sol_attention():
    picture = report_picture(report(linear_only()))
    assert cell(picture[0], 0, 0) == (90, 90, 90)


def test_report_json_carries_the_linear_section():
    data = report(linear_only())
    assert json.loads(report_dump(data))["runs"][0]["linear"] == LINEAR
