"""One model's runtime: which runs leave which records, with one of our nodes or both."""

import copy
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import LinearLayer
from hopper_sol.nodes.patching import linear_run
from hopper_sol.nodes.patching import runtime as runtime_module
from hopper_sol.nodes.patching.linear import LinearSettings
from hopper_sol.nodes.patching.linear_weight import weight_function
from hopper_sol.nodes.patching.plan import FP8LinearRequest
from hopper_sol.nodes.patching.runtime import BYPASSED, AccelerationRuntime

SIGMAS = torch.tensor([1.0, 0.5, 0.25, 0.0])
LAYER = LinearLayer("blocks.0.ffn.0", 0, "ffn")
SETTINGS = LinearSettings(
    request=FP8LinearRequest(),
    converted=((LAYER, None),),
    formats=(("bfloat16", 1),),
    skipped=(),
    notes=("a note",),
)


def call_linear(times=1, rows=20):
    weight = weight_function(None)(torch.ones(32, 48))
    for _ in range(times):
        torch.nn.functional.linear(torch.ones(rows, 48), weight)


@pytest.fixture
def make(make_adapter):
    """Factory of runtimes with FP8 Linear alone."""
    return lambda **changes: AccelerationRuntime(make_adapter(), None, replace(SETTINGS, **changes))


@pytest.fixture
def sample(executor):
    """Run ``body`` as a sampler; the last record."""

    def run(runtime, body, guider=None):
        latent = torch.zeros(1, 4, 2, 2, 2)
        chain = executor(lambda *args, **kwargs: body() or latent, guider)
        runtime.outer_sample(chain, latent, latent, "sampler", SIGMAS, None, None, True, 0)
        return runtime.history.records[-1]

    return run


def test_linear_alone_leaves_a_record(make, sample):
    record = sample(make(), lambda: call_linear(3))
    assert record["status"] == "finished" and record["error"] is None and record["steps"] == 3
    assert record["model"] == "Fake t2v (4 blocks, 2 heads)"
    assert record["settings"] is None and record["plan"] is None
    assert record["self_attention_calls"] == 0 and record["density"] is None
    linear = record["linear"]
    assert (linear["converted"], linear["calls"], linear["fp8_calls"]) == (1, 3, 3)
    assert linear["converted_layers"] == {"ffn.0": "0"} and linear["formats"] == {"bfloat16": 1}
    assert linear["notes"] == ["a note"]
    assert json.loads(json.dumps(record)) == record


def test_runs_count_for_themselves(make, sample):
    runtime = make()
    counts = [sample(runtime, lambda n=n: call_linear(n))["linear"]["calls"] for n in (2, 5, 1)]
    assert counts == [2, 5, 1] and len(runtime.history) == 3
    assert linear_run._runs == []


def test_a_failed_run_is_recorded_and_raises(make, sample, interrupt):
    runtime = make()

    def fail(error):
        call_linear(2)
        raise error

    for error, status, words in (
        (ValueError("boom"), "failed", "ValueError: boom"),
        (interrupt(), "interrupted", None),
    ):
        with pytest.raises(type(error)):
            sample(runtime, lambda error=error: fail(error))
        record = runtime.history.records[-1]
        assert (record["status"], record["error"]) == (status, words)
        assert record["linear"]["calls"] == 2 and BYPASSED not in record["linear"]["notes"]
    assert linear_run._runs == []


def test_a_run_that_calls_nothing_is_noted(make, sample):
    assert sample(make(), lambda: None)["linear"]["notes"] == ["a note", BYPASSED]
    record = sample(make(), lambda: call_linear(rows=3))
    assert record["linear"]["fallbacks"] == {"fewer than 16 rows": 1}
    assert BYPASSED not in record["linear"]["notes"]


def test_a_run_that_ends_before_its_first_call_is_no_bypass(make, sample):
    runtime = make()

    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        sample(runtime, fail)
    assert runtime.history.records[-1]["linear"]["notes"] == ["a note"]


def test_the_log_has_one_line(make, sample, caplog):
    caplog.set_level(logging.INFO, logger="hopper_sol")
    sample(make(), call_linear)
    assert [r.getMessage() for r in caplog.records] == [
        "FP8 Linear: 1 Linears converted, 1 calls, 1 FP8, 0 not; backend torch"
    ]


def test_without_sol_attention_nothing_is_done_to_the_options(make, sample):
    """No override, no block index, no sigma: the guider is not even looked at."""
    runtime = make()
    sample(runtime, call_linear, guider=None)
    runtime.prepare_state(None, SIGMAS)
    options = {}
    runtime.apply_model(lambda *args, **kwargs: None, SIGMAS, None, None, None, None, options)
    assert options == {}


def test_both_nodes_leave_one_record(make_sampler):
    sampler = make_sampler()
    sampler.runtime.linear = SETTINGS

    def body():
        call_linear(2)
        sampler.euler()

    sampler.run(body)
    (record,) = sampler.runtime.history.records
    assert record["sparse_calls"] == 16 and record["linear"]["fp8_calls"] == 2
    assert record["settings"] is not None


def test_sol_attention_alone_has_no_linear_section(make_sampler):
    sampler = make_sampler()
    sampler.run()
    assert sampler.report["linear"] is None


def test_notes_of_the_override_are_in_the_record(make_sampler):
    """It is taken off before the record is sealed."""
    sampler = make_sampler()

    def body():
        sampler.euler()
        sampler.guider.model_options["transformer_options"]["optimized_attention_override"] = print

    sampler.run(body)
    assert any("override was replaced during the run" in note for note in sampler.report["notes"])


def test_weights_loaded_sorts(make, monkeypatch):
    seen = []
    monkeypatch.setattr(runtime_module, "sort_weight_functions", lambda *args: seen.append(args))
    runtime, patcher = make(), SimpleNamespace()
    runtime.weights_loaded(patcher)
    runtime.weights_loaded(patcher, "cuda", 0, False, True)  # ON_LOAD's further arguments
    assert seen == [(patcher, SETTINGS)] * 2


def test_deepcopy_is_itself(make):
    runtime = make()
    assert copy.deepcopy({"a": [runtime]})["a"][0] is runtime
