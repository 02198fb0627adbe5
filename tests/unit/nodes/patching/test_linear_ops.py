"""The Linear of models that are loaded in FP8, without ComfyUI: what it keeps, moves and puts back.

How it computes under ComfyUI's loading, LoRAs and offloading is in tests/comfy/test_fp8_load.py.
"""

import json
import sys
from types import ModuleType

import pytest
import torch

from hopper_sol.kernels import quantize_rowwise
from hopper_sol.nodes.patching import linear_ops, linear_rows
from hopper_sol.nodes.patching.linear_deferred import Marked
from hopper_sol.nodes.patching.linear_ops import (
    COMPUTE,
    STORE,
    FP8Weights,
    fp8_operations,
    fp8_rows,
)
from hopper_sol.nodes.patching.linear_run import LinearRun, counting

E4M3 = torch.float8_e4m3fn
N, K = 32, 48


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class ComfyLinear(torch.nn.Linear):
    """ComfyUI's own, up to 0.3.75."""

    weight_function = ()


@pytest.fixture
def comfy(monkeypatch):
    """ComfyUI up to 0.3.75, as far as a Linear sees it: moves a weight and applies what is on it."""
    ops = ModuleType("comfy.ops")

    def cast_bias_weight(module, dtype, device, bias_dtype):
        weight = module.weight.to(device, dtype)
        for function in module.weight_function:
            weight = function(weight)
        bias = module.bias
        return weight, None if bias is None else bias.to(device, bias_dtype)

    ops.cast_bias_weight = cast_bias_weight
    ops.manual_cast = type("manual_cast", (), {"Linear": ComfyLinear})
    package = ModuleType("comfy")
    package.ops = ops
    monkeypatch.setitem(sys.modules, "comfy", package)
    monkeypatch.setitem(sys.modules, "comfy.ops", ops)
    monkeypatch.setattr(linear_ops.linear_layout, "is_available", lambda: False)
    # Rounds to the nearest; that it is by chance is ComfyUI's affair.
    monkeypatch.setattr(
        linear_rows, "stochastic_codes", lambda values, seed: (values * 1.0).to(E4M3)
    )
    return ops


@pytest.fixture
def make(comfy):
    """A model of layers a (FP8), s (stored in FP8) and p (plain), loaded from ``tensors``."""

    def make(tensors=None, scales=None, assign=False, dtype=torch.bfloat16, **shapes):
        done = []
        weights = FP8Weights(
            {"a": COMPUTE, "s": STORE},
            scales or {},
            torch.device("cpu"),
            {},
            lambda: done.append(1),
        )
        linear = fp8_operations(weights).Linear
        model = torch.nn.Module()
        for name in "asp":
            n, k = shapes.get(name, (N, K))
            model.add_module(name, linear(k, n, dtype=dtype))
        model.missing, model.unexpected = model.load_state_dict(
            state() if tensors is None else tensors, strict=False, assign=assign
        )
        model.done = len(done)
        return model

    return make


def state():
    tensors = {}
    for seed, name in enumerate("asp"):
        tensors[f"{name}.weight"] = normal(N, K, seed=seed).bfloat16()
        tensors[f"{name}.bias"] = normal(N, seed=seed + 9).bfloat16()
    return tensors


def test_what_is_kept(make):
    model, tensors = make(), state()
    assert model.missing == [] and model.unexpected == [] and model.done == 2
    for name in "as":
        layer = getattr(model, name)
        rows, want = fp8_rows(layer), quantize_rowwise(tensors[f"{name}.weight"])
        assert torch.equal(rows.codes.float(), want.codes.float())
        assert torch.equal(rows.scale, want.scale)
        assert layer.weight.dtype == E4M3 and layer.source == "bfloat16"
    assert torch.equal(model.p.weight, tensors["p.weight"]) and fp8_rows(model.p) is None
    assert torch.equal(model.a.bias, tensors["a.bias"])
    assert model.a.computes and not model.s.computes


def test_what_follows_a_layer_is_put_off(comfy):
    """In a run, and for a layer whose product is FP8 as well."""
    weights = FP8Weights(
        {"a": COMPUTE, "s": STORE}, {}, torch.device("cpu"), activations={"a": "gelu", "p": "gelu"}
    )
    model = torch.nn.Module()
    for name in "asp":
        model.add_module(name, fp8_operations(weights).Linear(K, N, dtype=torch.bfloat16))
    model.load_state_dict(state(), strict=False)
    x, run = normal(20, K).bfloat16(), LinearRun()
    with torch.inference_mode():
        want = model.a(x)
        assert type(want) is torch.Tensor
        with counting(run):
            out = model.a(x)
            assert type(out) is Marked and type(model.s(x)) is torch.Tensor
            assert type(model.p(x)) is torch.Tensor
        assert torch.equal(out, want)


def test_no_weight_before_it_is_loaded(comfy):
    """Or the model would exist in its full size for a moment."""
    weights = FP8Weights({}, {}, torch.device("cpu"))
    layer = fp8_operations(weights).Linear(2**20, 2**20, bias=False)
    assert layer.weight is None and list(layer.parameters()) == []


@pytest.mark.parametrize("assign", [False, True])
def test_plain_layers_take_or_copy(make, assign):
    """ComfyUI says which: it streams some models from the file's own memory."""
    tensors = state()
    model = make(tensors, assign=assign)
    assert (model.p.weight.data_ptr() == tensors["p.weight"].data_ptr()) == assign
    assert fp8_rows(model.a) is not None


def test_plain_layers_get_the_models_type(make):
    tensors = {key: tensor.float() for key, tensor in state().items()}
    assert make(tensors).p.weight.dtype == torch.bfloat16


def test_scales_of_the_file(make):
    tensors = state()
    for name in "ap":
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(E4M3)
    model = make(tensors, {"a": torch.tensor(0.5), "p": torch.tensor(0.25)})
    rows = fp8_rows(model.a)
    assert torch.equal(rows.codes.view(torch.uint8), tensors["a.weight"].view(torch.uint8))
    assert torch.equal(rows.scale, torch.full((N, 1), 0.5)) and model.a.source.startswith("scaled")
    assert torch.equal(model.p.weight, (tensors["p.weight"].float() * 0.25).bfloat16())


def test_a_layer_that_fits_no_gemm_stays_plain_unless_it_is_only_stored(make):
    tensors = state()
    for name in "as":
        tensors[f"{name}.weight"] = normal(N, 50).bfloat16()
    model = make(tensors, a=(N, 50), s=(N, 50))
    assert fp8_rows(model.a) is None and fp8_rows(model.s) is not None
    x = normal(3, 50).bfloat16()
    assert model.a(x).shape == model.s(x).shape == (3, N)


def test_missing_and_wrong_weights(make):
    tensors = state()
    del tensors["p.weight"], tensors["a.bias"]
    assert sorted(make(tensors).missing) == ["a.bias", "p.weight"]
    tensors["a.weight"] = torch.zeros(N, K + 16)
    with pytest.raises(RuntimeError, match=r"size mismatch for a\.weight: got \(32, 64\), need"):
        make(tensors)


def test_unexpected_keys_are_told(make):
    assert make({**state(), "a.weight_scale": torch.ones(())}).unexpected == ["a.weight_scale"]


def test_forward(make):
    model, x = make(), normal(20, K).bfloat16()
    want = torch.nn.functional.linear(x, *(state()[f"a.{n}"] for n in ("weight", "bias")))
    error = (model.a(x).float() - want.float()).norm() / want.float().norm()
    assert 0.001 < error < 0.05  # FP8 of both operands was seen to be 3.7 %
    # Stored only: the widened weight, in the model's own product.
    rows = fp8_rows(model.s)
    weight = (rows.codes.float() * rows.scale).bfloat16()
    assert torch.equal(model.s(x), torch.nn.functional.linear(x, weight, model.s.bias))


def test_forward_with_gradients(make):
    model, x = make(), normal(20, K).bfloat16().requires_grad_()
    model.a(x).sum().backward()
    rows = fp8_rows(model.a)
    weight = (rows.codes.float() * rows.scale).bfloat16()
    assert torch.allclose(x.grad, weight.sum(0).expand(20, K), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("cast", [torch.float32, torch.float16, torch.bfloat16])
def test_casting_the_model_leaves_the_rows(make, cast):
    model = make()
    before = fp8_rows(model.a)
    model.to(cast)
    after = fp8_rows(model.a)
    assert after.codes.dtype == E4M3 and after.scale.dtype == torch.float32
    assert torch.equal(after.scale, before.scale)
    assert model.a.bias.dtype == model.p.weight.dtype == cast


def test_moving_the_model_moves_the_rows(make):
    model = make()
    model.to("meta")
    rows = fp8_rows(model.a)
    assert rows.codes.is_meta and rows.scale.is_meta and rows.codes.dtype == E4M3
    assert isinstance(model.a.weight, torch.nn.Parameter)


def merge(layer, change, seed=1):
    """As ComfyUI merges a LoRA: what it saves, then the sum through the layer."""
    saved = layer.weight
    layer.set_weight(layer.convert_weight(layer.weight.float()) + change, seed=seed)
    return saved


def test_a_lora_is_merged_and_taken_out_again(make):
    """ComfyUI puts back the codes it saved; the scales come back with them."""
    model = make()
    before, x = fp8_rows(model.a), normal(20, K).bfloat16()
    out = model.a(x)
    saved = merge(model.a, 10.0 * normal(N, K, seed=5))
    merged = fp8_rows(model.a)
    assert not torch.equal(merged.scale, before.scale) and not torch.equal(model.a(x), out)
    model.a.weight = torch.nn.Parameter(saved, requires_grad=False)
    after = fp8_rows(model.a)
    assert torch.equal(after.codes.float(), before.codes.float())
    assert torch.equal(after.scale, before.scale) and torch.equal(model.a(x), out)


def test_moving_does_not_forget_a_merged_lora(make):
    model = make()
    merge(model.a, 10.0 * normal(N, K, seed=5))
    scale = fp8_rows(model.a).scale
    model.to(torch.float16).to("cpu")
    assert torch.equal(fp8_rows(model.a).scale, scale)


def test_a_merged_lora_is_in_the_numbers(make):
    model, change = make(), 3.0 * normal(N, K, seed=5)
    rows = fp8_rows(model.a)
    want = rows.codes.float() * rows.scale + change
    merge(model.a, change)
    rows = fp8_rows(model.a)
    # Half a step of E4M3 is 2^-4 of a number; below 2^-6 of 448 steps are 2^-9.
    bound = torch.maximum(want.abs() * 2**-4, rows.scale * 2**-10) * 1.001
    assert ((rows.codes.float() * rows.scale - want).abs() <= bound).all()


def test_a_lora_for_one_use(make, comfy):
    """Of a layer off the device: the sum reaches the product and is kept nowhere."""
    model, change, x = make(), 3.0 * normal(N, K, seed=5), normal(20, K).bfloat16()
    before = model.a(x)

    def low_vram_patch(weight):
        return model.a.set_weight(
            model.a.convert_weight(weight.float(), inplace=True) + change, return_weight=True
        )

    model.a.weight_function = [low_vram_patch]
    once = model.a(x)
    model.a.weight_function = []
    assert torch.equal(model.a(x), before)
    merge(model.a, change)
    # Scales come from BF16 sums here and FP32 sums there: 2^-8, and some codes move by a step.
    assert (once - model.a(x)).float().norm() < 0.05 * once.float().norm()
    assert (once - before).float().norm() > 0.5 * before.float().norm()


def test_plain_layers_under_a_lora(make):
    model, change = make(), normal(N, K, seed=5)
    plain = model.p.weight.float()
    assert torch.equal(model.p.convert_weight(plain), plain)
    assert torch.equal(model.p.set_weight(plain + change, return_weight=True), plain + change)
    model.p.set_weight(plain + change)
    assert torch.equal(model.p.weight, (plain + change).bfloat16())


def test_saved_by_comfyui(make):
    """The format's name is one that no other loader takes for its own."""
    saved = make().state_dict()
    assert json.loads(bytes(saved["a.comfy_quant"].tolist())) == {"format": "float8_e4m3fn_rows"}
    assert saved["a.weight"].dtype == E4M3 and saved["a.weight_scale"].shape == (N, 1)
    assert saved.keys() == {
        *(f"{layer}.{end}" for layer in "asp" for end in ("weight", "bias")),
        *(f"{layer}.{end}" for layer in "as" for end in ("weight_scale", "comfy_quant")),
    }


def test_the_gpu_is_full(make, monkeypatch):
    """Then the weight is quantised where it lies."""
    devices = []
    original = linear_ops.row_weight

    def row_weight(weight, scale, device=None):
        devices.append(device)
        if device is not None:
            raise torch.cuda.OutOfMemoryError("no room")
        return original(weight, scale)

    monkeypatch.setattr(linear_ops, "row_weight", row_weight)
    assert fp8_rows(make().a) is not None
    assert devices == [torch.device("cpu"), None] * 2
