"""Presets: one table in Python and in JavaScript, and who wins."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from hopper_sol.nodes.patching.plan import SolAttentionRequest
from hopper_sol.nodes.patching.presets import CUSTOM, PRESETS, overridden, with_preset
from hopper_sol.nodes.patching.resolve import check_request, resolve
from hopper_sol.nodes.patching.steps import automatic_dense_steps

MODULE = Path(__file__).resolve().parents[4] / "web" / "lib" / "presets.mjs"
NAMED = [name for name in PRESETS if name != CUSTOM]


def test_the_browser_has_the_same_table_in_the_same_order():
    text = MODULE.read_text(encoding="ascii")
    table = json.loads(re.search(r"export const PRESETS = (\{.*?\n\});", text, re.DOTALL)[1])
    assert table == PRESETS
    assert list(table) == list(PRESETS)
    # 1 == 1.0 == True in Python: a count must stay a count, a number a number.
    kinds = {name: type(value) for name, value in PRESETS["quality"].items()}
    for values in (*table.values(), *PRESETS.values()):
        assert all(type(value) is kinds[name] for name, value in values.items())


def test_options_keep_their_order():
    """Stored in workflows; new ones go last."""
    assert list(PRESETS) == [
        "custom", "quality", "balanced", "fast", "few-step 8", "few-step 4", "turbo-8",
        "turbo-4",
    ]  # fmt: skip


def test_every_preset_fills_the_same_inputs():
    """Else the one chosen before would leave something behind in the widgets."""
    assert PRESETS[CUSTOM] == {}
    inputs = {tuple(PRESETS[name]) for name in NAMED}
    assert len(inputs) == 1
    assert set(*inputs) <= set(asdict(SolAttentionRequest()))


def test_balanced_is_the_nodes_defaults():
    defaults = asdict(SolAttentionRequest())
    assert all(defaults[name] == value for name, value in PRESETS["balanced"].items())


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("blocks", [30, 40, 50])
def test_presets_are_valid(name, blocks, make_adapter):
    request = SolAttentionRequest(**with_preset(name, {}), preset=name)
    check_request(request)
    assert resolve(request, make_adapter(num_blocks=blocks)).request.preset == name


def test_presets_are_ordered_by_strictness():
    tau = {name: PRESETS[name]["tau"] for name in NAMED}
    assert tau["quality"] < tau["balanced"] < tau["fast"]
    assert tau["few-step 4"] < tau["few-step 8"] <= tau["balanced"]
    assert tau["turbo-4"] < tau["turbo-8"] <= tau["balanced"]


@pytest.mark.parametrize("name", ["few-step 8", "few-step 4"])
def test_few_step_presets_have_no_window(name):
    """Of 4 steps, a percentage is one step or none."""
    values = PRESETS[name]
    assert (values["start_percent"], values["end_percent"], values["dense_last_steps"]) == (0, 1, 0)


@pytest.mark.parametrize(("name", "steps", "first"), [("turbo-8", 8, 2), ("turbo-4", 4, 1)])
def test_turbo_presets_keep_both_ends(name, steps, first):
    """As many steps as the automatic choice, whatever part of the schedule a run begins in."""
    values = PRESETS[name]
    assert values["dense_steps"] == first == automatic_dense_steps(steps)
    assert values["dense_last_steps"] == 1
    assert (values["start_percent"], values["end_percent"]) == (0, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_with_preset_fills_what_is_left_out(name):
    assert with_preset(name, {}) == PRESETS[name]
    assert with_preset(name, {"min_tokens": 5}) == {**PRESETS[name], "min_tokens": 5}


@pytest.mark.parametrize("name", NAMED)
def test_with_preset_what_is_given_wins_even_a_default(name):
    given = {"tau": 1.0, "dense_layers": "auto", "dense_last_steps": 0}
    assert {k: with_preset(name, given)[k] for k in given} == given


def test_with_preset_changes_neither_table_nor_inputs():
    given = {"tau": 2.0}
    with_preset("quality", given)["tau"] = 3.0
    assert given == {"tau": 2.0}
    assert PRESETS["quality"]["tau"] == 0.5


@pytest.mark.parametrize("preset", ["Quality", "", None, 3, ["fast"]])
def test_with_preset_unknown(preset):
    with pytest.raises(ValueError, match=r"^preset: got .*need one of custom, quality, balanced"):
        with_preset(preset, {})


def test_overridden_names_what_differs():
    values = {**asdict(SolAttentionRequest()), **PRESETS["fast"]}
    assert overridden("fast", values) == {}
    assert overridden("fast", {**values, "tau": 1.0, "min_tokens": 3}) == {"tau": 1.5}
    assert overridden(CUSTOM, values) == {}
