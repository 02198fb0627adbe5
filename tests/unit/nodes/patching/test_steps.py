"""Which steps of a schedule are dense."""

import math

import pytest

from hopper_sol.nodes.patching.steps import (
    DENSE_LAST_STEP,
    DENSE_STEP,
    OUTSIDE_WINDOW,
    StepPolicy,
    automatic_dense_steps,
)

EIGHT = tuple(1 - i / 8 for i in range(9))


def policy(sigmas, first=0, last=0, start=math.inf, end=0.0, noise=0.0):
    return StepPolicy.resolve(
        sigmas,
        dense_steps=first,
        dense_last_steps=last,
        sigma_start=start,
        sigma_end=end,
        sigma_noise=noise,
    )


def reasons(steps):
    return [steps.why_dense(sigma) for sigma in steps.sigmas[:-1]]


def dense_and_sparse(steps):
    return "".join("d" if reason else "s" for reason in reasons(steps))


@pytest.mark.parametrize(
    ("total", "dense"),
    [(0, 1), (1, 1), (4, 1), (5, 1), (6, 2), (8, 2), (10, 2), (11, 3), (20, 4), (30, 6), (50, 10)],
)
def test_automatic_dense_steps_table(total, dense):
    assert automatic_dense_steps(total) == dense


@pytest.mark.parametrize("total", range(1, 51))
def test_automatic_dense_steps_is_a_fifth_rounded_up(total):
    dense = automatic_dense_steps(total)
    assert isinstance(dense, int)
    assert dense >= 1
    assert total / 5 <= dense < total / 5 + 1


def test_index_euler():
    steps = policy(EIGHT)
    assert [steps.index(sigma) for sigma in EIGHT[:-1]] == list(range(8))


def test_index_tolerates_float32_rounding():
    """ComfyUI hands the sigma of an evaluation through a float32 tensor."""
    steps = policy(EIGHT)
    for step, sigma in enumerate(EIGHT[:-1]):
        assert steps.index(sigma + 5e-7) == step
        assert steps.index(sigma - 5e-7) == step


def test_index_heun_counts_both_evaluations_of_a_step():
    """heun evaluates at sigma and again at the next sigma; that one opens the next step."""
    sigmas = (1.0, 0.7, 0.4, 0.1, 0.0)
    evaluations = (1.0, 0.7, 0.7, 0.4, 0.4, 0.1, 0.1)
    assert [policy(sigmas).index(sigma) for sigma in evaluations] == [0, 1, 1, 2, 2, 3, 3]


def test_index_between_two_sigmas_belongs_to_the_step_that_began():
    """dpm_2 and dpmpp_2s_ancestral evaluate at sigmas that are not in the schedule."""
    steps = policy((1.0, 0.7, 0.4, 0.1, 0.0))
    assert [steps.index(sigma) for sigma in (0.85, 0.71, 0.55, 0.41, 0.2, 0.05)] == [
        0, 0, 1, 1, 2, 3,
    ]  # fmt: skip


def test_index_outside_the_schedule_stays_in_range():
    steps = policy((1.0, 0.5, 0.0))
    assert steps.index(5.0) == 0
    assert steps.index(0.0) == 1
    assert steps.index(-1.0) == 1


@pytest.mark.parametrize(
    "sigmas",
    [(), (1.0,), (0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 0.5, 0.5, 0.5, 0.0), (0.0, 0.5, 1.0)],
    ids=["empty", "one", "zeros", "constant", "repeated", "ascending"],
)
@pytest.mark.parametrize("first", [-1, 0, 3])
def test_odd_schedules_never_raise(sigmas, first):
    steps = policy(sigmas, first=first, last=1)
    for sigma in (*sigmas, -1.0, 0.25, 2.0):
        assert 0 <= steps.index(sigma) < max(1, len(sigmas) - 1)
        steps.why_dense(sigma)
    assert isinstance(steps.describe(), str)


def test_total_counts_steps_not_sigmas():
    totals = [policy(sigmas).total for sigmas in [(), (1.0,), (1.0, 0.0), EIGHT]]
    assert totals == [0, 0, 1, 8]


def test_index_repeated_sigmas_take_the_last_of_them():
    assert policy((1.0, 0.5, 0.5, 0.25, 0.0)).index(0.5) == 2


def test_why_dense_every_step():
    steps = policy(EIGHT, first=2, last=3)
    assert reasons(steps) == [DENSE_STEP] * 2 + [None] * 3 + [DENSE_LAST_STEP] * 3


@pytest.mark.parametrize(
    ("first", "last", "pattern"),
    [
        (-1, 0, "ddssssss"),
        (-1, 1, "ddsssssd"),
        (0, 0, "ssssssss"),
        (1, 0, "dsssssss"),
        (0, 1, "sssssssd"),
        (7, 0, "ddddddds"),
        (8, 0, "dddddddd"),
        (1000, 0, "dddddddd"),
        (0, 1000, "dddddddd"),
        (5, 5, "dddddddd"),
        (4, 4, "dddddddd"),
        (4, 3, "ddddsddd"),
    ],
)
def test_why_dense_counts_from_both_ends(first, last, pattern):
    assert dense_and_sparse(policy(EIGHT, first=first, last=last)) == pattern


def test_why_dense_names_the_first_steps_where_both_ends_overlap():
    assert reasons(policy(EIGHT, first=5, last=5)) == [DENSE_STEP] * 5 + [DENSE_LAST_STEP] * 3


def test_why_dense_off_grid_evaluation_follows_its_step():
    """An evaluation half-way through the last dense step is still dense."""
    steps = policy(EIGHT, first=2)
    assert steps.why_dense(0.8125) == DENSE_STEP
    assert steps.why_dense(0.75) is None


@pytest.mark.parametrize(
    ("start", "end", "pattern"),
    [
        (math.inf, 0.0, "ssssssss"),
        (0.75, 0.0, "ddssssss"),
        (math.inf, 0.5, "sssssddd"),
        (0.75, 0.5, "ddsssddd"),
        (0.74, 0.51, "dddsdddd"),
        (0.625, 0.625, "dddsdddd"),
        (0.0, 0.0, "dddddddd"),
    ],
)
def test_why_dense_window_in_sigma_holds_its_edges(start, end, pattern):
    steps = policy(EIGHT, start=start, end=end)
    assert dense_and_sparse(steps) == pattern
    assert set(reasons(steps)) <= {None, OUTSIDE_WINDOW}


def test_why_dense_window_and_steps_add_up():
    steps = policy(EIGHT, first=1, last=1, start=0.75, end=0.25)
    assert reasons(steps) == [
        DENSE_STEP, OUTSIDE_WINDOW, None, None, None, None, None, DENSE_LAST_STEP,
    ]  # fmt: skip


def test_two_stages_count_dense_steps_each_for_itself():
    """Wan 2.2: each sampler sees its own slice of one schedule of 20 steps."""
    twenty = tuple(1 - i / 20 for i in range(21))
    high, low = twenty[:12], twenty[11:]
    assert dense_and_sparse(policy(high, first=-1, noise=0.9)) == "dddssssssss"
    assert dense_and_sparse(policy(low, first=-1, noise=0.9)) == "s" * 9
    assert dense_and_sparse(policy(low, first=2, noise=0.9)) == "ddsssssss"


def test_two_stages_share_a_sigma_window():
    twenty = tuple(1 - i / 20 for i in range(21))
    high, low = twenty[:12], twenty[11:]
    assert dense_and_sparse(policy(high, start=0.8)) == "dddd" + "s" * 7
    assert dense_and_sparse(policy(low, start=0.8)) == "s" * 9


def test_denoise_half_counts_its_own_steps():
    """denoise 0.5 of 10 steps: the last 10 of 20, which continue what the latent holds."""
    sigmas = tuple(1 - i / 20 for i in range(21))[-11:]
    assert dense_and_sparse(policy(sigmas, first=-1, noise=0.9)) == "ssssssssss"
    assert dense_and_sparse(policy(sigmas, first=3, noise=0.9)) == "dddsssssss"


@pytest.mark.parametrize(
    ("top", "continues"), [(1.0, False), (0.9, False), (0.9 - 5e-7, False), (0.899, True)]
)
def test_automatic_dense_steps_belong_to_runs_from_noise(top, continues):
    """From the first tenth of the schedule; what a float32 rounds off does not matter."""
    steps = policy((top, 0.5, 0.25, 0.0), first=-1, noise=0.9)
    assert steps.continues == continues
    assert dense_and_sparse(steps) == ("sss" if continues else "dss")


@pytest.mark.parametrize("first", [0, 1, 3])
def test_explicit_dense_steps_count_wherever_a_run_begins(first):
    steps = policy((0.5, 0.25, 0.1, 0.0), first=first, noise=0.9)
    assert not steps.continues
    assert dense_and_sparse(steps) == "d" * first + "s" * (3 - first)


@pytest.mark.parametrize("sigmas", [(), (1.0,)])
def test_a_run_without_steps_continues_nothing(sigmas):
    assert not policy(sigmas, first=-1, noise=2.0).continues


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (policy(EIGHT, first=-1), "steps 1-2 dense, 3-8 sparse"),
        (policy(EIGHT), "steps 1-8 sparse"),
        (policy(EIGHT, first=1, last=1), "steps 1 dense, 2-7 sparse, 8 dense"),
        (policy(EIGHT, first=99), "steps 1-8 dense"),
        (policy(EIGHT, start=0.75, end=0.5), "steps 1-2 dense, 3-5 sparse, 6-8 dense"),
        (policy((1.0, 0.0)), "step 1 sparse"),
        (policy((1.0, 0.0), first=-1), "step 1 dense"),
        (policy((1.0,)), "no steps"),
        (policy(()), "no steps"),
    ],
)
def test_describe_counts_from_one(steps, text):
    assert steps.describe() == text


def test_resolve_takes_a_tensor():
    import torch

    steps = policy(torch.tensor([1.0, 0.5, 0.0]), first=-1)
    assert steps.sigmas == (1.0, 0.5, 0.0)
    assert all(type(sigma) is float for sigma in steps.sigmas)


def test_window_that_begins_at_a_step_holds_that_step():
    """ComfyUI's sigmas are FP32, the window's ends are not."""
    for start, end in ((EIGHT[2] - 5e-7, 0.0), (math.inf, EIGHT[2] + 5e-7)):
        assert policy(EIGHT, start=start, end=end).why_dense(EIGHT[2]) is None
    for start, end in ((EIGHT[2] - 5e-6, 0.0), (math.inf, EIGHT[2] + 5e-6)):
        assert policy(EIGHT, start=start, end=end).why_dense(EIGHT[2]) == OUTSIDE_WINDOW
