"""A weight that is FP8 in a Linear and itself everywhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hopper_sol.kernels import fp8_linear, quantize_rowwise
from hopper_sol.nodes.patching.linear_run import LinearRun, counting
from hopper_sol.nodes.patching.linear_weight import (
    FP8Weight,
    is_weight_function,
    weight_function,
)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def weight():
    return normal(32, 48, seed=1)


@pytest.mark.parametrize("grid", [None, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_fp8(weight, dtype, with_bias, grid):
    weight, x = weight.to(dtype), normal(2, 17, 48, dtype=dtype)
    bias = normal(32, dtype=dtype) if with_bias else None
    wrapped = weight_function(grid)(weight)
    want = fp8_linear(x, *quantize_rowwise(weight, grid=grid), bias)
    for out in (F.linear(x, wrapped, bias), F.linear(input=x, weight=wrapped, bias=bias)):
        assert type(out) is torch.Tensor and out.dtype == dtype
        assert torch.equal(out, want)
    assert not torch.equal(want, F.linear(x, weight, bias))


def test_module_forward(weight):
    """As ComfyUI's Linear calls it: positional, bias and all."""
    layer = torch.nn.Linear(48, 32)
    wrapped = weight_function(None)(layer.weight.detach())
    x = normal(20, 48)
    with torch.no_grad():
        out = F.linear(x, wrapped, layer.bias)
    assert torch.equal(out, fp8_linear(x, *quantize_rowwise(layer.weight), layer.bias.detach()))


def test_wrapping_copies_nothing(weight):
    wrapped = weight_function(None)(weight)
    assert isinstance(wrapped, FP8Weight) and wrapped.data_ptr() == weight.data_ptr()
    assert wrapped.shape == weight.shape and wrapped.dtype == weight.dtype


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1.0,
        lambda w: w.t(),
        lambda w: w.float() @ torch.ones(48, 2),
        lambda w: torch.addmm(torch.zeros(32, 2), w, torch.ones(48, 2)),
        lambda w: torch.cat([w, w]),
        lambda w: w.norm(dim=1),
        lambda w: w.to(torch.float16),
        lambda w: w[3:5],
        lambda w: w.narrow(0, 1, 4),
    ],
)
def test_every_other_use_sees_the_weight_itself(weight, use):
    out = use(weight_function(0.5)(weight))
    assert type(out) is torch.Tensor
    assert torch.equal(out, use(weight))


def test_lora_behind_us_is_not_lost_and_stays_fp8(weight):
    """ComfyUI adds a LoRA in place when it moved the layer off the device after loading."""
    wrapped = weight_function(None)(weight.clone())
    delta = normal(32, 48, seed=5)
    wrapped += (0.5 * delta).type(wrapped.dtype)
    x, changed = normal(20, 48), weight + 0.5 * delta
    assert torch.equal(wrapped.as_subclass(torch.Tensor), changed)
    assert torch.equal(F.linear(x, wrapped), fp8_linear(x, *quantize_rowwise(changed)))


def test_lora_out_of_place_is_not_lost(weight):
    x, delta = normal(20, 48), normal(32, 48, seed=5)
    out = F.linear(x, weight_function(None)(weight) + delta)
    assert torch.equal(out, F.linear(x, weight + delta))


@pytest.mark.parametrize(
    "multiply", [lambda w, s: w * s, lambda w, s: w.mul(s), lambda w, s: torch.mul(w, s)]
)
def test_a_stored_scale_keeps_it_fp8(weight, multiply):
    """ComfyUI of 2025 multiplies scaled FP8 weights by their scale, then calls F.linear."""
    scaled = multiply(weight_function(1.0)(weight), torch.tensor(0.01))
    x = normal(20, 48)
    assert torch.equal(F.linear(x, scaled), fp8_linear(x, *quantize_rowwise(weight * 0.01)))


def test_training_gets_the_models_own_linear(weight):
    x = normal(20, 48).requires_grad_()
    out = F.linear(x, weight_function(None)(weight))
    assert torch.equal(out, F.linear(x, weight))
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(20, 48))
    with torch.no_grad():
        assert not torch.equal(F.linear(x, weight_function(None)(weight)), F.linear(x, weight))


def test_other_activations_get_the_models_own_linear(weight):
    """Not even tried: a failure would switch the backend off for the layers that can."""
    x, weight, run = normal(20, 48).double(), weight.double(), LinearRun()
    with counting(run):
        assert torch.equal(F.linear(x, weight_function(None)(weight)), F.linear(x, weight))
    assert run.seal()["calls"] == 0


def test_as_an_activation_it_is_itself(weight):
    other = normal(64, 48, seed=3)
    assert torch.equal(F.linear(weight_function(None)(weight), other), F.linear(weight, other))


def test_functions_are_told_apart_and_survive_deepcopy():
    """Plain functions: ComfyUI of 2025 deep-copies what it finds, and a copy must be as good."""
    ours = weight_function(0.5)
    assert is_weight_function(ours) and is_weight_function(copy.deepcopy(ours))
    assert not is_weight_function(lambda weight: weight) and not is_weight_function(object())
    assert not hasattr(ours, "move_to")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_and_counted_each_time(weight, backend):
    """Different grids are different classes; neither they nor the counts make it compile again."""
    functions = [weight_function(grid) for grid in (None, 0.25, 0.03)]
    graphs = []

    def model(x):
        for function in functions:
            x = x + F.linear(x, function(weight.to(x.dtype, copy=True))).mean()
        return x

    def counting_backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting_backend, dynamic=False)
    x, run = normal(20, 48), LinearRun()
    with torch.inference_mode():
        want = model(x)
        with counting(run):
            outputs = [compiled(x) for _ in range(12)]
    assert all(torch.equal(out, want) for out in outputs)
    assert run.seal()["fp8_calls"] == 36
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_op_is_traceable(weight):
    torch.library.opcheck(
        torch.ops.hopper_sol.patched_linear.default,
        (normal(2, 20, 48), weight, normal(32), None, ""),
        test_utils=("test_schema", "test_faketensor"),
    )
