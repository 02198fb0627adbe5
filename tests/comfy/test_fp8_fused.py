"""FP8 Linears that compute the activation or the norm in front of them: how many, and what changes.

Nothing may: on a CPU both ways give the same bits, but for norms, which are not fused there unless
a probe says so.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy

LAYERS, STEPS = 4, 2
LINEARS = LAYERS * 10
SAMPLE = {"steps": STEPS, "cfg": 1.0}
NODE = ("fp8", "HopperSolFP8Linear", {})


def fused(switch="1", norms=False, fails=False):
    return ("fused", "ProbeFused", {"switch": switch, "norms": norms, "fails": fails})


@pytest.fixture(params=["node", "at load"])
def queue(comfy, request):
    """Runs a graph whose Linears are FP8, by the node or since they were loaded."""

    def queue(*patches, node=NODE, **options):
        by_node = request.param == "node"
        graph = comfy.graph([*patches, node] if by_node else list(patches), **{**SAMPLE, **options})
        if not by_node:
            graph["load"]["inputs"]["linear_precision"] = "fp8"
        return comfy.queue(graph)

    queue.by_node = request.param == "node"
    return queue


def _script(name):
    path = Path(__file__).resolve().parents[2] / "workflows" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"fused_test_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rel_l2(got, want):
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    "options", [{}, {"cfg": 5.0}, {"batch": 2}, {"size": (96, 160, 13)}], ids=str
)
def test_one_gelu_a_block_and_the_same_latent(queue, options):
    result, apart = queue(**options), queue(fused("0"), **options)
    linear, other = result.run()["linear"], apart.run()["linear"]
    assert linear["fused"] == {"gelu": STEPS * LAYERS} and linear["unfused"] == {}
    assert other["fused"] == other["unfused"] == {}
    for counts in (linear, other):
        assert counts["fp8_calls"] == counts["calls"] == STEPS * LINEARS
        assert counts["backend"] == {"torch": STEPS * LINEARS}
    assert torch.equal(result.latent(), apart.latent())
    said = f"  fused     {STEPS * LAYERS} FP8 calls with GELU in front of them"
    assert said in result.text() and "fused" not in apart.text()


def test_norms(queue):
    """Four Linears of a block read a norm: q, k and v share one rounding of it, and ffn.0."""
    result, apart = queue(fused(norms=True)), queue(fused("0"))
    linear = result.run()["linear"]
    assert linear["fused"] == {"gelu": STEPS * LAYERS, "norm": 4 * STEPS * LAYERS}
    assert linear["fp8_calls"] == linear["calls"] == STEPS * LINEARS
    # Sums in another order: 1e-7 on an activation moves a few codes, and noise of that size on the
    # input was seen to change a forward by 1 % (test_fp8_linear.py); two of them are run.
    assert 0 < rel_l2(result.latent(), apart.latent()) < 0.02
    assert "FP8 calls with norm and modulation in front of them" in result.text()


@pytest.mark.parametrize("options", [{"cfg": 5.0}, {"batch": 2}], ids=str)
def test_norms_of_batches(queue, options):
    result, apart = queue(fused(norms=True), **options), queue(fused("0"), **options)
    assert result.run()["linear"]["fused"]["norm"] == 4 * STEPS * LAYERS
    # cfg 5 subtracts two outputs and multiplies the difference: 0.02 five and four times at most,
    # as a share of the result; test_fp8_linear.py sees FP8 itself under 0.12 there.
    assert 0 < rel_l2(result.latent(), apart.latent()) < (0.09 if "cfg" in options else 0.02)


@pytest.mark.parametrize(
    ("inputs", "gelus", "norms"),
    [
        ({"scope": "ffn"}, 4, 4),
        ({"scope": "attention"}, 0, 12),
        ({"layers": "1-2"}, 2, 8),
        ({"skip": "ffn.2"}, 0, 16),
        ({"skip": "ffn.0"}, 0, 12),
        ({"skip": "self_attn.k"}, 4, 4),
        ({"skip": "blocks.0.ffn.*"}, 3, 15),
    ],
    ids=str,
)
def test_only_between_fp8_linears(comfy, inputs, gelus, norms):
    node = ("fp8", "HopperSolFP8Linear", inputs)
    graph = comfy.graph([fused(norms=True), node], save=False, **SAMPLE)
    counts = {"gelu": STEPS * gelus, "norm": STEPS * norms}
    linear = comfy.queue(graph).run()["linear"]
    assert linear["fused"] == {name: count for name, count in counts.items() if count}
    assert linear["fp8_calls"] == linear["calls"]


def test_a_failing_kernel_is_computed_apart_and_says_so(queue):
    result, apart = queue(fused(fails=True)), queue(fused("0"))
    linear = result.run()["linear"]
    assert linear["fused"] == {} and linear["unfused"] == {"gelu failed": STEPS * LAYERS}
    assert linear["fp8_calls"] == STEPS * LINEARS and linear["fallbacks"] == {}
    assert torch.equal(result.latent(), apart.latent())
    assert "probe: this kernel always fails" in linear["notes"][0]
    assert f"  not fused {STEPS * LAYERS} FP8 calls: gelu failed" in result.text()


# --- others on the same modules

PARTS = ("ffn", "ffn.0", "ffn.1", "ffn.2", "norm1", "norm2", "self_attn", "self_attn.k")


@pytest.mark.parametrize("how", ["read", "write", "replace", "patch"])
@pytest.mark.parametrize("part", PARTS)
def test_hooks_and_object_patches_of_others(queue, part, how):
    """Whatever they do with what goes through, they do to the same numbers."""
    other = ("other", "ProbeModules", {"part": part, "how": how})
    result, apart = queue(fused(), other), queue(fused("0"), other)
    assert torch.equal(result.latent(), apart.latent())
    linear, counts = result.run()["linear"], apart.run()["linear"]
    assert (linear["calls"], linear["fp8_calls"]) == (counts["calls"], counts["fp8_calls"])
    assert linear["unfused"] == {} and linear["notes"] == []


@pytest.mark.parametrize("part", ["norm1", "norm2"])
def test_a_norm_that_another_pack_replaced(queue, part):
    """It stays theirs, whoever comes first; the other norm is fused all the same."""
    other = ("other", "ProbeModules", {"part": part, "how": "patch"})
    linear = queue(fused(norms=True), other, save=False).run()["linear"]
    assert linear["fused"]["norm"] == STEPS * LAYERS * (1 if part == "norm1" else 3)


def test_removing_it_leaves_nothing(comfy, queue):
    plain = [("classes", "ProbeClasses", {"part": "norm1", "name": "c"})]

    def run(file_patches=plain):
        return comfy.queue(comfy.graph(file_patches, reads=["c"], report=False, **SAMPLE))

    before = run()
    with_us = queue(*plain, reads=["c"])
    assert "_Deferred" in with_us.probe() and "_Deferred" not in before.probe()
    after = run([*plain, ("shift2", "ModelSamplingSD3", {"shift": 8.0})])
    assert after.probe() == before.probe()
    assert torch.equal(after.latent(), before.latent())


def test_torch_compile(queue, comfy):
    """The compiler sees one op for a Linear, as ever; nothing is put off under it."""
    compile_node = ("compile", "TorchCompileModel", {"backend": "inductor"})
    fresh = ("fresh", "ProbeFreshCompiler", {})
    before = comfy.server.log_text().count("recompile_limit")
    result = queue(fused(norms=True), fresh, compile_node)
    linear = result.run()["linear"]
    assert linear["fp8_calls"] == linear["calls"] == STEPS * LINEARS and linear["fused"] == {}
    assert comfy.server.log_text().count("recompile_limit") == before
    assert rel_l2(result.latent(), queue(fused("0")).latent()) < 0.02  # see test_fp8_linear.py


# --- loading


@pytest.fixture(scope="session")
def lora(comfy):
    """A LoRA on both Linears of the feed-forwards: the patch that loads it."""
    folder = comfy.base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {k: tuple(v.shape) for k, v in sys.modules["tiny_wan"].wan_state_dict().items()}
    generator, tensors = torch.Generator().manual_seed(6), {}
    for block in range(LAYERS):
        for part in ("ffn.0", "ffn.2", "self_attn.q"):
            rows, columns = shapes[f"blocks.{block}.{part}.weight"]
            key = f"diffusion_model.blocks.{block}.{part}"
            down = torch.randn(8, columns, generator=generator) * columns**-0.5
            up = torch.randn(rows, 8, generator=generator) * 8**-0.5
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = down, up
    save_file(tensors, folder / "fused.safetensors")
    inputs = {"lora_name": "fused.safetensors", "strength_model": 0.7}
    return ("lora", "LoraLoaderModelOnly", inputs)


@pytest.mark.parametrize("mode", ["full", "half", "none", "unload", "late"])
def test_loras_and_offloading(queue, lora, mode):
    how = ("how", "ProbeLoad", {"mode": mode})
    result, apart = queue(fused(), how, lora), queue(fused("0"), how, lora)
    assert result.run()["linear"]["fused"] == {"gelu": STEPS * LAYERS}
    assert torch.equal(result.latent(), apart.latent())


# --- MiniMax-H3


@pytest.mark.parametrize("at_load", [False, True])
def test_h3(comfy, at_load):
    """One SwiGLU a block; its modulation is written over the norm, and nothing is put off there."""
    if comfy.version < (0, 29, 0):
        pytest.skip("this ComfyUI has no MiniMax-H3")
    tiny_h3 = _script("tiny_h3")
    path = comfy.base / "models" / "diffusion_models" / "h3_fused.safetensors"
    tiny_h3.write_checkpoint(path, tiny_h3.h3_state_dict())

    def run(switch):
        patches = [fused(switch, norms=True), *([] if at_load else [NODE])]
        graph, link = comfy.model(patches, path.name)
        graph["load"]["inputs"]["linear_precision"] = "fp8" if at_load else "default"
        comfy.finish_h3(graph, link, steps=STEPS)
        return comfy.queue(graph)

    result, apart = run("1"), run("0")
    linear = result.run()["linear"]
    assert linear["fused"] == {"swiglu": STEPS * LAYERS} and linear["unfused"] == {}
    assert linear["fp8_calls"] == linear["calls"] == STEPS * LAYERS * 4
    assert apart.run()["linear"]["fused"] == {}
    assert torch.equal(result.latent(), apart.latent())
    assert f"{STEPS * LAYERS} FP8 calls with SwiGLU in front of them" in result.text()
