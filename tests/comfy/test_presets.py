"""Presets of the Sol Attention node as API prompts use them."""

import pytest
import torch

pytestmark = pytest.mark.comfy

FILLED = {
    "quality": {
        "tau": 0.5, "precision": "bf16", "dense_steps": -1, "dense_last_steps": 1,
        "start_percent": 0.3, "end_percent": 1.0, "dense_layers": "0-1", "estimator": "diag",
    },
    "balanced": {
        "tau": 1.0, "precision": "auto", "dense_steps": -1, "dense_last_steps": 0,
        "start_percent": 0.0, "end_percent": 1.0, "dense_layers": "0", "estimator": "diag",
    },
    "fast": {"tau": 1.5, "dense_layers": "0", "dense_last_steps": 0},
    "few-step 8": {"tau": 1.0, "dense_layers": "0-1", "start_percent": 0.0},
    "few-step 4": {"tau": 0.75, "dense_layers": "0-1", "start_percent": 0.0},
    "turbo-8": {"tau": 1.0, "dense_layers": "0-1", "dense_steps": 2, "dense_last_steps": 1},
    "turbo-4": {"tau": 0.75, "dense_layers": "0-1", "dense_steps": 1, "dense_last_steps": 1},
}  # fmt: skip


def kinds(run, layer):
    """'d' or 's' for every step of a layer."""
    return "".join("d" if row[layer] == 1.0 else "s" for row in run["map"])


def settings(run):
    return {name: run["settings"][name] for name in FILLED["quality"]}


def test_node_offers_the_presets(comfy):
    spec = comfy.server.object_info("HopperSolAttention")["HopperSolAttention"]
    options = spec["input"]["optional"]["preset"]
    options = options[0] if isinstance(options[0], list) else options[1]["options"]
    assert options == ["custom", *FILLED]
    assert list(spec["input"]["optional"])[:2] == ["enabled", "preset"]


@pytest.mark.parametrize("preset", FILLED)
def test_preset_alone_fills_what_the_prompt_leaves_out(comfy, sol, preset):
    run = comfy.queue(comfy.graph([sol(preset=preset)], cfg=1.0, save=False)).run()
    assert run["settings"]["preset"] == preset
    # "auto" is filled in from the model on top.
    assert {**settings(run), **FILLED[preset]} == settings(run)
    assert run["notes"] == []


def test_preset_changes_what_runs(comfy, sol):
    """10 steps: quality has 20 % first steps, 30 % of the schedule, the last one and two layers."""
    graph = comfy.graph([sol(preset="quality")], steps=10, cfg=1.0, save=False)
    run = comfy.queue(graph).run()
    assert [kinds(run, layer) for layer in range(4)] == ["d" * 10] * 2 + ["dddssssssd"] * 2
    balanced = comfy.graph([sol(preset="balanced")], steps=10, cfg=1.0, save=False)
    run = comfy.queue(balanced).run()
    assert [kinds(run, layer) for layer in range(4)] == ["d" * 10] + ["ddssssssss"] * 3


@pytest.mark.parametrize(("preset", "steps", "dense"), [("few-step 8", 8, 2), ("few-step 4", 4, 1)])
def test_few_step_presets(comfy, sol, preset, steps, dense):
    run = comfy.queue(comfy.graph([sol(preset=preset)], steps=steps, cfg=1.0, save=False)).run()
    want = "d" * dense + "s" * (steps - dense)
    assert [kinds(run, layer) for layer in range(4)] == ["d" * steps] * 2 + [want] * 2


def test_given_inputs_win_and_are_named(comfy, sol):
    """Even where they hold the node's default: a prompt means what it says."""
    given = {"tau": 1.0, "dense_layers": "auto"}
    result = comfy.queue(comfy.graph([sol(preset="quality", **given)], cfg=1.0, save=False))
    run = result.run()
    assert run["settings"]["tau"] == 1.0 and run["settings"]["dense_layers"] == "0"
    assert run["settings"]["dense_last_steps"] == 1  # left out, so the preset's
    (note,) = run["notes"]
    assert note == (
        "preset quality: these inputs were given and win: tau 1.0 (not 0.5), "
        "dense_layers auto (not 0-1)"
    )
    assert note in result.text() and "preset quality: tau 1" in result.text()


def test_preset_written_out_is_the_same_run(comfy, sol):
    """A prompt exported by the browser holds every input; it equals the preset alone."""
    values = {name: value for name, value in FILLED["quality"].items() if name != "estimator"}
    short = comfy.queue(comfy.graph([sol(preset="quality")]))
    full = comfy.queue(comfy.graph([sol(preset="quality", **values)]))
    custom = comfy.queue(comfy.graph([sol(preset="custom", **values)]))
    assert short.run()["notes"] == full.run()["notes"] == []
    assert torch.equal(short.latent(), full.latent())
    assert torch.equal(short.latent(), custom.latent())


def test_preset_that_does_not_exist_is_refused(comfy, sol):
    assert "preset" in comfy.refused(comfy.graph([sol(preset="turbo-2")]))
