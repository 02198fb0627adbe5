"""FP8 Linear in real sampler runs of a tiny Wan model: what runs, what is reported, what is left."""

import json
import sys

import pytest
import torch

pytestmark = pytest.mark.comfy

LAYERS = 4
PARTS = (
    *(f"self_attn.{n}" for n in "qkvo"),
    *(f"cross_attn.{n}" for n in "qkvo"),
    "ffn.0",
    "ffn.2",
)
LINEARS = LAYERS * len(PARTS)


def fp8(node="fp8", **inputs):
    return (node, "HopperSolFP8Linear", inputs)


def queue(comfy, patches=(), **options):
    return comfy.queue(comfy.graph(list(patches), **{"steps": 2, "cfg": 1.0, **options}))


def rel_l2(got, want):
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="session")
def plain(comfy):
    """Latent of a run without any node of ours on the model."""
    return queue(comfy, report=False).latent()


@pytest.fixture(scope="session")
def converted(comfy):
    """A run with every Linear in FP8."""
    return queue(comfy, [fp8()])


def test_every_linear_runs_in_fp8(converted, plain):
    run = converted.run()
    linear = run["linear"]
    assert run["status"] == "finished" and run["settings"] is None and run["steps"] == 2
    assert linear["converted"] == LINEARS
    assert linear["converted_layers"] == dict.fromkeys(PARTS, "0-3")
    assert linear["calls"] == linear["fp8_calls"] == 2 * LINEARS
    assert linear["backend"] == {"torch": 2 * LINEARS}
    assert linear["fallbacks"] == {} and linear["skipped"] == [] and linear["notes"] == []
    assert linear["settings"] == {"scope": "all", "layers": "all", "skip": ""}
    assert run["made_this_latent"]
    # One forward of this model was seen to differ by 3 %; two steps of it go into the latent.
    assert 0.001 < rel_l2(converted.latent(), plain) < 0.06


def test_report_text(converted):
    text = converted.text()
    first = text.splitlines()[0]
    assert first.startswith(f"finished: {LINEARS} Linears converted, 80 calls, 80 FP8, 0 not")
    assert "self_attn.q 0-3" in text and "from float32" in text
    assert "attention call" not in text


@pytest.mark.parametrize(
    ("inputs", "parts", "blocks", "reason"),
    [
        ({"scope": "attention"}, PARTS[:8], "0-3", "not in scope 'attention'"),
        ({"scope": "ffn"}, PARTS[8:], "0-3", "not in scope 'ffn'"),
        ({"layers": "1-2"}, PARTS, "1-2", "not in layers '1-2'"),
        ({"layers": "0,-1"}, PARTS, "0,3", "not in layers '0,-1'"),
        ({"skip": "cross_attn.*, ffn.2"}, (*PARTS[:4], "ffn.0"), "0-3", "skip pattern 'ffn.2'"),
    ],
)
def test_choice_of_linears(comfy, inputs, parts, blocks, reason):
    linear = queue(comfy, [fp8(**inputs)], save=False).run()["linear"]
    assert linear["converted_layers"] == dict.fromkeys(parts, blocks)
    assert linear["calls"] == linear["fp8_calls"] == 2 * linear["converted"]
    assert reason in [left["reason"] for left in linear["skipped"]]
    assert linear["converted"] + sum(left["count"] for left in linear["skipped"]) == LINEARS


def test_a_skipped_block_is_bit_equal(comfy, node):
    """What is left out really is: the weight probe sees it, and nothing else."""
    patches = [fp8(layers="2-3", skip="blocks.2.*"), ("look", "ProbeLinears", {"name": "w"})]
    seen = queue(comfy, patches, reads=["w"], save=False).probe()
    assert [path for path, is_fp8, *_ in seen if is_fp8] == [f"3.{part}" for part in PARTS]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"skip": "*"}, ["no Linear of this model can be converted", "40 skip pattern '*'"]),
        ({"layers": "none"}, ["40 not in layers 'none'", "or remove the node"]),
        ({"layers": "0-9"}, ["layers: got 9 in '0-9'", "this model has 4 blocks"]),
        ({"layers": "x"}, ["layers: got 'x'", "inclusive ranges"]),
        ({"scope": "mlp"}, ["mlp"]),
    ],
)
def test_bad_inputs(comfy, inputs, words):
    said = comfy.refused(comfy.graph([fp8(**inputs)]))
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scope", "mlp", "scope: got 'mlp', need one of all, attention, ffn"),
        ("layers", 3, "layers: got 3, need a text"),
        ("skip", 3, "skip: got 3, need a text"),
    ],
)
def test_linked_values_are_checked_too(comfy, node, name, value, words):
    graph = comfy.graph([fp8()], report=False)
    graph["any"] = node("ProbeAny", value=str(value), number=isinstance(value, int))
    graph["fp8"]["inputs"][name] = ["any", 0]
    assert words in comfy.refused(graph)


def test_two_nodes_on_one_model(comfy):
    said = comfy.refused(comfy.graph([fp8("a", scope="ffn"), fp8("b", scope="attention")]))
    assert "already went through an FP8 Linear node; remove one" in said


def test_a_pattern_that_matches_nothing_is_noted(comfy):
    notes = queue(comfy, [fp8(skip="ffn.3")], save=False).run()["linear"]["notes"]
    assert notes == ["skip pattern 'ffn.3' matches no Linear"]


def test_disabled_node_is_no_node(comfy, plain):
    result = queue(comfy, [fp8(enabled=False)])
    assert torch.equal(result.latent(), plain)
    assert "nothing to report" in result.text()


def test_unpatched_again_and_repeated(comfy, converted, plain):
    """Alternating with the plain model leaves nothing on it, and nothing is lost."""
    for _ in range(2):
        assert torch.equal(queue(comfy, seed=3, report=False, tokens=64).latent(), plain)
        assert torch.equal(queue(comfy, [fp8()]).latent(), converted.latent())


def test_two_branches_of_one_loader(comfy, node, converted, plain):
    graph = comfy.graph([fp8()], steps=2, cfg=1.0)
    graph["sample2"] = node("KSampler", **{**graph["sample"]["inputs"], "model": ["shift", 0]})
    graph["save2"] = node("SaveLatent", samples=["sample2", 0], filename_prefix="test")
    result = comfy.queue(graph)
    assert torch.equal(result.latent(), converted.latent())
    assert torch.equal(result.latent("save2"), plain)


def loads(comfy):
    return comfy.server.log_text().count("loaded completely")


def test_running_again_does_not_load_again(comfy, plain):
    queue(comfy, [fp8()], seed=11, save=False)
    before = loads(comfy)
    queue(comfy, [fp8()], seed=12, save=False)
    queue(comfy, [fp8(skip=" ")], seed=13, save=False)  # the node runs again and asks for the same
    assert loads(comfy) == before
    queue(comfy, [fp8(scope="ffn")], seed=13, save=False)
    assert loads(comfy) == before + 1


def test_cfg_in_one_batch(comfy, plain):
    result = queue(comfy, [fp8()], cfg=5.0)
    linear = result.run()["linear"]
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS  # cond and uncond together
    want = queue(comfy, cfg=5.0, report=False).latent()
    assert 0.001 < rel_l2(result.latent(), want) < 0.12


def test_batch_of_two(comfy, converted):
    linear = queue(comfy, [fp8()], batch=2, save=False).run()["linear"]
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS


@pytest.mark.parametrize("first", ["sol", "fp8"])
def test_with_sol_attention_in_any_order(comfy, sol, first):
    """Both take effect, whichever comes first, and one report tells of both."""
    nodes = {"sol": sol(dense_steps=0), "fp8": fp8()}
    order = [nodes.pop(first), *nodes.values()]
    result = queue(comfy, order, steps=2)
    run = result.run()
    assert run["sparse_calls"] == 2 * (LAYERS - 1) and run["linear"]["fp8_calls"] == 2 * LINEARS
    assert "sparse" in result.text() and "Linears converted" in result.text()
    other = [fp8(), sol(dense_steps=0)] if first == "sol" else [sol(dense_steps=0), fp8()]
    assert torch.equal(queue(comfy, other).latent(), result.latent())
    only = queue(comfy, [sol(dense_steps=0)])
    assert only.run()["linear"] is None and not torch.equal(only.latent(), result.latent())


def test_failing_kernel_falls_back_and_says_so(comfy, plain):
    result = queue(comfy, [fp8(), ("k", "ProbeLinearKernel", {"backend": "torch"})])
    linear = result.run()["linear"]
    assert linear["fallbacks"] == {"backend 'torch' failed": 1}
    # The next backend in the chain takes the rest.
    assert linear["backend"] == {"reference": 2 * LINEARS - 1}
    assert linear["declined_backends"]["torch"] == "switched off after it failed"
    assert "probe: this kernel always fails" in linear["notes"][0]
    assert "backend 'torch' failed and was switched off" in result.text()


def test_few_rows_stay_in_the_models_precision(comfy):
    """Cross-attention over 8 text tokens: k and v see 8 rows."""
    linear = queue(comfy, [fp8()], tokens=8, save=False).run()["linear"]
    assert linear["fallbacks"] == {"fewer than 16 rows": 2 * 2 * LAYERS}
    assert linear["fp8_calls"] == 2 * LINEARS - 2 * 2 * LAYERS


def test_interrupted_run_is_reported(comfy, node):
    interrupt = ("stop", "ProbeInterrupt", {"after": 1, "how": "error"})
    comfy.refused(comfy.graph([fp8(scope="ffn"), interrupt], steps=3, cfg=1.0, seed=77))
    linear = queue(comfy, [fp8(scope="ffn")], seed=78, save=False).run()["linear"]
    assert linear["calls"] == 2 * 2 * LAYERS  # the failed run counted for itself


@pytest.mark.parametrize("sol_too", [False, True])
def test_torch_compile(comfy, sol, converted, sol_too):
    patches = [fp8(), *([sol(dense_steps=0)] if sol_too else [])]
    eager = queue(comfy, patches)
    compile_node = ("compile", "TorchCompileModel", {"backend": "inductor"})
    before = comfy.server.log_text().count("recompile_limit")
    compiled = queue(comfy, [*patches, ("fresh", "ProbeFreshCompiler", {}), compile_node])
    linear = compiled.run()["linear"]
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS  # counted in every step
    assert comfy.server.log_text().count("recompile_limit") == before
    # The compiler reorders FP32 sums. A change of 1e-7 moves a few activations across a rounding
    # boundary, by a whole E4M3 step, and every layer multiplies their number: noise of 1e-7 on the
    # input was seen to change an eager forward by 1.0 %. FP8 itself is 2.1 % here.
    assert rel_l2(compiled.latent(), eager.latent()) < 0.02


def test_image_to_video_has_two_more(comfy):
    """Wan 2.1 image-to-video: k and v of the image. Without one ComfyUI gives them the text."""
    path = comfy.base / "models" / "diffusion_models" / "tiny_i2v.safetensors"
    tensors = _script("tiny_wan").wan_state_dict(in_dim=36, image_embedding=True)
    _script("tiny_wan").write_checkpoint(path, tensors)
    linear = queue(comfy, [fp8()], file=path.name, save=False).run()["linear"]
    image = ["cross_attn.k_img", "cross_attn.v_img"]
    assert set(linear["converted_layers"]) == {*PARTS, *image}
    assert linear["fp8_calls"] == linear["calls"] == 2 * (LINEARS + 2 * LAYERS)


# --- formats


def _script(name):
    return sys.modules[name]


def _is_linear(key):
    return any(key.endswith(f".{part}.weight") for part in PARTS) and key.startswith("blocks.")


def _quantised(kind):
    """The tiny model's tensors with the Linears of its blocks in another format."""
    tensors = {}
    for key, value in _script("tiny_wan").wan_state_dict().items():
        if not _is_linear(key):
            tensors[key] = value
        elif kind == "raw":
            tensors[key] = value.to(torch.float8_e4m3fn)
        elif kind == "int8" and ".ffn." in key:
            scale = value.float().abs().amax() / 127
            tensors[key] = (value.float() / scale).round().to(torch.int8)
            tensors[key.replace("weight", "weight_scale")] = scale.reshape(())
            tensors[key.replace("weight", "comfy_quant")] = _json({"format": "int8_tensorwise"})
        elif kind == "int8":
            tensors[key] = value
        else:
            scale = value.float().abs().amax() / 448
            tensors[key] = (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            name = "weight_scale" if kind == "comfy_quant" else "scale_weight"
            tensors[key.replace("weight", name)] = scale.reshape(())
            if kind == "comfy_quant":
                tensors[key.replace("weight", "comfy_quant")] = _json({"format": "float8_e4m3fn"})
    if kind == "scaled":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return tensors


def _json(value):
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


@pytest.fixture(scope="session")
def quantised(comfy):
    """Factory: writes the tiny model in another format, returns options of comfy.graph for it."""

    def make(kind):
        path = comfy.base / "models" / "diffusion_models" / f"tiny_{kind}.safetensors"
        if not path.exists():
            _script("tiny_wan").write_checkpoint(path, _quantised(kind))
        return {"file": path.name, "loader": "UNETLoader"}

    return make


def test_raw_fp8(comfy, quantised):
    options = quantised("raw")
    graph = comfy.graph([fp8()], steps=2, cfg=1.0, **options)
    graph["load"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    linear = comfy.queue(graph).run()["linear"]
    assert linear["formats"] == {"raw float8_e4m3fn": LINEARS}
    assert "40 Linears come from raw FP8 weights" in linear["notes"][0]
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS


def test_scaled_fp8(comfy, quantised):
    """The format of 2025; newer ComfyUI turns it into comfy_quant when it loads."""
    options = quantised("scaled")
    base = queue(comfy, report=False, **options).latent()
    result = queue(comfy, [fp8()], **options)
    linear = result.run()["linear"]
    name = "scaled float8_e4m3fn" if comfy.version < (0, 3, 76) else "comfy_quant float8_e4m3fn"
    assert linear["formats"] == {name: LINEARS}
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS
    # Weights keep their codes; only the activations are rounded.
    assert 0.001 < rel_l2(result.latent(), base) < 0.04


def test_comfy_quant_fp8(comfy, quantised):
    options = quantised("comfy_quant")
    if comfy.version < (0, 3, 76):
        said = comfy.refused(comfy.graph([fp8()], **options))
        assert "FP8 Linear: this file keeps its FP8 weights with scales (comfy_quant)" in said
        assert "0.3.76 or newer" in said
        return
    base = queue(comfy, report=False, **options).latent()
    result = queue(comfy, [fp8()], **options)
    linear = result.run()["linear"]
    assert linear["formats"] == {"comfy_quant float8_e4m3fn": LINEARS}
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS
    assert 0.001 < rel_l2(result.latent(), base) < 0.04


def test_int8_layers_are_left_alone(comfy, quantised):
    if comfy.version < (0, 26, 0):
        pytest.skip("this ComfyUI has no int8_tensorwise layout")
    options = quantised("int8")
    linear = queue(comfy, [fp8()], save=False, **options).run()["linear"]
    assert linear["converted_layers"] == dict.fromkeys(PARTS[:8], "0-3")
    (left,) = linear["skipped"]
    assert left["count"] == 8 and left["layers"] == {"ffn.0": "0-3", "ffn.2": "0-3"}
    assert left["reason"] == "comfy_quant int8_tensorwise has a Linear of its own in ComfyUI"
    said = comfy.refused(comfy.graph([fp8(scope="ffn")], **options))
    assert "no Linear of this model can be converted" in said
    assert "8 comfy_quant int8_tensorwise" in said
