"""Requests become patches on a clone: whichever node comes first, one set of them."""

import sys
import uuid
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import LinearLayer
from hopper_sol.nodes.patching.plan import KEY, FP8LinearRequest, SolAttentionRequest, plan_of

LAYERS = (
    LinearLayer("blocks.0.ffn.0", 0, "ffn"),
    LinearLayer("blocks.1.self_attn.q", 1, "attention"),
)


class Names:
    """comfy.patcher_extension's names of wrapper and callback types."""

    OUTER_SAMPLE, APPLY_MODEL = "outer_sample", "apply_model"
    ON_PREPARE_STATE, ON_LOAD, ON_PRE_RUN = "prepare_state", "load", "pre_run"


class FakePatcher:
    """A ModelPatcher, as far as patches on it go."""

    def __init__(self):
        self.model_options = {"transformer_options": {}}
        self.attachments, self.wrappers, self.callbacks = {}, {}, {}
        self.weight_wrapper_patches = {}
        self.patches_uuid = uuid.UUID(int=1)
        self.linear = SimpleNamespace(
            weight=torch.ones(32, 48), weight_function=[], in_features=48, out_features=32
        )

    def clone(self):
        other = FakePatcher()
        other.model_options = dict(self.model_options)
        other.attachments = dict(self.attachments)
        for kind in ("wrappers", "callbacks"):
            copied = {
                t: {k: list(f) for k, f in by.items()} for t, by in getattr(self, kind).items()
            }
            setattr(other, kind, copied)
        other.weight_wrapper_patches = dict(self.weight_wrapper_patches)
        other.patches_uuid, other.linear = self.patches_uuid, self.linear
        return other

    def get_model_object(self, name):
        return self if name == "diffusion_model" else self.linear

    def set_attachments(self, key, value):
        self.attachments[key] = value

    def add_weight_wrapper(self, name, function):
        self.weight_wrapper_patches[name] = [*self.weight_wrapper_patches.get(name, ()), function]
        self.patches_uuid = uuid.uuid4()

    def add_wrapper_with_key(self, kind, key, function):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(function)

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.get(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind, key, function):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(function)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks.get(kind, {}).pop(key, None)

    def installed(self):
        """Number of our functions by type."""
        both = {**self.wrappers, **self.callbacks}
        return {kind: len(by[KEY]) for kind, by in both.items() if by.get(KEY)}


@pytest.fixture
def apply(monkeypatch, make_adapter):
    for name in ("comfy", "comfy.patcher_extension"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    extension = sys.modules["comfy.patcher_extension"]
    extension.WrappersMP = extension.CallbacksMP = Names
    monkeypatch.delitem(sys.modules, "hopper_sol.nodes.patching.apply", raising=False)
    from hopper_sol.nodes.patching import apply

    adapter = make_adapter(linears=LAYERS)
    monkeypatch.setattr(apply, "find_adapter", lambda model: adapter)
    yield apply
    sys.modules.pop("hopper_sol.nodes.patching.apply", None)


ATTENTION = {"outer_sample": 1, "apply_model": 1, "prepare_state": 1}
LINEAR = {"outer_sample": 1, "load": 1, "pre_run": 1}


def test_sol_attention_alone(apply):
    model = FakePatcher()
    clone = apply.apply_sol_attention(model, SolAttentionRequest())
    assert clone.installed() == ATTENTION and clone.weight_wrapper_patches == {}
    assert clone.patches_uuid == model.patches_uuid  # no weight changes, nothing to load again
    runtime = apply.runtime_of(clone)
    assert runtime.attention is not None and runtime.linear is None


def test_fp8_linear_alone(apply):
    clone = apply.apply_fp8_linear(FakePatcher(), FP8LinearRequest(scope="ffn"))
    assert clone.installed() == LINEAR
    assert list(clone.weight_wrapper_patches) == ["diffusion_model.blocks.0.ffn.0.weight"]
    runtime = apply.runtime_of(clone)
    assert runtime.attention is None and len(runtime.linear.converted) == 1


def test_the_model_that_came_in_is_left_alone(apply):
    model = FakePatcher()
    one = apply.apply_sol_attention(model, SolAttentionRequest())
    before = apply.runtime_of(one)
    apply.apply_fp8_linear(one, FP8LinearRequest())
    apply.apply_fp8_linear(model, FP8LinearRequest())
    assert model.installed() == {} and model.attachments == {} and KEY not in model.model_options
    assert one.installed() == ATTENTION and apply.runtime_of(one) is before
    assert before.linear is None and plan_of(one).linear is None


@pytest.mark.parametrize("first", ["attention", "linear"])
def test_both_in_any_order(apply, first):
    """One set of functions, of a runtime that knows of both; and the same weights."""
    steps = [
        lambda m: apply.apply_sol_attention(m, SolAttentionRequest(tau=1.5)),
        lambda m: apply.apply_fp8_linear(m, FP8LinearRequest()),
    ]
    model = FakePatcher()
    for step in steps if first == "attention" else steps[::-1]:
        model = step(model)
    assert model.installed() == {**ATTENTION, **LINEAR}
    runtime = apply.runtime_of(model)
    assert runtime.attention.request.tau == 1.5 and len(runtime.linear.converted) == 2
    assert plan_of(model).attention.tau == 1.5 and plan_of(model).linear == FP8LinearRequest()
    assert all(len(functions) == 1 for functions in model.weight_wrapper_patches.values())
    alone = apply.apply_fp8_linear(FakePatcher(), FP8LinearRequest())
    assert model.patches_uuid == alone.patches_uuid


def test_functions_belong_to_the_runtime_of_the_clone(apply, monkeypatch):
    model = apply.apply_sol_attention(FakePatcher(), SolAttentionRequest())
    model = apply.apply_fp8_linear(model, FP8LinearRequest())
    runtime, seen = apply.runtime_of(model), []
    for name in ("outer_sample", "apply_model", "prepare_state", "weights_loaded"):
        monkeypatch.setattr(
            type(runtime), name, lambda self, *a, name=name: seen.append((self, name, len(a)))
        )
    model.wrappers["outer_sample"][KEY][0]("executor", 1)
    model.wrappers["apply_model"][KEY][0]("executor")
    model.callbacks["prepare_state"][KEY][0](model, "timestep", "options")
    model.callbacks["load"][KEY][0](model, "cuda", 0, False, True)
    model.callbacks["pre_run"][KEY][0](model)
    assert [name for _, name, _ in seen] == [
        "outer_sample", "apply_model", "prepare_state", "weights_loaded", "weights_loaded",
    ]  # fmt: skip
    assert all(owner is runtime for owner, *_ in seen)


def test_two_of_a_kind(apply):
    model = apply.apply_fp8_linear(FakePatcher(), FP8LinearRequest(scope="ffn"))
    model = apply.apply_sol_attention(model, SolAttentionRequest())
    with pytest.raises(ValueError, match=r"FP8 Linear: .* remove one of the two"):
        apply.apply_fp8_linear(model, FP8LinearRequest(scope="attention"))
    with pytest.raises(ValueError, match=r"Sol Attention: .* remove one of the two"):
        apply.apply_sol_attention(model, SolAttentionRequest())


def test_unknown_family(apply, monkeypatch):
    monkeypatch.setattr(apply, "find_adapter", lambda model: None)
    with pytest.raises(
        ValueError, match=r"^FP8 Linear: got a FakePatcher model, need Wan or MiniMax-H3$"
    ):
        apply.apply_fp8_linear(FakePatcher(), FP8LinearRequest())
    with pytest.raises(
        ValueError, match=r"^Sol Attention: got a FakePatcher model, need Wan or MiniMax-H3$"
    ):
        apply.apply_sol_attention(FakePatcher(), SolAttentionRequest())


def test_runtime_of_nothing(apply):
    assert apply.runtime_of(FakePatcher()) is None and apply.runtime_of(object()) is None
