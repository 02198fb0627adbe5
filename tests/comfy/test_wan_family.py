"""Wan variants in real sampler runs: what runs sparse, what is exact, what is left alone.

Every count of ours is checked against two probes: another pack's override on the same model without
us, which sees each attention call, and a counter inside the backend.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.comfy

LAYERS = 4
T, H, W = 3, 24, 24  # latent of 192 x 192, 9 frames
FRAME = (H // 2) * (W // 2)
VIDEO = T * FRAME
TEXT = 64
ALL_EXACT = {"tau": -1000.0, "dense_steps": 0, "dense_layers": "none"}
SPARSE = {"dense_steps": 0, "dense_layers": "none"}


def _load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny_wan = _load(Path(__file__).resolve().parents[2] / "workflows" / "tiny_wan.py")
wan_variants = _load(Path(__file__).with_name("wan_variants.py"))


@pytest.fixture(scope="session")
def variants(comfy):
    """The server, with a tiny checkpoint of every variant: ``<variant>.safetensors``."""
    for name, tensors in wan_variants.state_dicts(tiny_wan.wan_state_dict).items():
        path = comfy.base / "models" / "diffusion_models" / f"{name}.safetensors"
        tiny_wan.write_checkpoint(path, tensors)
    return comfy


@pytest.fixture
def make(variants, node):
    """Factory of graphs: a variant, patches, inputs (kind, frames, height, width) of both sides."""

    def make(variant, patches=(), inputs=(), *, latent=(16, T, H, W), keep_first=False, **changes):
        changes = {"steps": 2, "cfg": 1.0, "tokens": TEXT, **changes}
        graph = variants.graph(patches, file=f"{variant}.safetensors", **changes)
        channels, frames, height, width = latent
        graph["empty"] = node(
            "ProbeLatent", channels=channels, frames=frames, height=height, width=width,
            keep_first=keep_first,
        )  # fmt: skip
        for side in ("positive", "negative"):
            for index, (kind, t, h, w) in enumerate(inputs):
                name = f"{side}{index}"
                size = {"kind": kind, "frames": t, "height": h, "width": w}
                link = graph["sample"]["inputs"][side]
                graph[name] = {
                    "class_type": "ProbeConditioning",
                    "inputs": {"conditioning": link, **size},
                }
                graph["sample"]["inputs"][side] = [name, 0]
        return graph

    return make


def override(name):
    return ("other", "ProbeOverride", {"name": name, "chain": True})


def counter(name):
    return ("kernel", "ProbeKernel", {"mode": "count", "name": name})


# variant -> (inputs, tokens before and after the video, latent, further options of the graph)
CASES = {
    "2.1-i2v": ([("clip vision", 257, 1, 1)], (0, 0), (16, T, H, W), {}),
    "2.2-i2v": ([], (0, 0), (16, T, H, W), {}),
    "2.2-5b": ([], (0, 0), (48, T, H, W), {"keep_first": True}),
    "fun-control": ([("reference", 1, H, W)], (FRAME, 0), (16, T, H, W), {}),
    "fun-camera": ([("camera", T, H, W)], (0, 0), (16, T, H, W), {}),
    "vace": ([], (0, 0), (16, T, H, W), {}),
    "animate": ([("clip vision", 257, 1, 1), ("pose", T - 1, H, W)], (0, 0), (16, T, H, W), {}),
    "humo": ([("reference", 2, H, W)], (0, 2 * FRAME), (16, T, H, W), {}),
    "tiny": (
        [("frames behind", 1, H, W)], (0, FRAME), (16, T, H, W), {},
    ),
}  # fmt: skip
# A ragged video: 3 x 11 x 13 tokens, and a reference that starts the video inside a block.
RAGGED = {
    "fun-control": ([("reference", 1, 22, 26)], (11 * 13, 0), (16, T, 22, 26), {}),
    "2.2-5b": ([], (0, 0), (48, T, 21, 26), {"keep_first": True}),
    "tiny": ([("frames behind", 2, 22, 26)], (0, 2 * 11 * 13), (16, T, 22, 26), {}),
}


def self_calls(probe, tokens):
    """Calls of equal shapes over the whole sequence that a probe saw."""
    return sum(1 for kind, n, *_ in probe if kind == "self" and n == tokens)


@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
@pytest.mark.parametrize("case", [*CASES, *(f"ragged {name}" for name in RAGGED)])
def test_all_exact_equals_unpatched(make, variants, sol, case, order):
    """Every self-attention call is ours, and every order of tokens gives the model's own picture."""
    variant = case.removeprefix("ragged ")
    inputs, (before, after), latent, more = (RAGGED if case != variant else CASES)[variant]
    plain = make(variant, [override("o")], inputs, latent=latent, report=False, reads=["o"], **more)
    unpatched = variants.queue(plain)
    patches = [sol(**ALL_EXACT, token_order=order), counter("k")]
    result = variants.queue(make(variant, patches, inputs, latent=latent, reads=["k"], **more))
    run, seen = result.run(), unpatched.probe()

    video = latent[1] * -(-latent[2] // 2) * -(-latent[3] // 2)
    tokens = before + video + after
    assert run["tokens"] == tokens
    assert run["sparse_calls"] == run["self_attention_calls"] == self_calls(seen, tokens) > 0
    assert run["sparse_calls"] == len(result.probe())
    assert {n for _, n, *_ in result.probe()} == {tokens}
    assert run["other_calls"]["cross-attention"] == sum(1 for kind, *_ in seen if kind == "cross")
    assert run["density"] == 1.0
    notes = [note for note in run["notes"] if note.startswith("reference tokens")]
    assert len(notes) == bool(before or after)
    # FP32 on both sides; only the order of summation differs, over 2 steps and 4 blocks.
    assert (result.latent() - unpatched.latent()).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", CASES)
def test_sparse_differs_and_is_counted_by_block(make, variants, sol, variant):
    inputs, _, latent, more = CASES[variant]
    plain = make(variant, [], inputs, latent=latent, report=False, **more)
    patches = [sol(dense_steps=1, dense_layers="0"), counter("k")]
    result = variants.queue(make(variant, patches, inputs, latent=latent, reads=["k"], **more))
    run = result.run()
    # VACE: its two blocks run in the turns of blocks 0 and 2.
    in_turn = [2, 1, 2, 1] if variant == "vace" else [1, 1, 1, 1]
    assert run["dense_calls"] == {"dense step": sum(in_turn), "dense layer": in_turn[0]}
    assert run["sparse_calls"] == sum(in_turn[1:]) == len(result.probe())
    assert 0 < run["density"] < 1
    assert run["nonfinite"] == []
    assert not torch.equal(result.latent(), variants.queue(plain).latent())


def test_reference_in_front_is_exact_and_can_be_switched_off(make, variants, sol):
    """Its share of the blocks is exact for every token; without that, fewer are."""
    inputs, (before, _), *_ = CASES["fun-control"]
    densities = {}
    for sinks in ("auto", "kv_and_rows", "off"):
        patch = sol(**SPARSE, tau=8.0, sinks=sinks)
        densities[sinks] = variants.queue(make("fun-control", [patch], inputs)).run()["density"]
    blocks = -(-(before + VIDEO) // 64)  # 9
    reference = -(-before // 64)  # 3: the last one holds video as well
    # tau 8 keeps what must be exact: the block itself and its neighbours, and the sinks.
    band = 3 * blocks - 2
    inside = 3 * reference - 1  # band cells in the reference's columns
    assert densities["off"] == pytest.approx(band / blocks**2, abs=1e-4)
    sinks = band - inside + reference * blocks
    assert densities["auto"] == pytest.approx(sinks / blocks**2, abs=1e-4)
    assert densities["kv_and_rows"] > densities["auto"]


def test_contexts_behind_the_video(make, variants, sol):
    """Two context latents of one frame each, where this ComfyUI's Wan has them."""
    inputs = [("contexts", 1, H, W)]
    plain = make("tiny", [override("o")], inputs, report=False, reads=["o"])
    unpatched = variants.queue(plain)
    lengths = {n for kind, n, *_ in unpatched.probe() if kind == "self"}
    result = variants.queue(make("tiny", [sol(**ALL_EXACT)], inputs))
    run = result.run()
    tokens = VIDEO + 2 * FRAME if variants.version >= (0, 24, 0) else VIDEO
    assert lengths == {tokens} and run["tokens"] == tokens
    assert run["sparse_calls"] == LAYERS * run["forwards"]
    assert (result.latent() - unpatched.latent()).abs().max() <= 1e-4


def test_reference_without_ref_conv_is_no_token(make, variants, sol):
    run = variants.queue(make("tiny", [sol(**SPARSE)], [("reference", 1, H, W)], save=False)).run()
    assert run["tokens"] == VIDEO and run["sparse_calls"] == LAYERS * run["forwards"]


def test_s2v(make, variants, sol):
    """Reference and preceding frames behind the video; ComfyUI of 2025 hides its calls."""
    inputs = [("reference", 1, H, W), ("motion", 5, H, W)]
    motion = FRAME + 6 * 6 + 4 * 3 * 3
    tokens = VIDEO + FRAME + motion
    plain = make("s2v", [override("o")], inputs, report=False, reads=["o"])
    unpatched = variants.queue(plain)
    result = variants.queue(make("s2v", [sol(**ALL_EXACT)], inputs))
    run = result.run()
    if variants.version < (0, 4, 0):
        assert run["sparse_calls"] == 0 and self_calls(unpatched.probe(), tokens) == 0
        assert torch.equal(result.latent(), unpatched.latent())
        return
    assert run["tokens"] == tokens
    assert run["sparse_calls"] == self_calls(unpatched.probe(), tokens) == 2 * LAYERS
    assert run["density"] == 1.0
    assert (result.latent() - unpatched.latent()).abs().max() <= 1e-4
    sparse = variants.queue(make("s2v", [sol(**SPARSE)], inputs, save=False)).run()
    assert sparse["density"] < 1 and sparse["sparse_calls"] == 2 * LAYERS


def test_variant_that_is_not_supported_says_so(make, variants, sol):
    if variants.version < (0, 10, 0):
        pytest.skip("this ComfyUI does not know SCAIL")
    inputs = [("clip vision", 257, 1, 1), ("pose", T, H // 2, W // 2)]
    graph = make("scail", [sol(**SPARSE)], inputs)
    result, plain = variants.queue(graph), variants.queue(make("scail", [], inputs, report=False))
    run = result.run()
    assert run["dense_calls"] == {
        "Wan variant SCAILWanModel is not supported yet": LAYERS * run["forwards"]
    }
    assert run["sparse_calls"] == 0 and torch.equal(result.latent(), plain.latent())
    graph["sol"]["inputs"]["on_decline"] = "error"
    assert "SCAILWanModel is not supported yet" in variants.refused(graph)


# -- cross-attention as long as the video --------------------------------------------------------


def small(variant, tokens, **changes):
    """Arguments of a video of ``tokens`` tokens: one frame of 16 columns."""
    return {"latent": (16, 1, tokens // 8, 32), "tokens": tokens, **changes}


@pytest.mark.parametrize("variant", ["tiny", "2.1-i2v", "2.2-i2v", "fun-camera"])
def test_text_as_long_as_the_video_is_never_ours(make, variants, sol, variant):
    """512 tokens of both: with us, cross-attention gives what it gives without us."""
    inputs = [("clip vision", 257, 1, 1)] if variant == "2.1-i2v" else []
    arguments = small(variant, 512)
    patches = [sol(**ALL_EXACT, min_tokens=0), override("o"), counter("k")]
    result = variants.queue(make(variant, patches, inputs, **arguments, reads=["o", "k"]))
    run = result.run()
    assert run["tokens"] == 512
    assert run["sparse_calls"] == LAYERS * run["forwards"] == len(result.probe("read1"))
    crosses = 2 if inputs else 1
    assert run["other_calls"] == {"cross-attention": crosses * LAYERS * run["forwards"]}
    # Whatever reaches the next override is what we passed on.
    assert len(result.probe()) == crosses * LAYERS * run["forwards"]


def test_image_tokens_and_text_as_long_as_the_video(make, variants, sol):
    """Wan 2.1 image to video: three attention calls of one length in a block."""
    inputs = [("clip vision", 256, 1, 1)]
    patches = [sol(**ALL_EXACT, min_tokens=0), counter("k")]
    arguments = {"latent": (16, 1, 32, 32), "tokens": 256}
    result = variants.queue(make("2.1-i2v", patches, inputs, **arguments, reads=["k"]))
    run = result.run()
    assert run["tokens"] == 256
    assert run["sparse_calls"] == LAYERS * run["forwards"] == len(result.probe())
    assert run["other_calls"] == {"cross-attention": 2 * LAYERS * run["forwards"]}


def test_vace_declines_where_text_is_as_long_as_the_video(make, variants, sol):
    patches = [sol(**SPARSE, min_tokens=0), counter("k")]
    result = variants.queue(make("vace", patches, **small("vace", 512), reads=["k"]))
    run = result.run()
    assert run["sparse_calls"] == 0 and result.probe() == []
    (reason,) = run["dense_calls"]
    assert reason.startswith("512 tokens, as many as the text has")


# -- context windows and two experts -------------------------------------------------------------


def test_context_windows_have_a_grid_each(make, variants, sol):
    """9 latent frames in windows of 5; newer ComfyUI puts the first frame before later windows."""
    windows = {
        "context_length": 17, "context_overlap": 5, "context_schedule": "standard_static",
        "context_stride": 1, "closed_loop": False, "fuse_method": "pyramid",
    }  # fmt: skip
    if variants.version >= (0, 10, 0):
        later = {"freenoise": False, "retain_first_frame": False, "split_conds_to_windows": False}
        windows.update(later)
    window = ("windows", "WanContextWindowsManual", windows)
    latent = (16, 9, H, W)
    plain = make("tiny", [window, override("o")], latent=latent, report=False, reads=["o"])
    unpatched = variants.queue(plain)
    calls = [n for kind, n, *_ in unpatched.probe() if kind == "self"]
    lengths = sorted(set(calls))
    assert lengths in ([5 * FRAME], [5 * FRAME, 6 * FRAME])
    for patches in ([window, sol(**ALL_EXACT)], [sol(**ALL_EXACT), window]):
        result = variants.queue(make("tiny", patches, latent=latent))
        run = result.run()
        assert run["tokens"] == (lengths[0] if len(lengths) == 1 else lengths)
        assert run["forwards"] > run["steps"]
        assert run["sparse_calls"] == len(calls)
        assert (result.latent() - unpatched.latent()).abs().max() <= 1e-4
        assert run["steps"] == 2


def test_two_experts_with_a_node_each(variants, sol, node):
    """Wan 2.2 A14B: dense steps where noise is highest, none where the second model goes on."""
    graph, high = variants.model([sol()])
    graph["load_low"] = node(
        "HopperSolLoadVideoModel", file="sub/prefixed.safetensors", linear_precision="default"
    )
    graph["shift_low"] = node("ModelSamplingSD3", model=["load_low", 0], shift=8.0)
    graph["sol_low"] = node("HopperSolAttention", model=["shift_low", 0], min_tokens=256)
    for name, noise in (("positive", 1), ("negative", 2)):
        graph[name] = node(
            "HopperSolSyntheticConditioning", model=["load", 0], variant=noise, tokens=TEXT
        )
    graph["empty"] = node("ProbeLatent", channels=16, frames=T, height=H, width=W, keep_first=False)
    common = {
        "positive": ["positive", 0], "negative": ["negative", 0], "steps": 4, "cfg": 1.0,
        "sampler_name": "euler", "scheduler": "simple", "noise_seed": 3,
    }  # fmt: skip
    graph["high"] = node(
        "KSamplerAdvanced", **common, model=high, latent_image=["empty", 0], add_noise="enable",
        start_at_step=0, end_at_step=2, return_with_leftover_noise="enable",
    )  # fmt: skip
    graph["low"] = node(
        "KSamplerAdvanced", **common, model=["sol_low", 0], latent_image=["high", 0],
        add_noise="disable", start_at_step=2, end_at_step=10000,
        return_with_leftover_noise="disable",
    )  # fmt: skip
    variants.finish(graph, ["sol_low", 0], ["low", 0], save=False)
    graph["report_high"] = node("HopperSolRunReport", latent=["high", 0], model=high)
    result = variants.queue(graph)
    (run_high,), (run_low,) = result.report("report_high"), result.report("report")
    assert run_high["dense_calls"] == {"dense step": LAYERS, "dense layer": 1}
    assert run_low["dense_calls"] == {"dense layer": 2}
    assert run_low["sparse_calls"] == 2 * (LAYERS - 1)
    assert "no automatic dense steps" in run_low["plan"]
    assert "no automatic dense steps" not in run_high["plan"]


@pytest.mark.parametrize(
    ("denoise", "scheduler", "kinds"),
    [
        (1.0, "simple", "dssss"),
        (0.5, "simple", "sssss"),
        (1.0, "beta", "dssss"),
        (1.0, "normal", "dssss"),
        (1.0, "sgm_uniform", "dssss"),
        (1.0, "karras", "dssss"),
        (1.0, "linear_quadratic", "dssss"),
    ],
)
def test_automatic_dense_steps_belong_to_runs_from_noise(variants, sol, denoise, scheduler, kinds):
    graph = variants.graph([sol()], steps=5, cfg=1.0, denoise=denoise, save=False)
    graph["sample"]["inputs"]["scheduler"] = scheduler
    run = variants.queue(graph).run()
    got = "".join("d" if row[1] == 1.0 else "s" for row in run["map"])
    assert got == kinds


# -- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["2.1-i2v", "2.2-5b", "vace", "fun-control", "humo"])
def test_load_video_model_loads_variants_as_core_does(make, variants, variant):
    inputs, _, latent, more = CASES[variant]
    pictures = [
        variants.queue(
            make(variant, [], inputs, latent=latent, report=False, loader=loader, **more)
        ).latent()
        for loader in ("HopperSolLoadVideoModel", "UNETLoader")
    ]
    assert torch.equal(*pictures)
