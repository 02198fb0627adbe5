"""Which Linears are converted, and what is put on a model for it."""

import copy
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import LinearLayer
from hopper_sol.nodes.patching import linear as linear_module
from hopper_sol.nodes.patching import linear_formats
from hopper_sol.nodes.patching.linear import (
    add_weight_functions,
    describe_names,
    resolve_linear,
    skip_patterns,
    sort_weight_functions,
)
from hopper_sol.nodes.patching.linear_weight import is_weight_function
from hopper_sol.nodes.patching.plan import FP8LinearRequest

PARTS = {"self_attn.q": "attention", "cross_attn.k": "attention", "ffn.0": "ffn"}
NAMES = tuple(
    LinearLayer(f"blocks.{b}.{p}", b, role) for b in range(4) for p, role in PARTS.items()
)


class Linear(torch.nn.Linear):
    """ComfyUI's Linear, as far as it matters."""

    def __init__(self, k=48, n=32, dtype=torch.bfloat16):
        super().__init__(k, n, dtype=torch.float32)
        self.weight = torch.nn.Parameter(self.weight.detach().to(dtype), requires_grad=False)
        self.weight_function = []


class FakePatcher:
    """The parts of a ModelPatcher that FP8 Linear uses."""

    def __init__(self, modules):
        self.modules = modules
        self.patches_uuid = uuid.UUID(int=7)
        self.weight_wrapper_patches = {}
        self.object_patches = {}

    def get_model_object(self, name):
        try:
            return self.modules[name]
        except KeyError:
            raise AttributeError(name) from None

    def add_weight_wrapper(self, name, function):
        self.weight_wrapper_patches.setdefault(name, []).append(function)
        self.patches_uuid = uuid.uuid4()

    def add_object_patch(self, name, value):
        self.object_patches[name] = value


@pytest.fixture
def adapter(make_adapter):
    return make_adapter(linears=NAMES)


@pytest.fixture
def patcher():
    return FakePatcher({f"diffusion_model.{layer.name}": Linear() for layer in NAMES})


@pytest.fixture
def resolve(adapter, patcher):
    def run(**inputs):
        return resolve_linear(FP8LinearRequest(**inputs), adapter, patcher)

    return run


def names(settings):
    return [layer.name for layer, _ in settings.converted]


def test_everything_by_default(resolve):
    settings = resolve()
    assert settings.converted == tuple((layer, None) for layer in NAMES)
    assert settings.formats == (("bfloat16", 12),)
    assert settings.skipped == () and settings.notes == ()


@pytest.mark.parametrize(
    ("inputs", "kept", "reason"),
    [
        ({"scope": "attention"}, lambda x: x.role == "attention", "not in scope 'attention'"),
        ({"scope": "ffn"}, lambda x: x.role == "ffn", "not in scope 'ffn'"),
        ({"layers": "0,-1"}, lambda x: x.block in (0, 3), "not in layers '0,-1'"),
        ({"skip": "ffn.0"}, lambda x: x.role != "ffn", "skip pattern 'ffn.0'"),
        ({"skip": " *attn* "}, lambda x: x.role == "ffn", "skip pattern '*attn*'"),
        ({"skip": "blocks.2.*"}, lambda x: x.block != 2, "skip pattern 'blocks.2.*'"),
        (
            {"skip": "diffusion_model.blocks.2.ffn.0.weight"},
            lambda x: x.name != "blocks.2.ffn.0",
            "skip pattern 'blocks.2.ffn.0'",
        ),
    ],
)
def test_choice(resolve, inputs, kept, reason):
    settings = resolve(**inputs)
    assert names(settings) == [x.name for x in NAMES if kept(x)]
    assert settings.skipped == ((reason, tuple(x.name for x in NAMES if not kept(x))),)


def test_choices_are_listed_one_by_one(resolve):
    settings = resolve(scope="attention", layers="1-2", skip="cross_attn.*,ffn.9")
    assert names(settings) == ["blocks.1.self_attn.q", "blocks.2.self_attn.q"]
    assert {reason: len(left) for reason, left in settings.skipped} == {
        "not in scope 'attention'": 4,
        "not in layers '1-2'": 4,
        "skip pattern 'cross_attn.*'": 2,
    }
    assert settings.notes == ("skip pattern 'ffn.9' matches no Linear",)


def test_patterns_match_names_or_their_ends_only(resolve):
    assert len(names(resolve(skip="0, fn.0, attn.q, FFN.0"))) == 8  # "0" ends blocks.N.ffn.0
    assert len(names(resolve(skip="blocks.0"))) == 12


def test_skip_patterns():
    assert skip_patterns(" a , ,b.weight,") == ("a", "b")
    assert skip_patterns("") == skip_patterns(" , ") == ()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"scope": "mlp"}, "scope: got 'mlp', need one of all, attention, ffn"),
        ({"layers": 3}, "layers: got 3, need a text"),
        ({"skip": None}, "skip: got None, need a text"),
        ({"layers": "0-4"}, "layers: got 4 in '0-4', this model has 4 blocks"),
        ({"layers": "x"}, "layers: got 'x'"),
    ],
)
def test_bad_inputs(resolve, inputs, words):
    with pytest.raises(ValueError) as info:
        resolve(**inputs)
    assert words in str(info.value)


def test_nothing_left_is_an_error_that_counts_why(resolve, patcher):
    for index in range(4):
        patcher.modules[f"diffusion_model.blocks.{index}.ffn.0"] = Linear(k=50)
    assert len(names(resolve())) == 8
    with pytest.raises(ValueError) as info:
        resolve(scope="ffn")
    said = str(info.value)
    assert "FP8 Linear: no Linear of this model can be converted" in said
    assert "8 not in scope 'ffn'" in said
    assert "4 needs K and N that are multiples of 16, got K 50, N 32" in said
    assert "widen scope and layers" in said


def test_a_model_without_any(make_adapter, patcher):
    with pytest.raises(ValueError, match=r"Fake t2v .* has none of the Linears of a Fake model"):
        resolve_linear(FP8LinearRequest(), make_adapter(linears=()), patcher)


def test_formats_and_missing_modules(resolve, patcher):
    key = "diffusion_model.blocks.{}.ffn.0".format
    patcher.modules[key(0)] = Linear(dtype=torch.float8_e4m3fn)
    patcher.modules[key(1)] = Linear(dtype=torch.float32)
    patcher.modules[key(2)] = torch.nn.Linear(48, 32)
    del patcher.modules[key(3)]
    settings = resolve()
    assert dict(settings.formats) == {"bfloat16": 8, "raw float8_e4m3fn": 1, "float32": 1}
    assert {layer.name: grid for layer, grid in settings.converted}["blocks.0.ffn.0"] == 1.0
    assert settings.skipped == (
        ("a Linear of another pack, not one of ComfyUI's Linears", ("blocks.2.ffn.0",)),
        ("no module of this name", ("blocks.3.ffn.0",)),
    )
    assert settings.notes == (
        "1 Linears come from raw FP8 weights: what that rounding lost is lost",
    )


def test_ignored_scales_are_refused(resolve, patcher, monkeypatch):
    monkeypatch.setattr(linear_formats, "reads_comfy_quant", lambda: False)
    assert len(names(resolve())) == 12
    for module in patcher.modules.values():
        module.weight.fill_(200.0)
    with pytest.raises(ValueError, match=r"comfy_quant.*does not read.*0\.3\.76 or newer"):
        resolve()


def test_layers_with_a_scale_of_their_own_are_not_suspected(resolve, patcher, monkeypatch):
    monkeypatch.setattr(linear_formats, "reads_comfy_quant", lambda: False)
    for name in patcher.modules:
        module = Linear(dtype=torch.float8_e4m3fn)
        module.weight = torch.nn.Parameter(
            torch.full((32, 48), 448.0).to(torch.float8_e4m3fn), requires_grad=False
        )
        module.scale_weight = torch.tensor(0.01)
        patcher.modules[name] = module
    assert dict(resolve().formats) == {"scaled float8_e4m3fn": 12}


def test_describe_names():
    assert describe_names(x.name for x in NAMES) == dict.fromkeys(PARTS, "0-3")
    assert describe_names(["blocks.7.ffn.0", "blocks.2.a.b", "blocks.1.ffn.0"]) == {
        "ffn.0": "1,7",
        "a.b": "2",
    }


def test_section(resolve):
    section = resolve(scope="ffn", layers="0-1").section()
    assert section["settings"] == {"scope": "ffn", "layers": "0-1", "skip": ""}
    assert section["converted"] == 2 and section["converted_layers"] == {"ffn.0": "0-1"}
    assert section["formats"] == {"bfloat16": 2}
    assert section["skipped"][0] == {
        "reason": "not in scope 'ffn'",
        "count": 8,
        "layers": {"self_attn.q": "0-3", "cross_attn.k": "0-3"},
    }


def test_settings_are_plain_frozen_data(resolve):
    settings = resolve()
    assert copy.deepcopy(settings) == settings and hash(settings) == hash(copy.deepcopy(settings))


# --- what is put on a model


def test_weight_functions_go_on_by_name(resolve, patcher):
    settings = resolve(scope="ffn")
    add_weight_functions(patcher, settings)
    assert sorted(patcher.weight_wrapper_patches) == [
        f"diffusion_model.blocks.{b}.ffn.0.weight" for b in range(4)
    ]
    for functions in patcher.weight_wrapper_patches.values():
        assert len(functions) == 1 and is_weight_function(functions[0])


def test_activations_and_norms_of_the_converted_layers(make_adapter):
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "ffn.0", "ffn.2")
    layers = tuple(
        LinearLayer(
            f"blocks.{block}.{part}", block, part.split(".")[0].replace("self_attn", "attention")
        )
        for block in range(2)
        for part in parts
    )
    modules = {f"diffusion_model.{layer.name}": Linear() for layer in layers}
    for block in range(2):
        for norm in ("norm1", "norm2", "norm3"):
            key = f"diffusion_model.blocks.{block}.{norm}"
            modules[key] = torch.nn.LayerNorm(48, elementwise_affine=False)

    def patched(**inputs):
        model = FakePatcher(modules)
        request = FP8LinearRequest(**inputs)
        add_weight_functions(
            model, resolve_linear(request, make_adapter(linears=layers, num_blocks=2), model)
        )
        ends = {}
        for key, (function,) in model.weight_wrapper_patches.items():
            weight = function(modules[key.removesuffix(".weight")].weight)
            ends[key.split(".", 1)[1].removesuffix(".weight")] = weight.activation
        following = {name: activation for name, activation in ends.items() if activation}
        return following, [key.split(".", 1)[1] for key in model.object_patches]

    gelu = {"blocks.0.ffn.0": "gelu", "blocks.1.ffn.0": "gelu"}
    both = ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"]
    assert patched() == (gelu, both)
    assert patched(scope="ffn") == (gelu, both[1::2])
    assert patched(scope="attention") == ({}, both[::2])
    assert patched(skip="blocks.0.ffn.2") == ({"blocks.1.ffn.0": "gelu"}, both)
    assert patched(skip="*.k") == (gelu, both[1::2])


def test_equal_settings_have_equal_weights(resolve, adapter, patcher):
    """ComfyUI loads the model again when this id changes, and only then."""

    def result(settings, before=7):
        model = FakePatcher(patcher.modules)
        model.patches_uuid = uuid.UUID(int=before)
        add_weight_functions(model, settings)
        return model.patches_uuid

    assert isinstance(result(resolve()), uuid.UUID)
    assert result(resolve()) == result(resolve(skip=" ")) != uuid.UUID(int=7)
    assert result(resolve(scope="ffn")) == result(resolve(skip="*attn*"))
    different = [
        result(resolve()),
        result(resolve(scope="ffn")),
        result(resolve(layers="1")),
        result(resolve(), before=8),
    ]
    grids = resolve()
    grids = replace(grids, converted=tuple((layer, 0.5) for layer, _ in grids.converted))
    different.append(result(grids))
    assert len(set(different)) == len(different)


def test_ours_goes_last(resolve, patcher):
    settings = resolve()
    add_weight_functions(patcher, settings)
    ours = patcher.weight_wrapper_patches["diffusion_model.blocks.0.ffn.0.weight"][0]

    def lora(weight):
        return weight

    def other(weight):
        return weight

    modules = patcher.modules
    modules["diffusion_model.blocks.0.ffn.0"].weight_function = [ours, lora, other]
    modules["diffusion_model.blocks.1.ffn.0"].weight_function = [ours]
    modules["diffusion_model.blocks.2.ffn.0"] = SimpleNamespace()  # replaced by another node
    del modules["diffusion_model.blocks.3.ffn.0"]
    sort_weight_functions(patcher, settings)
    assert modules["diffusion_model.blocks.0.ffn.0"].weight_function == [lora, other, ours]
    assert modules["diffusion_model.blocks.1.ffn.0"].weight_function == [ours]


def test_find_module(patcher):
    assert linear_module.find_module(patcher, "blocks.0.ffn.0").weight_function == []
    assert linear_module.find_module(patcher, "blocks.9.ffn.0") is None
