"""A LoRA does to the FP8 model what it does to the model itself, however ComfyUI applies it.

Fully loaded, ComfyUI merges a LoRA into the weights; of layers that stay off the device it applies
it at every use, before our function or, after a later unload, behind it. The effect of a LoRA is
the latent with it minus the latent without it.
"""

import sys

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy

LAYERS = 4
LINEARS = 40
RANK = 16
MODES = ("full", "half", "none", "unload", "late")
# What each LoRA changes. The second leaves out most, the third is only in one block.
TARGETS = {
    "a": ("self_attn.q", "self_attn.v", "self_attn.o", "cross_attn.k", "ffn.0", "ffn.2"),
    "b": ("self_attn.k", "cross_attn.v", "ffn.2"),
    "c": ("cross_attn.q", "cross_attn.o", "self_attn.o"),
}
ONE = (("a", 1.0),)
THREE = (("a", 0.5), ("b", 1.0), ("c", -1.0))


def lora_tensors(name):
    """A random LoRA as large as the weights: FP8 noise of 3 % must not hide a change of it by 2 %."""
    shapes = {k: tuple(v.shape) for k, v in sys.modules["tiny_wan"].wan_state_dict().items()}
    generator = torch.Generator().manual_seed(ord(name))
    tensors = {}
    for block in range(LAYERS) if name != "c" else (1,):
        for target in TARGETS[name]:
            rows, columns = shapes[f"blocks.{block}.{target}.weight"]
            key = f"diffusion_model.blocks.{block}.{target}"
            down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            up = torch.randn(rows, RANK, generator=generator) * RANK**-0.5
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = down, up
    return tensors


@pytest.fixture(scope="session")
def loras(comfy):
    """Writes the LoRA files; factory of loader patches for (name, strength) pairs."""
    folder = comfy.base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TARGETS:
        save_file(lora_tensors(name), folder / f"{name}.safetensors")

    def patches(pairs):
        return [
            (
                f"lora_{name}",
                "LoraLoaderModelOnly",
                {"lora_name": f"{name}.safetensors", "strength_model": strength},
            )
            for name, strength in pairs
        ]

    return patches


FP8 = ("fp8", "HopperSolFP8Linear", {})


@pytest.fixture(scope="session")
def latent(comfy, loras):
    """Latent, report and weights of a run, cached: (loras, order, mode).

    order: None without FP8, "before" with the LoRAs in front of the node, "after", or "between".
    """
    known = {}

    def run(pairs, order=None, mode="full"):
        key = (pairs, order, mode)
        if key not in known:
            patches = loras(pairs)
            place = {None: [], "before": len(patches), "after": 0, "between": 1}[order]
            if order is not None:
                patches.insert(place, FP8)
            # In front, so that what it does to the model happens before anything of ours.
            patches.insert(0, ("how", "ProbeLoad", {"mode": mode}))
            patches.append(("look", "ProbeLinears", {"name": "weights"}))
            graph = comfy.graph(patches, steps=2, cfg=1.0, reads=["weights"])
            result = comfy.queue(graph)
            weights = {path: values for path, *values in result.probe()}
            known[key] = result.latent().double(), result.report(), weights
        return known[key]

    return run


def effect(latent, pairs, order=None, mode="full"):
    without = latent((), None if order is None else "after")[0]
    return latent(pairs, order, mode)[0] - without


def compare(got, want):
    """(ratio of norms, cosine)."""
    got, want = got.flatten(), want.flatten()
    return float(got.norm() / want.norm()), float(got @ want / (got.norm() * want.norm()))


def check(latent, pairs, order, mode):
    want = effect(latent, pairs)
    base = latent(())[0]
    assert want.norm() > 0.15 * base.norm()  # large enough to say something
    ratio, cosine = compare(effect(latent, pairs, order, mode), want)
    assert 0.98 <= ratio <= 1.02 and cosine >= 0.97, (ratio, cosine)

    (run,) = latent(pairs, order, mode)[1]
    linear = run["linear"]
    assert linear["converted"] == LINEARS
    assert linear["fp8_calls"] == linear["calls"] == 2 * LINEARS and linear["fallbacks"] == {}

    # The same layers are FP8, and hold the weights that the model itself computes with.
    weights, plain = latent(pairs, order, mode)[2], latent(pairs)[2]
    assert weights.keys() == plain.keys()
    assert sum(is_fp8 for is_fp8, *_ in weights.values()) == LINEARS
    for path, (_, _, *sums) in weights.items():
        assert sums == pytest.approx(plain[path][2:], rel=1e-4, abs=1e-4), path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_one_lora(latent, order, mode):
    check(latent, ONE, order, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strength", [0.5, -1.0])
def test_strengths(latent, strength, mode):
    check(latent, (("a", strength),), "after", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_three_loras(latent, order, mode):
    check(latent, THREE, order, mode)


def test_every_way_gives_the_same_latent(latent):
    """FP32 sums in another order are all that may differ."""
    want = latent(ONE, "after")[0]
    for order in ("before", "after"):
        for mode in MODES:
            got = latent(ONE, order, mode)[0]
            assert (got - want).norm() <= 1e-2 * want.norm(), (order, mode)


@pytest.mark.parametrize(
    ("mode", "functions"),
    [
        ("full", {"fp8_weight"}),
        ("half", {"fp8_weight", "LowVramPatch fp8_weight"}),
        ("none", {"LowVramPatch fp8_weight"}),
        ("unload", {"LowVramPatch fp8_weight"}),
        # ComfyUI appends the LoRA to what is on the weight, and no callback comes after it.
        ("late", {"fp8_weight LowVramPatch"}),
    ],
)
def test_modes_are_what_they_say(latent, mode, functions):
    """How ComfyUI applies the LoRA where there is one; ours comes last wherever we are asked."""
    weights = latent(ONE, "after", mode)[2]
    changed = [w for path, w in weights.items() if path.partition(".")[2] in TARGETS["a"]]
    assert len(changed) == LAYERS * len(TARGETS["a"])
    assert {" ".join(names) for _, names, *_ in changed} == functions


def test_taking_the_lora_away_again(latent, comfy):
    """After all of this the model without a LoRA is what it was."""
    want = latent(())[0]
    again = comfy.queue(comfy.graph([], steps=2, cfg=1.0, report=False)).latent().double()
    assert torch.equal(again, want)
    fp8 = comfy.queue(comfy.graph([FP8], steps=2, cfg=1.0, report=False)).latent().double()
    assert torch.equal(fp8, latent((), "after")[0])
