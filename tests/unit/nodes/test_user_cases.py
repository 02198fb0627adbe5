"""Cases that users of such nodes have reported, where no other test holds them.

Most of them are behaviours that a test of the module in question holds anyway; CONTRIBUTING has the
list.
"""

import pytest
import torch

from hopper_sol.nodes.patching import run as run_module
from hopper_sol.nodes.patching.steps import StepPolicy


@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0, 12.0])
@pytest.mark.parametrize(
    ("steps", "window", "plan"),
    [
        (4, (0.2, 0.9), "steps 1 dense, 2-4 sparse"),
        (6, (0.2, 0.9), "steps 1-2 dense, 3-6 sparse"),
        (8, (0.2, 0.9), "steps 1-2 dense, 3-8 sparse"),
        (20, (0.22, 0.88), "steps 1-5 dense, 6-18 sparse, 19-20 dense"),
    ],
)
def test_percent_is_not_a_share_of_the_steps_and_the_plan_says_so(shift, steps, window, plan):
    """With few steps a window ending at 0.9 leaves no dense step at the end, whatever the shift.

    Flow matching: sigma = shift t / (1 + (shift - 1) t) for t from 1 to 0 in equal steps, and
    percent p is t = 1 - p. So it is t that decides: of 8 steps, 1 and 0.875 are above 0.8.
    """

    def sigma(t):
        return shift * t / (1 + (shift - 1) * t)

    policy = StepPolicy.resolve(
        [sigma(1 - step / steps) for step in range(steps)] + [0.0],
        dense_steps=0,
        dense_last_steps=0,
        sigma_start=sigma(1 - window[0]),
        sigma_end=sigma(1 - window[1]),
    )
    assert policy.describe() == plan


def test_out_of_memory_in_our_path_falls_back_and_says_so(make_sampler, monkeypatch):
    """The run goes on with ComfyUI's attention, and the report says what happened."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 6.24 GiB")

    monkeypatch.setattr(run_module, "sol_attention", full)
    sampler = make_sampler()
    sampler.run()
    report = sampler.report
    calls = 4 * sampler.adapter.num_blocks  # 4 steps
    assert report["status"] == "finished" and report["sparse_calls"] == 0
    assert report["self_attention_calls"] == sum(report["dense_calls"].values()) == calls
    assert any("6.24 GiB" in note for note in report["notes"])
    # As many cross-attention calls, which were never ours.
    assert len(sampler.func.calls) == 2 * calls


def test_a_closed_window_is_the_same_as_no_node(make_sampler):
    """To tell our faults from others': every call goes through with the very objects handed in."""
    # One point of the schedule, at which no step of this run lies.
    sampler = make_sampler(start_percent=0.6, end_percent=0.6)
    tensors = []

    def model(options):
        for index in range(sampler.adapter.num_blocks):
            options["block_index"] = index
            q = torch.randn(1, 315, 256)
            out = sampler.attend(q, q, q, 2, transformer_options=options)
            tensors.append((q, out))

    sampler.run(lambda: [sampler.forward(sigma, model) for sigma in sampler.sigmas[:-1]])
    assert sampler.report["sparse_calls"] == 0
    assert set(sampler.report["dense_calls"]) == {"outside start/end percent"}
    assert len(sampler.func.calls) == len(tensors) == 16
    for (q, out), (args, _, result) in zip(tensors, sampler.func.calls, strict=True):
        assert all(x is q for x in args[:3])
        assert out is result
