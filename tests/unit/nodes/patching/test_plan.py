"""The frozen plan that nodes add their requests to."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest

from hopper_sol.nodes.patching.plan import (
    KEY,
    AccelerationPlan,
    FP8LinearRequest,
    SolAttentionRequest,
    plan_of,
)


def test_with_attention_adds_a_request_to_a_new_plan():
    empty = AccelerationPlan()
    request = SolAttentionRequest(tau=1.5)
    plan = empty.with_attention(request)
    assert plan.attention is request
    assert empty.attention is None


def test_with_attention_second_request_raises():
    """Even an equal one: two nodes on one model are a mistake, whatever their values."""
    plan = AccelerationPlan().with_attention(SolAttentionRequest())
    with pytest.raises(ValueError, match="already went through a Sol Attention node; remove one"):
        plan.with_attention(SolAttentionRequest())


def test_plan_is_frozen():
    plan = AccelerationPlan(SolAttentionRequest())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.attention = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.attention.tau = 2.0


def test_plan_deepcopy_is_equal():
    """ComfyUI of 2025 deep-copies model options with every clone."""
    plan = AccelerationPlan(SolAttentionRequest(tau=2.0))
    copied = copy.deepcopy({KEY: plan})[KEY]
    assert copied == plan
    with pytest.raises(ValueError, match="remove one"):
        copied.with_attention(SolAttentionRequest())


def test_plan_of_reads_model_options():
    plan = AccelerationPlan(SolAttentionRequest())
    assert plan_of(SimpleNamespace(model_options={KEY: plan})) is plan
    assert plan_of(SimpleNamespace(model_options={})) == AccelerationPlan()


def test_with_linear_adds_a_request_to_a_new_plan():
    empty, request = AccelerationPlan(), FP8LinearRequest(scope="ffn")
    assert empty.with_linear(request).linear is request and empty.linear is None


def test_with_linear_second_request_raises():
    plan = AccelerationPlan().with_linear(FP8LinearRequest())
    with pytest.raises(ValueError, match="already went through an FP8 Linear node; remove one"):
        plan.with_linear(FP8LinearRequest(scope="ffn"))


def test_the_two_kinds_are_independent():
    attention, linear = SolAttentionRequest(), FP8LinearRequest()
    one = AccelerationPlan().with_attention(attention).with_linear(linear)
    other = AccelerationPlan().with_linear(linear).with_attention(attention)
    assert one == other == AccelerationPlan(attention, linear)
