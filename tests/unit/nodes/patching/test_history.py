"""Which runs a report is about, and whether a run made a latent."""

import pytest
import torch

from hopper_sol.nodes.patching import history as history_module
from hopper_sol.nodes.patching.history import RunHistory
from hopper_sol.nodes.patching.latent_mark import mark_of


def mark(value, shape=(1, 16, 3, 8, 8)):
    return mark_of(torch.full(shape, float(value)))


# (prompt, node, mark of what it made)
RUNS = [("p1", "a", mark(1)), ("p1", "b", mark(2)), ("p2", "a", mark(3))]


def filled(runs):
    history = RunHistory()
    for prompt_id, node_id, made in runs:
        history.add({"prompt_id": prompt_id, "node_id": node_id}, made)
    return history


def reported(runs, latent, prompt_id):
    """(node ids, which made the latent, source) of what is reported."""
    selection = filled(runs).select(latent, prompt_id)
    nodes = [run["node_id"] for run in selection.runs]
    return nodes, [run["made_this_latent"] for run in selection.runs], selection.source


def test_select_takes_the_executing_prompt():
    assert reported(RUNS, mark(2), "p1") == (["a", "b"], [False, True], "this_prompt")
    assert reported(RUNS, mark(3), "p2") == (["a"], [True], "this_prompt")


def test_select_reused_output_shows_the_run_that_made_it():
    """Not the last run of the model: another prompt may have come in between."""
    assert reported(RUNS, mark(2), "p3") == (["a", "b"], [False, True], "earlier_prompt")
    assert reported(RUNS, mark(1), "p3") == (["a"], [True], "earlier_prompt")


@pytest.mark.parametrize("latent", [mark(9), mark(2, shape=(1, 16, 3, 8, 9)), None])
def test_select_of_a_latent_that_no_run_made(latent):
    """The sampler ran another model, or had no steps."""
    assert reported(RUNS, latent, "p3") == (["a"], [False], "unrelated")


def test_select_an_aborted_run_made_nothing():
    assert reported([("p1", "a", None)], mark(1), "p3") == (["a"], [False], "unrelated")


def test_select_without_prompt_ids_takes_the_last_run():
    runs = [(None, "a", mark(1)), (None, "b", mark(2))]
    assert reported(runs, mark(1), None) == (["b"], [False], "this_prompt")


@pytest.mark.parametrize("prompt_id", [None, "p1"])
def test_select_nothing(prompt_id):
    assert reported([], mark(1), prompt_id) == ([], [], "this_prompt")


def test_select_copies_records():
    history = filled(RUNS[:1])
    history.select(mark(1), "p1").runs[0]["node_id"] = "changed"
    assert history.records == [{"prompt_id": "p1", "node_id": "a"}]


def test_add_keeps_the_last_runs_and_counts_what_this_prompt_lost(monkeypatch):
    monkeypatch.setattr(history_module, "KEPT_RUNS", 3)
    history = filled([("p1", str(n), None) for n in range(2)])
    for number in range(5):
        history.add({"prompt_id": "p2", "node_id": str(number)}, mark(number))
    assert len(history) == 3
    selection = history.select(mark(4), "p2")
    assert [run["node_id"] for run in selection.runs] == ["2", "3", "4"]
    assert selection.dropped == 2  # of p2; the two of p1 are another prompt's


def test_add_counts_no_loss_for_a_prompt_that_lost_nothing(monkeypatch):
    monkeypatch.setattr(history_module, "KEPT_RUNS", 2)
    history = filled([("p1", "a", None), ("p2", "a", None), ("p2", "b", None)])
    assert history.select(None, "p2").dropped == 0


def test_mark_of_survives_half_precision_and_tells_noise_apart():
    latent = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    other = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    assert mark_of(latent).matches(mark_of(latent.half()))
    assert mark_of(latent).matches(mark_of(latent.bfloat16()))
    assert not mark_of(latent).matches(mark_of(other))
    assert not mark_of(latent).matches(None)
    broken = torch.full((4,), float("nan"))
    assert mark_of(broken).matches(mark_of(broken.clone()))
    assert mark_of("no latent") is None and mark_of(torch.zeros(0)) is None
