"""The counters of a sampler run and the record they are sealed into."""

import json
import math
import sys
import threading
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from hopper_sol.kernels import SolAttnStats
from hopper_sol.nodes.patching.record import RunRecorder, outliving, summary_line


def recorder(*, steps=2, blocks=3, check_finite=True):
    return RunRecorder(
        num_steps=steps, num_blocks=blocks, check_finite=check_finite, header={"model": "Fake"}
    )


def stats(exact=(2, 4), blocks=4, precision="bf16", **changes):
    """Stats of a call in which query block i has exact[i] exact key blocks."""
    return SolAttnStats(
        backend="reference",
        precision=precision,
        exact_blocks=torch.tensor([[list(exact)]], dtype=torch.int32),
        num_kv_blocks=blocks,
        **changes,
    )


OUT = torch.zeros(1, 8, 1, 4)


def leaves(data):
    if isinstance(data, dict):
        data = [*data, *data.values()]
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from leaves(item)
    else:
        yield data


def test_seal_of_a_mixed_run():
    record = recorder()
    record.forward(256, 1)
    record.forward(256, 1)
    record.dense("dense step", 0, 0)
    record.dense("dense step", 0, 1)
    record.dense("attention mask", 1, 0)
    record.other("cross-attention")
    record.sparse(stats((2, 4)), OUT, 1, 1)  # density 0.75
    record.sparse(stats((1, 1), precision="fp8"), OUT, 1, 2)  # density 0.25
    record.notes.append("a note")
    sealed = record.seal("finished")

    assert sealed["model"] == "Fake"
    assert (sealed["status"], sealed["error"]) == ("finished", None)
    assert (sealed["steps"], sealed["num_blocks"], sealed["forwards"]) == (2, 3, 2)
    assert (sealed["tokens"], sealed["batch"]) == (256, 1)
    assert sealed["self_attention_calls"] == 5
    assert (sealed["sparse_calls"], sealed["fp8_calls"]) == (2, 1)
    assert sealed["dense_calls"] == {"dense step": 2, "attention mask": 1}
    assert sealed["other_calls"] == {"cross-attention": 1}
    assert sealed["backend"] == {"reference": 2}
    assert sealed["precision"] == {"bf16": 1, "fp8": 1}
    assert sealed["density"] == pytest.approx(0.5)
    assert sealed["density_by_step"] == [None, 0.5]
    assert sealed["density_by_layer"] == [None, 0.75, 0.25]
    assert sealed["map"] == [[1.0, 1.0, None], [1.0, 0.75, 0.25]]
    assert sealed["nonfinite"] == []
    assert sealed["notes"] == ["a note"]
    assert sealed["seconds"] >= 0
    assert sealed["started"][:2] == "20"


def test_seal_averages_calls_of_one_cell():
    """cond and uncond of one step: sparse ones are averaged, a dense one counts as 1."""
    record = recorder()
    record.sparse(stats((1, 1)), OUT, 0, 0)
    record.sparse(stats((3, 3)), OUT, 0, 0)
    record.dense("attention mask", 0, 0)
    sealed = record.seal("finished")
    assert sealed["density"] == pytest.approx(0.5)
    assert sealed["density_by_step"][0] == 0.5
    assert sealed["map"][0][0] == pytest.approx((0.25 + 0.75 + 1) / 3, abs=1e-4)


def test_seal_lists_sizes_that_differ():
    record = recorder()
    for tokens, batch in ((320, 1), (64, 2), (320, 1)):
        record.forward(tokens, batch)
    sealed = record.seal("finished")
    assert sealed["tokens"] == [64, 320]
    assert sealed["batch"] == [1, 2]


def test_seal_counts_casts_and_declined_backends():
    record = recorder()
    record.sparse(stats(cast_from=torch.float16), OUT, 0, 0)
    record.note_declined({"sm90": "needs SM90"})
    record.sparse(stats(), OUT, 0, 0)
    sealed = record.seal("finished")
    assert sealed["cast_from"] == {"float16": 1}
    assert sealed["declined_backends"] == {"sm90": "needs SM90"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sparse_counts_non_finite_output_by_step_and_layer(value):
    record = recorder()
    bad = OUT.clone()
    bad[0, 5, 0, 2] = value
    record.sparse(stats(), OUT, 0, 0)
    record.sparse(stats(), bad, 1, 2)
    record.sparse(stats(), bad, 1, 2)
    assert record.seal("finished")["nonfinite"] == [{"step": 1, "layer": 2, "calls": 2}]


def test_sparse_opposite_infinities_are_non_finite():
    bad = OUT.clone()
    bad[0, 0, 0, 0], bad[0, 1, 0, 0] = math.inf, -math.inf
    record = recorder()
    record.sparse(stats(), bad, 0, 0)
    assert record.seal("finished")["nonfinite"] == [{"step": 0, "layer": 0, "calls": 1}]


def test_sparse_large_finite_half_output_is_finite():
    record = recorder()
    record.sparse(stats(), torch.full((1, 64, 4, 128), 60000.0, dtype=torch.float16), 0, 0)
    assert record.seal("finished")["nonfinite"] == []


def test_sparse_check_finite_off_counts_nothing():
    record = recorder(check_finite=False)
    record.sparse(stats(), torch.full_like(OUT, math.nan), 0, 0)
    assert record.seal("finished")["nonfinite"] == []


def test_seal_no_calls():
    sealed = recorder().seal("failed", "ValueError: x")
    assert sealed["self_attention_calls"] == sealed["forwards"] == 0
    assert sealed["density"] is None
    assert sealed["tokens"] is None
    assert sealed["density_by_step"] == [None, None]
    assert sealed["map"] == [[None] * 3] * 2
    assert sealed["error"] == "ValueError: x"
    assert json.loads(json.dumps(sealed)) == sealed
    assert "0 self-attention calls" in summary_line(sealed)


def test_a_run_without_steps_keeps_one_row():
    """An empty schedule has no steps; a run sets one row aside for calls that come all the same."""
    record = recorder(steps=1, blocks=1)
    record.dense("dense last step", 0, 0)
    record.sparse(stats(), OUT, 0, 0)
    sealed = record.seal("finished")
    assert sealed["map"] == [[0.875]]


def test_a_dense_call_of_no_known_block_is_not_drawn():
    record = recorder()
    record.dense("block index unknown", 0, None)
    sealed = record.seal("finished")
    assert sealed["dense_calls"] == {"block index unknown": 1}
    assert sealed["map"][0] == [None, None, None]


def test_evaluations_and_forwards_are_counted_apart():
    """A cache of another node may answer an evaluation without a forward."""
    record = recorder()
    record.evaluation()
    record.evaluation()
    record.forward(256, 1)
    sealed = record.seal("finished")
    assert (sealed["evaluations"], sealed["forwards"]) == (2, 1)


def test_a_step_past_the_last_counts_as_the_last():
    record = recorder()
    record.sparse(stats((4, 4)), OUT, 7, 1)
    record.dense("x", 7, 0)
    assert record.seal("finished")["map"][1] == [1.0, 1.0, None]


def test_seal_is_plain_small_data():
    record = recorder(steps=50, blocks=40)
    for step in range(50):
        for layer in range(40):
            record.sparse(stats(), OUT, step, layer)
    sealed = record.seal("finished")
    text = json.dumps(sealed, allow_nan=False)
    assert json.loads(text) == sealed
    assert len(text) < 40_000
    assert {type(leaf) for leaf in leaves(sealed)} <= {str, int, float, bool, type(None)}
    assert not record._sums, "a sealed recorder must not keep tensors"


def test_seal_is_a_snapshot():
    """A stray call after the end must not change what was reported."""
    record = recorder()
    record.sparse(stats(), OUT, 0, 0)
    record.note_declined({"a": "b"})
    sealed = record.seal("finished")
    before = json.dumps(sealed)
    record.sparse(stats(), OUT, 0, 0)
    record.note_declined({"c": "d"})
    record.dense("late", 0, 0)
    record.other("late")
    record.forward(1, 1)
    record.notes.append("late")
    assert json.dumps(sealed) == before


def test_seal_survives_a_lost_device():
    """After a sticky GPU error the densities can't be fetched; the run's own error must get out."""

    class Lost:
        def cpu(self):
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    record = recorder()
    record.dense("x", 0, 0)
    record._sums["cuda:0"] = Lost()
    sealed = record.seal("failed", "RuntimeError: boom")
    assert sealed["error"] == "RuntimeError: boom"
    assert sealed["notes"] == ["densities are lost: CUDA error: an illegal memory access"]


def test_recorder_is_safe_in_many_threads():
    record = recorder(steps=2, blocks=2)
    threads, rounds = 8, 100
    failures = []
    start = threading.Barrier(threads)

    def work(index):
        try:
            start.wait()
            for _ in range(rounds):
                record.forward(64 + index % 2, 1)
                record.other("cross-attention")
                record.dense(f"reason {index % 2}", 0, index % 2)
                record.sparse(stats((4, 4), precision="fp8"), OUT, 1, 1)
        except Exception as error:  # pragma: no cover
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    total = threads * rounds
    sealed = record.seal("finished")
    assert sealed["forwards"] == sealed["sparse_calls"] == sealed["fp8_calls"] == total
    assert sealed["other_calls"] == {"cross-attention": total}
    assert sealed["dense_calls"] == {"reason 0": total / 2, "reason 1": total / 2}
    assert sealed["tokens"] == [64, 65]
    assert sealed["density"] == 1.0
    assert sealed["density_by_step"] == [None, 1.0]


def test_outliving_without_comfyui_does_nothing():
    with outliving():
        pass


def test_outliving_pauses_the_malloc_graph_where_there_is_one(monkeypatch):
    events = []

    @contextmanager
    def pause_malloc_graph():
        events.append("paused")
        yield
        events.append("resumed")

    prefetch = ModuleType("comfy.model_prefetch")
    prefetch.pause_malloc_graph = pause_malloc_graph
    monkeypatch.setitem(sys.modules, "comfy", ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    record = recorder()
    record.sparse(stats(), OUT, 0, 0)
    record.sparse(stats(), OUT, 0, 0)
    assert events == ["paused", "resumed"], "once, where the sums are allocated"


def test_summary_line_says_it_all():
    record = recorder()
    record.forward(256, 1)
    record.dense("dense step", 0, 0)
    record.dense("dense step", 0, 1)
    record.dense("attention mask", 1, 0)
    record.sparse(stats((1, 1), precision="fp8"), OUT, 1, 1)
    line = summary_line(record.seal("finished"))
    assert line.startswith(
        "finished: 4 self-attention calls, 1 sparse (1 FP8), 3 dense (2 x dense step, "
        "1 x attention mask), density 25.0%; 256 tokens, backend reference, "
    )
    assert "\n" not in line


def test_summary_line_all_dense():
    record = recorder()
    record.forward(135, 1)
    record.dense("135 tokens < min_tokens 8192", 0, 0)
    line = summary_line(record.seal("interrupted"))
    assert line.startswith(
        "interrupted: 1 self-attention calls, 0 sparse, 1 dense (1 x 135 tokens < min_tokens 8192); "
        "135 tokens, backend none, "
    )
