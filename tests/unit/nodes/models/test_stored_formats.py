"""In which form a file keeps its weights; every file here is written by the test."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hopper_sol.nodes.models.checkpoint import inspect_checkpoint
from hopper_sol.nodes.models.stored_formats import wan_layers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIM, FFN = 128, 192
PARTS = (*(f"{a}.{n}" for a in ("self_attn", "cross_attn") for n in "qkvo"), "ffn.0", "ffn.2")
LAYERS = [f"blocks.{block}.{part}" for block in (0, 1) for part in PARTS]
Q = "blocks.0.self_attn.q"


def text(value):
    value = value if isinstance(value, str) else json.dumps(value)
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def wan(dtype, prefix=""):
    """A Wan file of two blocks whose Linears are ``dtype``."""
    shapes = {"ffn.0": (FFN, DIM), "ffn.2": (DIM, FFN)}
    tensors = {
        "patch_embedding.weight": torch.zeros(DIM, 16, 1, 2, 2, dtype=torch.bfloat16),
        "head.head.weight": torch.zeros(64, DIM, dtype=torch.bfloat16),
        "head.modulation": torch.zeros(1, 2, DIM),
    }
    for layer in LAYERS:
        shape = shapes.get(layer.split(".", 2)[2], (DIM, DIM))
        tensors[f"{layer}.weight"] = torch.zeros(shape).to(dtype)
        tensors[f"blocks.{layer[7]}.modulation"] = torch.zeros(1, 6, DIM)
    return {prefix + key: tensor for key, tensor in tensors.items()}


@pytest.fixture
def stored(tmp_path):
    """The StoredFormat of a file that holds ``tensors``."""

    def stored(tensors, metadata=None):
        save_file(tensors, tmp_path / "m.safetensors", metadata)
        return inspect_checkpoint(str(tmp_path / "m.safetensors")).weights.format

    return stored


def refused(stored, tensors, metadata=None):
    with pytest.raises(
        ValueError, match=r"m\.safetensors: got a (.*) quantised checkpoint"
    ) as error:
        stored(tensors, metadata)
    return str(error.value).partition("got a ")[2].partition(" quantised checkpoint")[0]


def with_scales(prefix="", shape=(), end="weight_scale", dtype=E4M3, conf="float8_e4m3fn"):
    tensors = wan(dtype, prefix)
    for layer in LAYERS:
        tensors[f"{prefix}{layer}.{end}"] = torch.ones(shape)
        if conf is not None:
            tensors[f"{prefix}{layer}.comfy_quant"] = text({"format": conf})
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain(stored, dtype):
    form = stored(wan(dtype))
    assert (form.name, form.scales, form.extras, form.rows) == ("plain", {}, frozenset(), False)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_raw_fp8(stored, dtype):
    assert stored(wan(dtype)).name == "raw FP8"


def test_one_fp8_linear_among_others_is_enough(stored):
    tensors = wan(torch.bfloat16)
    tensors["blocks.1.ffn.2.weight"] = tensors["blocks.1.ffn.2.weight"].to(E4M3)
    assert stored(tensors).name == "raw FP8"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scaled_fp8(stored, prefix, shape):
    tensors = with_scales(prefix, shape, "scale_weight", conf=None)
    tensors[f"{prefix}{Q}.scale_input"] = torch.ones(())
    tensors[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    form = stored(tensors)
    assert form.name == "scaled FP8" and not form.rows
    assert form.scales == {layer: f"{prefix}{layer}.scale_weight" for layer in LAYERS}
    extras = {f"{prefix}{Q}.scale_input", f"{prefix}scaled_fp8"}
    assert form.extras == {*form.scales.values(), *extras}


@pytest.mark.parametrize("prefix", ["", "net."])
@pytest.mark.parametrize(("conf", "dtype"), [("float8_e4m3fn", E4M3), ("float8_e5m2", E5M2)])
def test_comfy_quant(stored, prefix, conf, dtype):
    tensors = with_scales(prefix, dtype=dtype, conf=conf)
    tensors[f"{prefix}{Q}.input_scale"] = torch.ones(())
    form = stored(tensors)
    assert form.name == "comfy_quant FP8" and not form.rows
    assert form.scales == {layer: f"{prefix}{layer}.weight_scale" for layer in LAYERS}
    assert form.extras == {k for k in tensors if k.endswith(("_scale", "comfy_quant"))}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("named", ["", "model.diffusion_model."])
def test_comfy_quant_in_metadata(stored, prefix, named):
    """Layers are named with or without what stands before them in the file."""
    tensors = with_scales(prefix, conf=None)
    named = named if prefix else ""
    conf = {"layers": {f"{named}{layer}": {"format": "float8_e4m3fn"} for layer in LAYERS}}
    form = stored(tensors, {"_quantization_metadata": json.dumps(conf)})
    assert form.name == "comfy_quant FP8" and form.scales.keys() == set(LAYERS)


@pytest.mark.parametrize("conf", ["float8_e4m3fn", "float8_e4m3fn_rows"])
def test_scales_of_rows(stored, conf):
    tensors = with_scales(conf=conf)
    tensors["blocks.0.ffn.0.weight_scale"] = torch.ones(FFN, 1)
    assert stored(tensors).rows
    tensors["blocks.0.ffn.0.weight_scale"] = torch.ones(FFN)
    assert stored(tensors).rows
    assert stored(with_scales(conf="float8_e4m3fn_rows")).rows


def test_a_layer_that_is_described_and_not_there_is_no_layer(stored):
    tensors = with_scales()
    tensors["vae.x.comfy_quant"] = text({"format": "float8_e4m3fn"})
    assert stored(tensors).scales.keys() == set(LAYERS)


@pytest.mark.parametrize("conf", ["nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", None])
def test_other_formats_are_named(stored, conf):
    tensors = with_scales()
    tensors[f"{Q}.comfy_quant"] = text({"format": conf})
    assert refused(stored, tensors) == f"comfy_quant {conf}"


@pytest.mark.parametrize("shape", [(FFN, 2), (FFN, 2, 1), (2,)])
def test_block_wise_scales(stored, shape):
    tensors = with_scales()
    tensors["blocks.0.ffn.0.weight_scale"] = torch.ones(shape)
    assert refused(stored, tensors) == f"block-wise scaled (scales {shape} for {FFN} rows)"


def test_smoothing_factors(stored):
    tensors = with_scales()
    tensors[f"{Q}.pre_quant_scale"] = torch.ones(DIM)
    assert refused(stored, tensors) == "comfy_quant (with smoothing factors)"


def test_scales_beside_other_weights(stored):
    tensors = with_scales()
    tensors[f"{Q}.weight"] = torch.zeros(DIM, DIM, dtype=torch.bfloat16)
    assert refused(stored, tensors) == "scaled BF16"


@pytest.mark.parametrize("broken", ["{", "[1, 2]", "3"])
def test_unreadable_settings(stored, broken):
    tensors = with_scales()
    tensors[f"{Q}.comfy_quant"] = text(broken)
    assert refused(stored, tensors).startswith("comfy_quant (unreadable: ")
    plain = with_scales(conf=None)
    assert refused(stored, plain, {"_quantization_metadata": broken}).startswith("comfy_quant (")


def test_settings_that_name_no_layer(stored):
    """The file says it is quantised, and not how."""
    said = refused(stored, wan(E4M3), {"_quantization_metadata": "{}"})
    assert said == "comfy_quant (it names no layer)"


def test_layers_of_wan():
    keys = [f"p.{layer}.{end}" for layer in LAYERS for end in ("weight", "bias")]
    others = (
        "blocks.0.cross_attn.k_img.weight",
        "blocks.0.norm3.weight",
        "blocks.0.self_attn.norm_q.weight",
        "vace_blocks.0.self_attn.q.weight",
        "x.blocks.0.self_attn.q.weight",
        "text_embedding.0.weight",
        "head.head.weight",
        "blocks.0.ffn.1.weight",
    )
    found = wan_layers([*keys, *(f"p.{key}" for key in others), f"{Q}.weight"], "p.")
    assert found.compute == {*LAYERS, "blocks.0.cross_attn.k_img"} and found.store == frozenset()
