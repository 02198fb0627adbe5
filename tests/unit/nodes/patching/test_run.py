"""Sampler runs: what is installed, decided, counted, and done when something goes wrong."""

import copy
import dataclasses
import json
import logging
import math
import threading

import pytest
import torch

from hopper_sol.kernels import SolAttnStats, registry, sol_attention
from hopper_sol.kernels.registry import Backend
from hopper_sol.nodes.patching import run as run_module
from hopper_sol.nodes.patching.latent_mark import mark_of
from hopper_sol.nodes.patching.override import OVERRIDE
from hopper_sol.nodes.patching.plan import KEY
from hopper_sol.nodes.patching.run import ForwardInfo

TOKENS = 5 * 7 * 9


def options_of(sampler):
    return sampler.guider.model_options["transformer_options"]


@pytest.fixture
def logs(caplog):
    caplog.set_level(logging.INFO, logger="hopper_sol")
    return lambda level: [r for r in caplog.records if r.levelno == level]


@pytest.fixture
def reference_only(monkeypatch):
    """Leaves the reference as the only backend, so that texts name no other."""
    backend = registry.get("sol_attention", "reference")
    monkeypatch.setattr(registry, "_BACKENDS", {"sol_attention": {"reference": backend}})


@pytest.fixture
def no_block_smoothing(monkeypatch):
    """Leaves one backend, which declines FP8 with block smoothing; the reason it gives."""
    reason = "FP8 with block smoothing is not in this backend"

    def rule(call):
        asked = call.config.precision == "fp8" and call.config.k_smoothing == "block"
        return reason if asked else None

    picky = dataclasses.replace(registry.get("sol_attention", "reference"), rules=(rule,))
    monkeypatch.setattr(registry, "_BACKENDS", {"sol_attention": {"reference": picky}})
    return reason


def broken_kernel(monkeypatch, error, after=0):
    """The public op fails from call ``after`` on; returns the list of attempts."""
    attempts = []

    def broken(*args, **kwargs):
        attempts.append(kwargs["backend"])
        if len(attempts) > after:
            raise error
        return sol_attention(*args, **kwargs)

    monkeypatch.setattr(run_module, "sol_attention", broken)
    return attempts


# -- which calls are sparse --------------------------------------------------------------------


@pytest.mark.parametrize("published", [True, False], ids=["published", "patched"])
def test_run_counts_every_call(published, make_sampler, make_adapter):
    """4 steps of 4 blocks: the first step and the outer layers are dense."""
    adapter = make_adapter(publishes_block_index=published)
    sampler = make_sampler(adapter=adapter, dense_steps=-1, dense_layers="0,-1")
    sampler.run()
    report = sampler.report
    assert report["status"] == "finished"
    assert report["model"] == "Fake t2v (4 blocks, 2 heads)"
    assert report["plan"] == "steps 1 dense, 2-4 sparse; dense layers 0,3"
    assert report["steps"] == report["forwards"] == 4
    assert (report["tokens"], report["batch"]) == (TOKENS, 1)
    assert report["self_attention_calls"] == 16
    assert report["sparse_calls"] == 3 * 2
    assert report["dense_calls"] == {"dense layer": 6, "dense step": 4}
    assert report["other_calls"] == {"cross-attention": 16}
    assert report["notes"] == []
    assert report["map"][0] == [1.0] * 4
    for row in report["map"][1:]:
        assert (row[0], row[3]) == (1.0, 1.0)
        assert 0 < row[1] < 1 and 0 < row[2] < 1
    assert len(sampler.func.calls) == 10 + 16


def test_run_layers_take_their_own_precision(make_sampler):
    sampler = make_sampler(precision="fp8", fp8_layers="1-2")
    sampler.run()
    report = sampler.report
    assert (report["sparse_calls"], report["fp8_calls"]) == (16, 8)
    assert report["precision"] == {"float32": 8, "fp8": 8}
    assert report["cast_from"] == {"float32": 8}


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({"dense_steps": 2}, "ddss"),
        ({"dense_steps": 99}, "dddd"),
        ({"dense_last_steps": 1}, "sssd"),
        ({"dense_steps": 2, "dense_last_steps": 3}, "dddd"),
        ({"start_percent": 0.2}, "dsss"),
        ({"end_percent": 0.6}, "sssd"),
        ({"start_percent": 0.4, "end_percent": 0.4}, "dddd"),
        ({"start_percent": 1.0}, "dddd"),
        ({"end_percent": 0.0}, "dddd"),
    ],
)
def test_run_dense_steps(change, dense, make_sampler):
    sampler = make_sampler(**change)
    sampler.run()
    pattern = ["d" if row == [1.0] * 4 else "s" for row in sampler.report["map"]]
    assert "".join(pattern) == dense
    assert sampler.report["sparse_calls"] == 4 * dense.count("s")


def test_run_heun_counts_steps_not_evaluations(make_sampler):
    sampler = make_sampler(sigmas=(1.0, 0.75, 0.5, 0.25, 0.0), dense_steps=1)
    evaluations = (1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25)
    sampler.run(lambda: [sampler.forward(sigma) for sigma in evaluations])
    assert sampler.report["steps"] == 4
    assert sampler.report["forwards"] == 7
    assert sampler.report["dense_calls"] == {"dense step": 4}
    assert sampler.report["sparse_calls"] == 24


def test_run_min_tokens_says_how_many_there_are(make_sampler, kernel):
    sampler = make_sampler(min_tokens=8192)
    sampler.run()
    assert kernel.calls == []
    assert sampler.report["sparse_calls"] == 0
    assert sampler.report["dense_calls"] == {"315 tokens < min_tokens 8192": 16}


@pytest.mark.parametrize(("min_tokens", "sparse"), [(TOKENS, 4), (TOKENS + 1, 0)])
def test_run_min_tokens_is_inclusive(min_tokens, sparse, make_sampler):
    sampler = make_sampler(min_tokens=min_tokens)
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["sparse_calls"] == sparse


def test_run_unsupported_model_stays_dense(make_sampler, make_adapter, kernel):
    adapter = make_adapter(unsupported="Fake variant X is not supported yet")
    sampler = make_sampler(adapter=adapter)
    sampler.run(lambda: sampler.forward(0.5))
    assert kernel.calls == []
    assert sampler.report["dense_calls"] == {"Fake variant X is not supported yet": 4}


def test_run_unsupported_model_calls_nothing_cross_attention_by_order(
    make_sampler, make_adapter, qkv
):
    """A second call of equal length in one block may be anything at all in a variant."""
    sampler = make_sampler(adapter=make_adapter(unsupported="not yet"))
    q = qkv(TOKENS)[0].flatten(2)

    def inside(options):
        for _ in range(2):
            sampler.attend(q, q, q, heads=2, transformer_options=options)

    sampler.once(inside)
    assert sampler.report["dense_calls"] == {"not yet": 2}
    assert sampler.report["other_calls"] == {}


def test_run_unsupported_model_without_a_block_index(make_sampler, make_adapter):
    adapter = make_adapter(unsupported="not yet", publishes_block_index=False)
    sampler = make_sampler(adapter=adapter)
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["dense_calls"] == {"not yet": 4}
    assert "patches_replace" not in options_of(sampler)


def test_run_latent_that_is_no_video_stays_dense(make_sampler, kernel):
    sampler = make_sampler()
    latent = torch.zeros(1, 4, 7, 9)
    sampler.run(lambda: sampler.forward(0.5, latent=latent), noise=latent)
    assert kernel.calls == []
    assert sampler.report["dense_calls"] == {"the latent has 4 dimensions, need 5": 4}


@pytest.mark.parametrize(
    "sigmas", [(), (1.0,), (0.0, 0.0), (0.5, 0.5, 0.5), (0.0, 0.5, 1.0)], ids=str
)
def test_run_odd_schedules_never_raise(sigmas, make_sampler):
    sampler = make_sampler(sigmas=sigmas)
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["self_attention_calls"] == 4
    json.dumps(sampler.report)


def test_run_without_a_schedule(make_sampler, executor):
    sampler = make_sampler()
    step = executor(lambda *args, **kwargs: sampler.forward(0.5), sampler.guider)
    sampler.runtime.outer_sample(step, sampler.latent)
    assert sampler.report["self_attention_calls"] == 4


# -- runs one after another and inside each other ----------------------------------------------


def test_runs_of_two_stages_are_apart(make_sampler):
    """Wan 2.2: two samplers over one schedule, here with another size in the second."""
    twenty = tuple(1 - i / 20 for i in range(21))
    sampler = make_sampler(dense_steps=-1, sigmas=twenty[:12])
    sampler.run()
    sampler.sigmas = twenty[11:]
    sampler.latent = torch.zeros(1, 4, 2, 8, 8)
    sampler.run()
    high, low = sampler.runtime.history.records
    assert (high["steps"], high["tokens"]) == (11, TOKENS)
    assert (low["steps"], low["tokens"]) == (9, 128)
    assert high["plan"].startswith("steps 1-3 dense, 4-11 sparse")
    assert low["plan"] == (
        "steps 1-9 sparse (begins below full noise: no automatic dense steps); dense layers none"
    )
    assert (high["sparse_calls"], low["sparse_calls"]) == (8 * 4, 9 * 4)


def test_run_denoise_half_counts_its_own_steps(make_sampler):
    sampler = make_sampler(dense_steps=-1, sigmas=tuple(1 - i / 20 for i in range(21))[-11:])
    sampler.run(lambda: None)
    assert sampler.report["plan"].startswith("steps 1-10 sparse (begins below full noise")
    sampler = make_sampler(dense_steps=2, sigmas=sampler.sigmas)
    sampler.run(lambda: None)
    assert sampler.report["plan"] == "steps 1-2 dense, 3-10 sparse; dense layers none"


def test_run_is_kept_with_what_it_made(make_sampler):
    sampler = make_sampler()
    latent = torch.randn(1, 4, 5, 7, 9)
    sampler.run(lambda: latent)
    (run,) = sampler.runtime.history.select(mark_of(latent), "elsewhere").runs
    assert run["made_this_latent"]
    with pytest.raises(RuntimeError):
        sampler.run(broken_body)
    assert not sampler.runtime.history.select(mark_of(latent + 1), "p").runs[-1]["made_this_latent"]


def broken_body():
    raise RuntimeError("the sampler fails")


def test_run_inside_a_run_keeps_its_own_record(make_sampler):
    """A sampler that samples (tiled upscaling, regional samplers) on the same model."""
    sampler = make_sampler()
    outer_override = []

    def body():
        sampler.forward(0.75)
        outer_override.append(options_of(sampler)[OVERRIDE])
        sampler.run(lambda: sampler.forward(1.0), sigmas=(1.0, 0.0))
        assert options_of(sampler)[OVERRIDE] is outer_override[0]
        sampler.forward(0.5)

    sampler.run(body)
    inner, outer = sampler.runtime.history.records
    assert (inner["steps"], inner["forwards"], inner["sparse_calls"]) == (1, 1, 4)
    assert (outer["steps"], outer["forwards"], outer["sparse_calls"]) == (4, 2, 8)
    # The inner run declines cross-attention to the outer one, which must not count it as its own.
    assert inner["other_calls"] == {"cross-attention": 4}
    assert outer["other_calls"] == {"cross-attention": 8, "outside the patched model": 4}
    assert options_of(sampler) == {}
    assert [row != [None] * 4 for row in outer["map"]] == [False, True, True, False]


def test_run_inside_a_run_may_fail(make_sampler):
    sampler = make_sampler()

    def fail():
        raise RuntimeError("inner")

    def body():
        with pytest.raises(RuntimeError, match="inner"):
            sampler.run(fail)
        sampler.forward(0.5)

    sampler.run(body)
    inner, outer = sampler.runtime.history.records
    assert (inner["status"], outer["status"]) == ("failed", "finished")
    assert outer["sparse_calls"] == 4


def test_two_nodes_on_two_models_do_not_mix(make_sampler):
    first, second = make_sampler(), make_sampler(min_tokens=8192)

    def body():
        first.forward(0.5)
        second.run(lambda: second.forward(0.5))
        first.forward(0.25)

    first.run(body)
    assert first.report["sparse_calls"] == 8
    assert second.report["sparse_calls"] == 0
    assert len(first.runtime.history) == len(second.runtime.history) == 1


def test_run_answers_several_threads(make_sampler, qkv):
    """MultiGPU: conditionings of one step run in threads, each with its own options."""
    sampler = make_sampler()
    failures = []
    q, k, v = (x.flatten(2) for x in qkv(TOKENS))

    def model(options):
        for index in range(4):
            options["block_index"] = index
            sampler.attend(q, k, v, heads=2, transformer_options=options)

    def work():
        try:
            sampler.forward(0.5, model)
        except Exception as error:
            failures.append(error)

    def body():
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    sampler.run(body)
    assert not failures
    assert sampler.report["sparse_calls"] == 16
    assert sampler.report["forwards"] == 4


def test_state_is_never_copied(make_sampler):
    """ComfyUI of 2025 deep-copies model options, some packs transformer_options."""
    sampler = make_sampler()
    assert copy.deepcopy({"a": [sampler.runtime]})["a"][0] is sampler.runtime

    def inside(options):
        assert isinstance(options[KEY], ForwardInfo)
        assert copy.deepcopy(options)[KEY] is options[KEY]

    sampler.once(inside)


def test_run_with_deep_copied_options_still_counts(make_sampler):
    sampler = make_sampler()
    sampler.run(
        lambda: sampler.forward(0.5, lambda options: sampler.blocks(copy.deepcopy(options)))
    )
    assert sampler.report["sparse_calls"] == 4


# -- wrappers and callbacks as ComfyUI calls them ----------------------------------------------


def test_outer_sample_hands_everything_through(make_sampler, executor):
    sampler = make_sampler()
    result = object()
    inner = executor(lambda *args, **kwargs: result, sampler.guider)
    noise, sigmas = sampler.latent, torch.tensor(sampler.sigmas)
    args = (noise, noise, "sampler", sigmas, None, None, True, 7)
    assert sampler.runtime.outer_sample(inner, *args, latent_shapes=[1]) is result
    ((got, kwargs),) = inner.calls
    assert [id(x) for x in got] == [id(x) for x in args]
    assert kwargs == {"latent_shapes": [1]}


def test_outer_sample_reads_keywords(make_sampler, executor):
    sampler = make_sampler()
    inner = executor(lambda *args, **kwargs: None, sampler.guider)
    sampler.runtime.outer_sample(
        inner, noise=sampler.latent, latent_image=None, sampler="s", sigmas=torch.ones(3)
    )
    assert sampler.report["steps"] == 2


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_apply_model_publishes_what_holds_for_a_forward(by, make_sampler, executor):
    sampler = make_sampler(dense_steps=1, min_tokens=400)
    options = {"sigmas": 1}
    seen = []

    def body():
        for sigma, grid in ((1.0, (5, 7, 9)), (0.5, (7, 7, 9)), (1.0, (7, 7, 9))):
            sampler.runtime.prepare_state(sampler.patcher, torch.tensor([sigma, sigma]))
            model = executor(lambda *args, **kwargs: dataclasses.replace(options[KEY]), None)
            latent = torch.zeros(2, 4, *grid)
            if by == "position":
                args, kwargs = (latent, None, None, None, None, options), {"extra": 1}
            else:
                args, kwargs = (latent, None), {"transformer_options": options, "extra": 1}
            seen.append(sampler.runtime.apply_model(model, *args, **kwargs))
            assert model.calls[0][0] == args and model.calls[0][1] == kwargs

    sampler.run(body)
    assert [(info.step, info.tokens, info.layout.grid) for info in seen] == [
        (0, 315, (5, 7, 9)),
        (2, 441, (7, 7, 9)),
        (0, 441, (7, 7, 9)),
    ]
    assert [info.why_dense for info in seen] == [
        "315 tokens < min_tokens 400", None, "dense step",
    ]  # fmt: skip
    assert [info.batch for info in seen] == [2, 2, 2]
    # No attention call came by: three evaluations, no forward.
    assert (sampler.report["evaluations"], sampler.report["forwards"]) == (3, 0)
    assert options["sigmas"] == 1


def test_apply_model_outside_a_run_publishes_nothing(make_sampler, executor):
    sampler = make_sampler()
    options = {}
    model = executor(lambda *args: "out", None)
    args = (sampler.latent, None, None, None, None, options)
    assert sampler.runtime.apply_model(model, *args) == "out"
    sampler.runtime.prepare_state(sampler.patcher, torch.tensor([0.5]))
    assert options == {}


def test_apply_model_without_options(make_sampler, executor):
    sampler = make_sampler()
    model = executor(lambda *args, **kwargs: "out", None)
    assert sampler.run(lambda: sampler.runtime.apply_model(model, sampler.latent, None)) == "out"


def test_prepare_state_takes_every_age_of_arguments(make_sampler):
    sampler = make_sampler()
    seen = []

    def body():
        run = sampler.runtime._active[-1]
        seen.append(run.sigma)
        for timestep, rest in (
            (torch.tensor([0.75]), ()),
            (torch.tensor(0.5), ({},)),
            (torch.tensor([[0.25, 0.25]]), ({}, "later")),
        ):
            sampler.runtime.prepare_state(sampler.patcher, timestep, *rest)
            seen.append(run.sigma)

    sampler.run(body)
    assert seen == [1.0, 0.75, 0.5, 0.25]


# -- how a run ends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("too hot"), "failed", "ValueError: too hot"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        ("interrupt", "interrupted", None),
    ],
)
def test_run_that_raises_is_recorded(error, status, text, make_sampler, interrupt):
    error = interrupt() if error == "interrupt" else error
    sampler = make_sampler()

    def body():
        sampler.forward(1.0)
        raise error

    with pytest.raises(type(error)) as caught:
        sampler.run(body)
    assert caught.value is error
    assert (sampler.report["status"], sampler.report["error"]) == (status, text)
    assert sampler.report["sparse_calls"] == 4
    assert sampler.runtime._active == []


def test_run_record_is_json_without_tensors(make_sampler):
    sampler = make_sampler(precision="fp8", min_tokens=0)
    sampler.run()
    text = json.dumps(sampler.report, allow_nan=False)
    assert json.loads(text) == sampler.report
    assert sampler.report["settings"]["token_order"] == "morton_2d"
    assert sampler.report["prompt_id"] is sampler.report["node_id"] is None


def test_run_logs_plan_and_summary(make_sampler, logs):
    sampler = make_sampler(dense_steps=-1)
    sampler.run()
    plan, summary = (record.getMessage() for record in logs(logging.INFO))
    assert "steps 1 dense, 2-4 sparse; dense layers none" in plan
    assert "16 self-attention calls, 12 sparse, 4 dense (4 x dense step)" in summary
    assert logs(logging.WARNING) == []


# -- notes -------------------------------------------------------------------------------------


def test_run_notes_an_override_that_was_never_called(make_sampler):
    sampler = make_sampler()
    sampler.run(lambda: sampler.forward(0.5, lambda options: None))
    (note,) = sampler.report["notes"]
    assert "no self-attention call reached" in note and "bypasses" in note


def test_run_notes_self_attention_that_never_came_by(make_sampler, qkv):
    """NAG and others replace self-attention only; cross-attention still comes by."""
    sampler = make_sampler()
    q = qkv(TOKENS)[0].flatten(2)

    def model(options):
        options["block_index"] = 1
        sampler.attend(q, q[:, :77], q[:, :77], heads=2, transformer_options=options)

    sampler.run(lambda: sampler.forward(0.5, model))
    (note,) = sampler.report["notes"]
    assert "bypasses" in note


def test_run_that_ended_before_its_first_attention_call_blames_nobody(make_sampler):
    sampler = make_sampler()

    def fail(options):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        sampler.run(lambda: sampler.forward(0.5, fail))
    assert sampler.report["notes"] == []


@pytest.mark.parametrize("calls", [0, 4])
def test_run_without_a_bypass_has_no_note(calls, make_sampler):
    """No forward at all (a cached or empty run) is nobody's fault."""
    sampler = make_sampler()
    sampler.run((lambda: sampler.forward(0.5)) if calls else (lambda: None))
    assert sampler.report["notes"] == []
    assert sampler.report["sparse_calls"] == calls


def test_run_repeats_the_notes_of_its_settings(make_sampler):
    sampler = make_sampler(sinks="kv")
    sampler.run(lambda: None)
    assert sampler.report["notes"] == ["sinks kv: Fake has no conditioning tokens in its sequence"]


# -- failing kernels ---------------------------------------------------------------------------


def test_failure_is_computed_again_from_the_original_tensors(make_sampler, qkv, sdpa, monkeypatch):
    """Neither permuted nor converted: the very objects the model handed in."""
    broken_kernel(monkeypatch, RuntimeError("no such instruction"))
    sampler = make_sampler(token_order="morton_3d")
    q, k, v = (x.flatten(2) for x in qkv(TOKENS))
    out = sampler.once(lambda o: sampler.attend(q, k, v, heads=2, transformer_options=o))
    ((args, _, result),) = sampler.func.calls
    assert (args[0] is q, args[1] is k, args[2] is v) == (True, True, True)
    assert out is result
    assert torch.equal(out, sdpa(q, k, v, 2))


def test_failure_switches_the_backend_off_for_the_run(
    make_sampler, qkv, monkeypatch, logs, reference_only
):
    """100 calls: one attempt, one record with the traceback, 100 correct outputs."""
    attempts = broken_kernel(monkeypatch, RuntimeError("no such instruction\nsecond line"))
    sampler = make_sampler()
    q, k, v = (x.flatten(2) for x in qkv(TOKENS))

    def model(options):
        for call in range(100):
            options["block_index"] = call % 4
            sampler.attend(q, k, v, heads=2, transformer_options=options)

    sampler.run(lambda: sampler.forward(0.5, model))
    assert attempts == ["reference"]
    assert len(sampler.func.calls) == 100
    (record,) = logs(logging.ERROR)
    assert "backend 'reference' failed and is off for the rest of this run" in record.getMessage()
    assert "Traceback" in record.getMessage() and "second line" in record.getMessage()
    assert logs(logging.WARNING) == []
    report = sampler.report
    assert report["status"] == "finished"
    assert (report["sparse_calls"], report["self_attention_calls"]) == (0, 100)
    assert report["notes"] == [
        "backend 'reference' failed and was switched off: RuntimeError: no such instruction"
    ]
    assert report["dense_calls"] == {
        "no backend (reference: switched off after it failed)": 99,
        "backend 'reference' failed": 1,
    }
    assert report["declined_backends"] == {"reference": "switched off after it failed"}


def test_failure_in_two_threads_at_once_is_reported_once(make_sampler, logs):
    """Both may have chosen the backend before either of them failed."""
    sampler = make_sampler()

    def body():
        run = sampler.runtime._active[-1]
        for _ in range(2):
            reason = run._failure("sm90", RuntimeError("x"), torch.device("cpu"))
            assert reason == "backend 'sm90' failed"

    sampler.run(body)
    assert len(logs(logging.ERROR)) == len(sampler.report["notes"]) == 1


def test_failure_half_way_keeps_what_was_sparse(make_sampler, monkeypatch):
    attempts = broken_kernel(monkeypatch, torch.OutOfMemoryError("out of memory"), after=6)
    sampler = make_sampler()
    sampler.run()
    assert len(attempts) == 7
    assert sampler.report["sparse_calls"] == 6
    assert sum(sampler.report["dense_calls"].values()) == 10


def test_failure_is_forgotten_by_the_next_run(make_sampler, monkeypatch):
    attempts = broken_kernel(monkeypatch, RuntimeError("once"))
    sampler = make_sampler()
    sampler.run()
    sampler.run()
    assert len(attempts) == 2


def test_failure_goes_to_the_previous_override(make_sampler, monkeypatch, spy):
    broken_kernel(monkeypatch, RuntimeError("boom"))
    previous = spy(lambda func, *args, **kwargs: func(*args, **kwargs))
    sampler = make_sampler(options={"transformer_options": {OVERRIDE: previous}})
    sampler.run(lambda: sampler.forward(0.5))
    assert len(previous.calls) == 8


def test_failure_of_a_long_message_is_cut(make_sampler, monkeypatch):
    broken_kernel(monkeypatch, RuntimeError("x" * 5000))
    sampler = make_sampler()
    sampler.run()
    assert len(sampler.report["notes"][0]) < 300


def test_failure_with_on_decline_error_raises_it(make_sampler, monkeypatch):
    error = RuntimeError("no such instruction")
    broken_kernel(monkeypatch, error)
    sampler = make_sampler(on_decline="error")
    with pytest.raises(RuntimeError) as caught:
        sampler.run()
    assert caught.value is error
    assert sampler.func.calls == []
    assert sampler.report["status"] == "failed"
    assert sampler.report["error"] == "RuntimeError: no such instruction"
    assert options_of(sampler) == {}


@pytest.mark.parametrize("on_decline", ["fallback", "error"])
def test_interrupt_inside_a_kernel_passes_through(on_decline, make_sampler, interrupt, monkeypatch):
    attempts = broken_kernel(monkeypatch, interrupt())
    sampler = make_sampler(on_decline=on_decline)
    with pytest.raises(interrupt):
        sampler.run()
    assert len(attempts) == 1
    assert sampler.report["status"] == "interrupted"
    assert sampler.report["notes"] == []
    assert sampler.func.calls == []


def test_failure_that_breaks_the_gpu_raises(make_sampler, monkeypatch):
    """After a sticky CUDA error every later call fails too; a dense fallback would only hide it."""
    sampler = make_sampler()
    original = RuntimeError("illegal memory access")

    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def body():
        sampler.runtime._active[-1]._failure("sm90", original, torch.device("cuda", 1))

    with pytest.raises(RuntimeError, match="restart ComfyUI") as caught:
        sampler.run(body)
    assert "'sm90'" in str(caught.value)
    assert caught.value.__cause__ is original


def test_failure_that_leaves_the_gpu_well_falls_back(make_sampler, monkeypatch):
    sampler = make_sampler()
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)

    def body():
        run = sampler.runtime._active[-1]
        reason = run._failure("sm90", RuntimeError("x"), torch.device("cuda", 1))
        assert reason == "backend 'sm90' failed"

    sampler.run(body)
    assert asked == [torch.device("cuda", 1)], "the device of the tensors, not the current one"


def nan_kernel(*args, **kwargs):
    out = sol_attention(*args, **kwargs)
    out[0, 17, 1, 5] = math.nan
    return out


@pytest.mark.parametrize("checked", ["1", "0", None])
def test_nonfinite_output_is_counted_with_step_and_layer(checked, make_sampler, monkeypatch, logs):
    if checked is None:
        monkeypatch.delenv("HOPPER_SOL_CHECK_FINITE", raising=False)
    else:
        monkeypatch.setenv("HOPPER_SOL_CHECK_FINITE", checked)
    monkeypatch.setattr(run_module, "sol_attention", nan_kernel)
    sampler = make_sampler(dense_steps=2, dense_layers="0-2")
    sampler.run()
    if checked == "0":
        assert sampler.report["nonfinite"] == []
        assert logs(logging.WARNING) == []
        return
    assert sampler.report["nonfinite"] == [
        {"step": 2, "layer": 3, "calls": 1},
        {"step": 3, "layer": 3, "calls": 1},
    ]
    (warning,) = logs(logging.WARNING)
    assert warning.getMessage() == (
        "Sol Attention: non-finite attention output, first at step 3 layer 3 (2 places)"
    )


# -- nobody can take the call ------------------------------------------------------------------


def test_declined_by_every_backend_runs_dense(make_sampler, kernel, no_block_smoothing):
    sampler = make_sampler(precision="fp8", smoothing="block", fp8_layers="1")
    sampler.run()
    assert sampler.report["dense_calls"] == {f"no backend (reference: {no_block_smoothing})": 4}
    assert sampler.report["declined_backends"] == {"reference": no_block_smoothing}
    assert sampler.report["sparse_calls"] == len(kernel.calls) == 12
    assert sampler.report["notes"] == []


def test_on_decline_error_raises_before_sampling(make_sampler, executor, no_block_smoothing):
    sampler = make_sampler(precision="fp8", smoothing="block", on_decline="error")
    inner = executor(lambda *args: pytest.fail("sampled"), sampler.guider)
    with pytest.raises(RuntimeError) as error:
        sampler.runtime.outer_sample(
            inner, sampler.latent, None, None, torch.tensor(sampler.sigmas)
        )
    assert str(error.value) == (
        f"Sol Attention can't run here: reference: {no_block_smoothing}; "
        "set on_decline to 'fallback' to run dense"
    )
    assert inner.calls == []
    assert options_of(sampler) == {}
    assert sampler.runtime._active == []


def test_on_decline_error_unsupported_model_raises_before_sampling(make_sampler, make_adapter):
    sampler = make_sampler(adapter=make_adapter(unsupported="no variants"), on_decline="error")
    with pytest.raises(RuntimeError, match="can't run here: no variants; set on_decline"):
        sampler.run(lambda: pytest.fail("sampled"))


def test_on_decline_error_head_dim_raises_before_sampling(make_sampler, make_adapter):
    sampler = make_sampler(adapter=make_adapter(head_dim=64), on_decline="error")
    with pytest.raises(RuntimeError, match="can't run here: head_dim 64, need 128; set on_decline"):
        sampler.run(lambda: pytest.fail("sampled"))


def test_on_decline_error_does_not_ask_for_layers_that_stay_dense(make_sampler, no_block_smoothing):
    """The only FP8 layer is dense, so nobody needs what no backend has."""
    sampler = make_sampler(
        precision="fp8", smoothing="block", fp8_layers="1", dense_layers="1", on_decline="error"
    )
    sampler.run()
    assert sampler.report["sparse_calls"] == 12


@pytest.mark.parametrize("change", [{"min_tokens": 8192}, {}], ids=["too-short", "eligible"])
def test_on_decline_error_lets_policy_be_dense(change, make_sampler):
    """Dense steps, dense layers and short sequences are wishes, not failures."""
    sampler = make_sampler(on_decline="error", dense_steps=1, dense_layers="0", **change)
    sampler.run()
    assert sampler.report["status"] == "finished"


def test_on_decline_error_raises_in_the_call_where_it_could_not_be_known(
    make_sampler, no_block_smoothing
):
    sampler = make_sampler(precision="fp8", smoothing="block", fp8_layers="all", on_decline="error")
    image = torch.zeros(1, 4, 7, 9)
    with pytest.raises(RuntimeError, match=r"declined: no backend \(reference: .*on_decline"):
        sampler.run(lambda: sampler.forward(0.5), noise=image)
    assert sampler.func.calls == []
    assert sampler.report["status"] == "failed"


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_on_decline_error_asks_with_the_models_dtype(cast, make_sampler, monkeypatch):
    """The compute dtype of a model whose weights are stored in another one."""
    asked = []
    real = run_module.choose_backend

    def choose_backend(call, *args, **kwargs):
        asked.append(call)
        return real(call, *args, **kwargs)

    monkeypatch.setattr(run_module, "choose_backend", choose_backend)
    sampler = make_sampler(on_decline="error")
    sampler.patcher.model.manual_cast_dtype = cast
    sampler.run(lambda: None)
    assert {call.dtype for call in asked} == {cast or torch.float32}
    assert {call.shape for call in asked} == {(1, TOKENS, 2, 128)}


# -- token order -------------------------------------------------------------------------------


def test_token_order_is_made_once_a_run(make_sampler, monkeypatch):
    made = []
    real = run_module.span_order
    monkeypatch.setattr(run_module, "span_order", lambda *a: made.append(a[1:]) or real(*a))
    sampler = make_sampler(token_order="morton_3d")
    sampler.run()
    assert made == [(0, TOKENS)]


def test_token_order_follows_the_grid(make_sampler, monkeypatch):
    """Same number of tokens, other shape: another order."""
    made = []
    real = run_module.morton_order
    monkeypatch.setattr(
        run_module,
        "morton_order",
        lambda grid, per_frame: made.append((grid, per_frame)) or real(grid, per_frame),
    )
    sampler = make_sampler(token_order="morton_2d")

    def body():
        for grid in ((5, 7, 9), (5, 9, 7), (5, 7, 9)):
            sampler.forward(0.5, latent=torch.zeros(1, 4, *grid))

    sampler.run(body)
    assert made == [((5, 7, 9), True), ((5, 9, 7), True)]


def test_stats_of_the_op_reach_the_report(make_sampler, monkeypatch):
    def op(q, k, v, *, stats: SolAttnStats, **kwargs):
        out = sol_attention(q, k, v, stats=stats, **kwargs)
        stats.backend, stats.cast_from = "sm90", torch.float16
        return out

    monkeypatch.setattr(run_module, "sol_attention", op)
    sampler = make_sampler()
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["backend"] == {"sm90": 4}
    assert sampler.report["cast_from"] == {"float16": 4}


def test_a_preferred_backend_that_declines_is_named(make_sampler, monkeypatch, reference_only):
    """The call runs all the same; the report says who was passed over, and why."""
    preferred = Backend("fast", load=lambda: None, rules=(lambda call: "not on Tuesdays",))
    backends = {"sol_attention": {"fast": preferred, **registry._BACKENDS["sol_attention"]}}
    monkeypatch.setattr(registry, "_BACKENDS", backends)
    sampler = make_sampler()
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["backend"] == {"reference": 4}
    assert sampler.report["declined_backends"] == {"fast": "not on Tuesdays"}


@pytest.mark.parametrize("on_decline", ["fallback", "error"])
def test_device_is_that_of_the_tensors(on_decline, make_sampler, monkeypatch, qkv):
    """With two GPUs in a machine the current one, or the model's, may be the wrong one to ask."""
    asked = []
    real = run_module.device_facts
    monkeypatch.setattr(
        run_module, "device_facts", lambda device: asked.append(device.type) or real("cpu")
    )
    sampler = make_sampler(on_decline=on_decline)
    sampler.patcher.load_device = torch.device("meta")
    q, k, v = (x.flatten(2) for x in qkv(TOKENS))
    sampler.once(lambda o: sampler.attend(q, k, v, heads=2, transformer_options=o))
    before_sampling = ["meta"] if on_decline == "error" else []
    assert asked == [*before_sampling, "cpu"]


def test_on_decline_error_lets_a_run_through_that_has_nothing_to_decline(
    make_sampler, no_block_smoothing
):
    """Every step is dense by request: that no backend has the option does not matter."""
    options = {"smoothing": "block", "precision": "fp8", "fp8_layers": "all"}
    sampler = make_sampler(on_decline="error", dense_steps=4, **options)
    sampler.run()
    assert sampler.report["dense_calls"] == {"dense step": 16}
    with pytest.raises(RuntimeError, match="can't run here"):
        make_sampler(on_decline="error", dense_steps=3, **options).run()
