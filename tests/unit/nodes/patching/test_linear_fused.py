"""Which layers fuse what stands in front of them, and the norms that are put off for that."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hopper_sol.nodes.patching.linear_deferred import NORM, fused_kind
from hopper_sol.nodes.patching.linear_fused import (
    activations,
    defer_norms,
    deferred_norm,
    norms,
)
from hopper_sol.nodes.patching.linear_run import LinearRun, counting

WAN = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "ffn.0", "ffn.2")


def block(index, *parts):
    return [f"blocks.{index}.{part}" for part in parts or WAN]


def test_activations():
    h3 = block(2, "attn.qkv_proj", "mlp.fc1", "mlp.fc2")
    assert activations([*block(0), *block(11), *h3]) == {
        "blocks.0.ffn.0": "gelu",
        "blocks.11.ffn.0": "gelu",
        "blocks.2.mlp.fc1": "swiglu",
    }


def test_only_in_front_of_an_fp8_linear():
    assert activations(block(0, "ffn.0", "mlp.fc1")) == {}
    assert activations(block(0, "ffn.2", "mlp.fc2")) == {}
    assert activations(["blocks.0.ffn.0", "blocks.1.ffn.2"]) == {}
    assert activations(["blocks.0.ffn.0", "vace_blocks.0.ffn.2"]) == {}


def test_norms():
    assert norms([*block(0), *block(3)]) == [
        "blocks.0.norm1", "blocks.0.norm2", "blocks.3.norm1", "blocks.3.norm2",
    ]  # fmt: skip
    # All that read it, or the norm would be computed on top.
    assert norms(block(0, "self_attn.q", "self_attn.k", "ffn.2")) == []
    assert norms(block(0, *WAN[:3])) == ["blocks.0.norm1"]
    assert norms(block(0, "ffn.0")) == ["blocks.0.norm2"]
    assert norms(block(0, "attn.qkv_proj", "mlp.fc1", "mlp.fc2")) == []


class Model:
    """What a ModelPatcher is to ``defer_norms``."""

    def __init__(self, **modules):
        self.modules, self.object_patches = modules, {}

    def get_model_object(self, key):
        if key in self.object_patches:
            return self.object_patches[key]
        try:
            return self.modules[key.rpartition(".")[2]]
        except KeyError as error:
            raise AttributeError(key) from error

    def add_object_patch(self, key, value):
        self.object_patches[key] = value


def layer_norm(**options):
    return torch.nn.LayerNorm(48, eps=1e-3, **{"elementwise_affine": False, **options})


NORM1, NORM2 = "diffusion_model.blocks.0.norm1", "diffusion_model.blocks.0.norm2"


def test_object_patches():
    model = Model(norm1=layer_norm(), norm2=layer_norm())
    defer_norms(model, block(0))
    assert list(model.object_patches) == [NORM1, NORM2]
    for patch in model.object_patches.values():
        assert isinstance(patch, torch.nn.LayerNorm)


@pytest.mark.parametrize("key", [NORM1, f"{NORM1}.forward"])
def test_a_norm_that_another_pack_replaced_is_left_to_it(key):
    model = Model(norm1=layer_norm(), norm2=layer_norm())
    model.object_patches[key] = theirs = object()
    defer_norms(model, block(0))
    assert model.object_patches.pop(key) is theirs
    assert list(model.object_patches) == [NORM2]


def test_models_without_such_norms():
    for model in (Model(), Model(norm1=torch.nn.Identity(), norm2=torch.nn.RMSNorm(48))):
        defer_norms(model, block(0))
        assert model.object_patches == {}


@pytest.mark.parametrize(
    "module",
    [
        layer_norm(elementwise_affine=True),
        torch.nn.LayerNorm((4, 48), elementwise_affine=False),
        torch.nn.RMSNorm(48, elementwise_affine=False),
        torch.nn.Identity(),
        object(),
    ],
)
def test_other_norms(module):
    assert deferred_norm(module) is None


def test_a_norm_that_is_put_off_already_or_computes_by_itself():
    module = layer_norm()
    assert deferred_norm(deferred_norm(module)) is None
    module.forward = lambda x: x
    assert deferred_norm(module) is None


class Own(torch.nn.LayerNorm):
    """A LayerNorm of ComfyUI's, with a forward of its own."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


@pytest.fixture
def run():
    run = LinearRun()
    with torch.inference_mode(), counting(run):
        yield run


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_copy_is_the_norm_but_for_its_class(run):
    module = Own(48, eps=1e-3, elementwise_affine=False)
    deferred = deferred_norm(module)
    assert isinstance(deferred, Own) and type(deferred).__name__ == "Own"
    assert type(module) is Own and deferred.eps == 1e-3
    x, shift, factor = normal(20, 48), normal(1, 48, seed=1), normal(1, 48, seed=2)
    h = torch.addcmul(shift, deferred(x), factor)
    assert fused_kind(h) == NORM
    want = torch.addcmul(shift, F.layer_norm(x, (48,), eps=1e-3), factor)
    assert torch.equal(h, want) and deferred.calls == 1  # by its own forward
    again = copy.deepcopy(deferred)
    assert torch.equal(torch.addcmul(shift, again(x), factor), want)


@pytest.mark.parametrize(
    "x",
    [
        normal(20, 48).double(),
        normal(48),
        normal(20, 48).as_subclass(torch.nn.Parameter),
    ],
    ids=["dtype", "1d", "class"],
)
def test_inputs_that_are_computed_at_once(run, x):
    out = deferred_norm(layer_norm())(x)
    assert type(out) is torch.Tensor and torch.equal(out, F.layer_norm(x, (48,), eps=1e-3))


def test_outside_of_a_run():
    x = normal(20, 48)
    assert type(deferred_norm(layer_norm())(x)) is torch.Tensor
    off = LinearRun()
    off.fuses = False
    with counting(off):
        assert type(deferred_norm(layer_norm())(x)) is torch.Tensor


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_others_see_the_norm(run, before):
    """Registered before or behind us; then the norm is computed at once."""
    module, seen = layer_norm(), []

    def hook(module, args, out):
        seen.append(out.clone())
        return out * 2.0

    if before:
        module.register_forward_hook(hook)
    deferred = deferred_norm(module)
    if not before:
        deferred.register_forward_hook(hook)
    x = normal(20, 48)
    out = deferred(x)
    want = F.layer_norm(x, (48,), eps=1e-3)
    assert torch.equal(seen[0], want) and torch.equal(out, want * 2.0)
    assert type(out) is torch.Tensor


def test_a_hook_that_writes_what_came_in(run):
    def writes(module, args, out):
        args[0].copy_(args[0].flip(0))

    module = layer_norm()
    module.register_forward_hook(writes)
    x = normal(20, 48)
    want = F.layer_norm(x, (48,), eps=1e-3)
    assert torch.equal(deferred_norm(module)(x), want)


def test_compiled(run):
    torch._dynamo.reset()
    deferred = deferred_norm(layer_norm())
    compiled = torch.compile(lambda x: deferred(x) * 2.0, fullgraph=True, backend="eager")
    x = normal(20, 48)
    assert torch.equal(compiled(x), F.layer_norm(x, (48,), eps=1e-3) * 2.0)
    torch._dynamo.reset()
