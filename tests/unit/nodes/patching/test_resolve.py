"""Every "auto" of a request filled in from the model family."""

from dataclasses import fields, replace

import pytest

from hopper_sol.nodes.models.wan import WanAdapter
from hopper_sol.nodes.patching.plan import SolAttentionRequest
from hopper_sol.nodes.patching.presets import PRESETS, with_preset
from hopper_sol.nodes.patching.resolve import RANGES, SMOOTHING, resolve


def wan(blocks, heads):
    return WanAdapter(
        name="Wan t2v",
        num_blocks=blocks,
        num_heads=heads,
        head_dim=128,
        text_dim=4096,
        publishes_block_index=True,
        unsupported=None,
    )


def test_resolve_auto_comes_from_the_adapter(make_adapter):
    settings = resolve(SolAttentionRequest(), make_adapter())
    request = settings.request
    assert (request.estimator, request.smoothing) == ("exact", "k")
    assert (request.token_order, request.dense_layers) == ("morton_2d", "0,-1")
    assert request.fp8_layers == "1-2"
    assert settings.dense_layers == {0, 3}
    assert settings.fp8_layers == {1, 2}
    assert settings.sparse.estimator == settings.fp8.estimator == "exact"
    assert settings.sparse.k_smoothing == "mean"
    assert settings.notes == ()


@pytest.mark.parametrize("text", ["AUTO", " auto "])
def test_resolve_auto_in_layer_texts_as_typed(text, make_adapter):
    settings = resolve(SolAttentionRequest(dense_layers=text, fp8_layers=text), make_adapter())
    assert (settings.dense_layers, settings.fp8_layers) == ({0, 3}, {1, 2})


def test_resolve_keeps_what_was_given(make_adapter):
    given = SolAttentionRequest(
        tau=0.5,
        estimator="diag",
        precision="fp8",
        dense_steps=3,
        dense_last_steps=2,
        start_percent=0.1,
        end_percent=0.9,
        dense_layers="none",
        fp8_layers="all",
        smoothing="kv",
        v_bias_correction=False,
        sinks="off",
        token_order="none",
        min_tokens=64,
        on_decline="error",
        kv_splits="2",
    )
    settings = resolve(given, make_adapter())
    assert settings.request == given
    assert settings.sparse.tau == settings.fp8.tau == 0.5
    assert (settings.dense_layers, settings.fp8_layers) == (frozenset(), {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("blocks", "heads", "fp8"),
    [(30, 12, range(10, 20)), (40, 40, range(13, 27)), (2, 2, range(2)), (1, 1, range(1))],
    ids=["1.3B", "14B", "tiny", "one"],
)
def test_resolve_wan_runs_fp8_in_the_middle_third(blocks, heads, fp8):
    settings = resolve(SolAttentionRequest(), wan(blocks, heads))
    assert settings.fp8_layers == set(fp8)
    assert settings.dense_layers == {0}
    assert settings.request.token_order == "morton_3d"
    assert settings.sparse.estimator == "diag"
    assert (settings.fp8.k_smoothing, settings.fp8.v_smoothing) == ("mean", "none")


@pytest.mark.parametrize(
    ("word", "k", "v"),
    [("none", "none", "none"), ("k", "mean", "none"), ("kv", "mean", "mean"),
     ("block", "block", "none")],
)  # fmt: skip
def test_resolve_smoothing_words(word, k, v, make_adapter):
    for config in (
        resolve(SolAttentionRequest(smoothing=word), make_adapter()).sparse,
        resolve(SolAttentionRequest(smoothing=word), make_adapter()).fp8,
    ):
        assert (config.k_smoothing, config.v_smoothing) == (k, v)


@pytest.mark.parametrize("word", SMOOTHING)
@pytest.mark.parametrize("wanted", [True, False])
def test_resolve_v_bias_correction_needs_kv(word, wanted, make_adapter):
    """The node's switch is on by default; without a mean of V there is nothing to correct."""
    request = SolAttentionRequest(smoothing=word, v_bias_correction=wanted)
    assert resolve(request, make_adapter()).fp8.corrects_v_bias == (wanted and word == "kv")


@pytest.mark.parametrize(("text", "splits"), [("auto", "auto"), ("1", 1), ("2", 2), ("4", 4)])
def test_resolve_kv_splits(text, splits, make_adapter):
    settings = resolve(SolAttentionRequest(kv_splits=text), make_adapter())
    assert settings.fp8.kv_splits == settings.sparse.kv_splits == splits


@pytest.mark.parametrize(
    ("precision", "inside"), [("auto", None), ("fp8", "fp8"), ("bf16", "bf16")]
)
def test_resolve_precision_acts_on_fp8_layers_only(precision, inside, make_adapter):
    settings = resolve(SolAttentionRequest(precision=precision), make_adapter())
    assert [settings.config(layer).precision for layer in range(4)] == [
        "bf16", inside, inside, "bf16",
    ]  # fmt: skip
    assert settings.config(None).precision == "bf16"
    assert settings.sparse == replace(settings.fp8, precision="bf16")


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (0.5, 0.5), (0.0, 0.0), (1.0, 1.0)])
def test_resolve_window_may_be_empty(start, end, make_adapter):
    resolve(SolAttentionRequest(start_percent=start, end_percent=end), make_adapter())


def test_resolve_start_after_end_raises(make_adapter):
    with pytest.raises(ValueError, match=r"start_percent: got 0.6, need at most end_percent 0.4"):
        resolve(SolAttentionRequest(start_percent=0.6, end_percent=0.4), make_adapter())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_layers": "4"}, "dense_layers: got 4 in '4', this model has 4 blocks"),
        ({"fp8_layers": "0-9"}, "fp8_layers: got 9 in '0-9', this model has 4 blocks"),
        ({"dense_layers": "x"}, "dense_layers: got 'x'"),
        ({"tau": 9.0}, "tau: got 9.0"),
        ({"tau": float("nan")}, "tau: got nan"),
    ],
)
def test_resolve_error_names_the_input(change, message, make_adapter):
    with pytest.raises(ValueError) as error:
        resolve(SolAttentionRequest(**change), make_adapter())
    assert message in str(error.value)


def test_resolve_notes_what_was_given_against_a_preset(make_adapter):
    """A prompt that changes the preset alone, with every other input still in it."""
    request = SolAttentionRequest(preset="quality", tau=0.5, start_percent=0.3, dense_layers="0-1")
    (note,) = resolve(request, make_adapter()).notes
    assert note == (
        "preset quality: these inputs were given and win: precision auto (not bf16), "
        "dense_last_steps 0 (not 1)"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_resolve_has_no_note_about_a_preset_that_holds(preset, make_adapter):
    request = SolAttentionRequest(**with_preset(preset, {"min_tokens": 7}), preset=preset)
    assert resolve(request, make_adapter()).notes == ()


@pytest.mark.parametrize("sinks", ["kv", "kv_and_rows", "audio_rows"])
def test_resolve_notes_sinks_that_have_nothing_to_act_on(sinks, make_adapter):
    (note,) = resolve(SolAttentionRequest(sinks=sinks), make_adapter()).notes
    assert note == f"sinks {sinks}: Fake has no conditioning tokens in its sequence"


@pytest.mark.parametrize("sinks", ["auto", "off"])
def test_resolve_does_not_note_sinks_nobody_asked_for(sinks, make_adapter):
    assert resolve(SolAttentionRequest(sinks=sinks), make_adapter()).notes == ()


def test_request_defaults_are_those_of_the_node():
    """Workflows and API prompts rely on them; the node's own schema is checked in tests/comfy."""
    defaults = {field.name: field.default for field in fields(SolAttentionRequest)}
    assert defaults["dense_steps"] == -1
    assert defaults["min_tokens"] == 8192
    assert defaults["on_decline"] == "fallback"
    assert all(
        defaults[name] == "auto"
        for name in (
            "estimator", "precision", "dense_layers", "fp8_layers", "smoothing", "sinks",
            "token_order", "kv_splits",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("estimator", "median"),
        ("precision", "FP8"),
        ("smoothing", "bogus"),
        ("sinks", "bogus"),
        ("token_order", "bogus"),
        ("on_decline", "raise"),
        ("kv_splits", "3"),
        ("kv_splits", 2),
        ("preset", "bogus"),
        ("tau", 8.5),
        ("tau", "1"),
        ("dense_steps", -2),
        ("dense_steps", 1.5),
        ("dense_last_steps", -1),
        ("start_percent", -0.1),
        ("end_percent", 1.1),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("dense_layers", 3),
        ("fp8_layers", None),
    ],
)
def test_resolve_checks_what_comes_through_a_link(name, value, make_adapter):
    """ComfyUI checks widgets, not linked values."""
    with pytest.raises((ValueError, TypeError), match=f"^{name}: got "):
        resolve(replace(SolAttentionRequest(), **{name: value}), make_adapter())


def test_resolve_takes_the_ends_of_every_range(make_adapter):
    for name, ends in RANGES.items():
        for value in ends:
            other = {"start_percent": "end_percent", "end_percent": "start_percent"}.get(name)
            both = {name: value, **({other: value} if other else {})}
            resolve(replace(SolAttentionRequest(), **both), make_adapter())
