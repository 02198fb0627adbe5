"""MiniMax-H3 in real sampler runs: what runs sparse, what is exact, what is left alone.

Counts of ours are checked against probes: another pack's override on the same model without us, a
counter inside the backend, and the layout that ComfyUI packed.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.comfy

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
FIRST_WITH_H3 = (0, 29, 0)
LAYERS = 4
H, W = 12, 12  # latent of 192 x 192
FRAME = (H // 2) * (W // 2)
TEXT = 64
SPARSE = {"dense_steps": 0, "dense_layers": "none", "precision": "bf16"}
ALL_EXACT = {**SPARSE, "tau": -1000.0, "min_tokens": 0}
# FP32 on both sides; only the order of summation differs, over 2 steps and 4 blocks.
SAME = 1e-4


def _load(name):
    """A script of workflows/ as a module."""
    spec = importlib.util.spec_from_file_location(f"h3_test_{name}", WORKFLOWS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny_h3 = _load("tiny_h3")

CHECKPOINTS = {
    "h3": {},
    "h3-one-block": {"blocks": 1},
    "h3-curves": {"curves": True},
    "h3-prefixed": {"prefix": "model.diffusion_model."},
}


def latent_frames(length):
    """Latent frames of 17k + 5 video frames."""
    return (length - 5) // 17 * 5 + 2


def audio_frames(length):
    return round(length / 24 * 40)


@pytest.fixture(scope="session")
def h3(comfy):
    """A server whose ComfyUI has the model, with tiny checkpoints."""
    if comfy.version < FIRST_WITH_H3:
        pytest.skip("this ComfyUI has no MiniMax-H3")
    write(comfy)
    return comfy


def write(comfy):
    for name, options in CHECKPOINTS.items():
        path = comfy.base / "models" / "diffusion_models" / f"{name}.safetensors"
        tiny_h3.write_checkpoint(path, tiny_h3.h3_state_dict(**options))


@pytest.fixture
def make(h3, node):
    """Factory of graphs: patches, inputs of both sides, sizes; video in "save", audio in "sound"."""

    def make(
        patches=(),
        inputs=(),
        *,
        length=22,
        latent=None,
        file="h3.safetensors",
        loader="HopperSolLoadVideoModel",
        steps=2,
        cfg=1.0,
        sampler="euler",
        scheduler="simple",
        seed=3,
        denoise=1.0,
        tokens=TEXT,
        negative_tokens=None,
        report=True,
        reads=(),
    ):
        graph, link = h3.model(patches, file, loader)
        sizes = {"positive": tokens, "negative": negative_tokens or tokens}
        for variant, (side, count) in enumerate(sizes.items(), 1):
            graph[side] = node(
                "HopperSolSyntheticConditioning", model=["load", 0], variant=variant, tokens=count
            )
        # The shift of this family; ModelSamplingSD3 would take the audio's schedule away.
        graph["shift"] = node(
            "MiniMaxH3SigmaShift", model=["load", 0], shift_video=12.0, shift_audio=3.0
        )
        height, width = H, W
        if latent is None:
            graph["empty"] = node("EmptyMiniMaxH3LatentAV", width=192, height=192, length=length)
        else:
            _, height, width, _ = latent
            names = ("frames", "height", "width", "audio")
            graph["empty"] = node("ProbeH3Latent", **dict(zip(names, latent, strict=True)))
        graph["sample"] = node(
            "KSampler", model=link, positive=["positive", 0], negative=["negative", 0],
            latent_image=["empty", 0], seed=seed, steps=steps, cfg=cfg, sampler_name=sampler,
            scheduler=scheduler, denoise=denoise,
        )  # fmt: skip
        for side in ("positive", "negative"):
            for index, kind in enumerate(inputs):
                name = f"{side}{index}"
                source = graph["sample"]["inputs"][side]
                extra = {"kind": kind, "height": height, "width": width}
                graph[name] = {
                    "class_type": "ProbeH3Conditioning",
                    "inputs": {"conditioning": source, **extra},
                }
                graph["sample"]["inputs"][side] = [name, 0]
        graph["split"] = node("LTXVSeparateAVLatent", av_latent=["sample", 0])
        h3.finish(graph, link, ["sample", 0], report=report, reads=reads, save=False)
        for index, name in enumerate(("save", "sound")):
            graph[name] = node("SaveLatent", samples=["split", index], filename_prefix="test")
        return graph

    return make


def override(name):
    return ("other", "ProbeOverride", {"name": name, "chain": True})


def counter(name):
    return ("kernel", "ProbeKernel", {"mode": "count", "name": name})


def layout(name):
    return ("layout", "ProbeH3Layout", {"name": name})


def streams(result):
    """(video, audio) that a run made."""
    return result.latent("save"), result.latent("sound")


def assert_same(got, want):
    for a, b in zip(streams(got), streams(want), strict=True):
        assert a.shape == b.shape
        assert not a.numel() or (a - b).abs().max() <= SAME
    assert got.latent("save").numel() > 0


def words(run):
    """The note on what stands in front of the video."""
    (note,) = [note for note in run["notes"] if note.startswith("conditioning tokens")]
    return note


# name -> (inputs, what stands in front, further options of the graph)
AUDIO = 2 * audio_frames(22)
CASES = {
    "text": ([], {"text": TEXT, "audio": AUDIO}, {}),
    "first frame": (["first frame"], {"text": TEXT, "keyframe": FRAME, "audio": AUDIO}, {}),
    "first and last frame": (
        ["first and last frame"], {"text": TEXT, "keyframe": 2 * FRAME, "audio": AUDIO}, {},
    ),
    "guides with audio": (
        ["guides with audio"],
        {"text": TEXT, "keyframe": 2 * FRAME, "keyframe audio": 24, "audio": AUDIO},
        {},
    ),
    "reference picture": (
        ["reference picture"], {"text": TEXT, "reference": 15, "audio": AUDIO}, {},
    ),
    "all references": (
        ["all references"],
        {"text": TEXT, "reference": 15 + 32 + 18, "reference audio": 18 + 22, "audio": AUDIO},
        {},
    ),
    "keyframe and reference": (
        ["keyframe and reference"],
        {"text": TEXT, "keyframe": FRAME, "reference": 16, "audio": AUDIO},
        {},
    ),
    "tags": (["tags"], {"text": TEXT, "audio": AUDIO}, {}),
    "5 frames": ([], {"text": TEXT, "audio": 16}, {"length": 5}),
    "39 frames": ([], {"text": TEXT, "audio": 130}, {"length": 39}),
    "ragged": (
        ["first frame"], {"text": 50, "keyframe": 6 * 7, "audio": 26},
        {"latent": (7, 11, 13, 13), "tokens": 50},
    ),
    "hardly any audio": ([], {"text": TEXT, "audio": 2}, {"latent": (7, 12, 12, 1)}),
    "no audio": ([], {"text": TEXT}, {"latent": (7, 12, 12, 0)}),
    "curves": ([], {"text": TEXT, "audio": AUDIO}, {"file": "h3-curves.safetensors"}),
}  # fmt: skip


def grid_of(options):
    frames, height, width, _ = options.get(
        "latent", (latent_frames(options.get("length", 22)), H, W, 0)
    )
    return frames, -(-height // 2), -(-width // 2)


@pytest.mark.parametrize("order", ["none", "morton_2d"])
@pytest.mark.parametrize("case", CASES)
def test_all_exact_equals_unpatched(make, h3, sol, case, order):
    """Every self-attention call is ours, and every order of tokens gives the model's own latents."""
    inputs, parts, more = CASES[case]
    plain = make([override("o"), layout("l")], inputs, report=False, reads=["o", "l"], **more)
    unpatched = h3.queue(plain)
    patches = [sol(**ALL_EXACT, token_order=order), counter("k")]
    result = h3.queue(make(patches, inputs, reads=["k"], **more))
    run, seen = result.run(), unpatched.probe()

    t, h, w = grid_of(more)
    tokens = sum(parts.values()) + t * h * w
    lengths = {length for length, _ in unpatched.probe("read1")}
    assert lengths == {tokens} == {run["tokens"]}
    assert run["sparse_calls"] == run["self_attention_calls"] == len(seen) == 2 * LAYERS
    assert len(result.probe()) == run["sparse_calls"]
    assert run["other_calls"] == {} and run["dense_calls"] == {}
    assert run["density"] == 1.0 and run["row_calls"] == 0
    assert run["batch"] == 1 and run["evaluations"] == run["forwards"] == 2
    assert_same(result, unpatched)
    spelled = ", ".join(f"{n} {what}" for what, n in parts.items())
    assert words(run) == (
        f"conditioning tokens: {sum(parts.values())} ({spelled}) in front of the video; they are "
        "exact, and so is their own attention"
    )


def test_a_run_knows_the_latent_that_it_made(make, h3, sol):
    assert h3.queue(make([sol(**SPARSE)])).run()["made_this_latent"]
    graph = make([sol(**SPARSE)], report=False)
    other = make([sol(**SPARSE)])
    other["sample"]["inputs"]["model"] = ["load", 0]  # our node samples nothing here
    h3.queue(graph)
    assert not any(run["made_this_latent"] for run in h3.queue(other).report())


def test_sparse_differs_and_is_counted_by_block(make, h3, sol):
    unpatched = h3.queue(make(report=False))
    patches = [sol(tau=8.0, dense_steps=1, dense_layers="0", precision="bf16"), counter("k")]
    result = h3.queue(make(patches, reads=["k"]))
    run = result.run()
    assert run["dense_calls"] == {"dense step": LAYERS, "dense layer": 1}
    assert run["sparse_calls"] == LAYERS - 1 == len(result.probe())
    assert 0 < run["density"] < 1 and run["nonfinite"] == []
    assert not torch.equal(result.latent(), unpatched.latent())


# -- what stands in front of the video -----------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("sinks", "audio_is_exact"),
    [("auto", True), ("kv_and_rows", True), ("audio_rows", True), ("kv", False), ("off", False)],
)
def test_audio_of_one_block_depends_on_its_rows_alone(
    make, h3, sol, sinks, audio_is_exact, precision
):
    """With one block, the audio that comes out is a function of the audio rows' attention."""
    one = {"file": "h3-one-block.safetensors", "steps": 1}
    unpatched = h3.queue(make(report=False, **one))
    sparse = {**SPARSE, "tau": 8.0, "precision": precision, "sinks": sinks}
    result = h3.queue(make([sol(**sparse)], **one))
    assert result.run()["sparse_calls"] == 1
    (video, audio), (plain_video, plain_audio) = streams(result), streams(unpatched)
    assert (video - plain_video).abs().max() > 1e-3
    # One FP32 step; the rows are either the model's own or summed in another order.
    assert ((audio - plain_audio).abs().max() <= 1e-5) == audio_is_exact


@pytest.mark.parametrize(
    ("sinks", "rows"), [("auto", True), ("audio_rows", True), ("kv", False), ("off", False)]
)
def test_rows_in_fp8_go_through_the_overrides_behind_us(make, h3, sol, sinks, rows):
    """FP8 rounds keys: rows that stay exact are the model's own attention of the unrounded ones."""
    patches = [override("o"), sol(**{**SPARSE, "precision": "fp8"}, sinks=sinks)]
    result = h3.queue(make(patches, reads=["o"]))
    run, seen = result.run(), result.probe()
    assert run["fp8_calls"] == run["sparse_calls"] == 2 * LAYERS
    assert run["row_calls"] == len(seen) == (2 * LAYERS if rows else 0)
    assert {kind for kind, *_ in seen} <= {"cross"}  # fewer queries than keys
    line = f"rows      {2 * LAYERS} sparse calls left the rows of conditioning tokens"
    assert (line in result.text()) == rows


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_density_counts_rows_as_exact(make, h3, sol, precision):
    """tau 8 keeps what must be exact: sinks, dense rows, a block and its neighbours."""
    patch = sol(**{**SPARSE, "precision": precision}, tau=8.0, token_order="none")
    density = h3.queue(make([patch])).run()["density"]
    before = TEXT + AUDIO
    blocks = -(-(before + latent_frames(22) * FRAME) // 64)
    sink = -(-before // 64)
    # In BF16 a block that holds one such row is dense; of the model's own rows whole blocks count.
    rows = sink if precision == "bf16" else before // 64
    exact = sum(
        i < rows or j < sink or abs(i - j) <= 1 for i in range(blocks) for j in range(blocks)
    )
    assert density == pytest.approx(exact / blocks**2, abs=1e-4)


@pytest.mark.parametrize(
    ("sinks", "how"),
    [
        ("kv", "they are exact for every token"),
        ("audio_rows", "they are exact for every token, and so is the attention of the audio"),
        ("off", "they are treated like the video"),
    ],
)
def test_sinks_are_noted(make, h3, sol, sinks, how):
    assert words(h3.queue(make([sol(**SPARSE, sinks=sinks)])).run()).endswith(how)


def test_text_of_two_lengths_in_one_run(make, h3, sol):
    """H3 takes one conditioning at a time: the two sides have layouts of their own."""
    options = {"cfg": 4.0, "tokens": 70, "negative_tokens": 9}
    plain = make([override("o")], report=False, reads=["o"], **options)
    unpatched = h3.queue(plain)
    result = h3.queue(make([sol(**ALL_EXACT, token_order="morton_2d")], **options))
    run = result.run()
    video = latent_frames(22) * FRAME + AUDIO
    assert run["tokens"] == [9 + video, 70 + video]
    assert run["sparse_calls"] == len(unpatched.probe()) == 4 * LAYERS
    assert_same(result, unpatched)
    assert sorted(note.split("(")[1].split(" text")[0] for note in run["notes"]) == ["70", "9"]


def test_two_lengths_one_after_the_other(make, h3, sol):
    """Nothing of one size is left for the next."""
    settings = {**SPARSE, "token_order": "morton_2d"}
    first = h3.queue(make([sol(**settings)]))
    longer = h3.queue(make([sol(**settings)], length=39))
    again = h3.queue(make([sol(**settings)], seed=3, steps=2, tokens=TEXT, length=22))
    assert longer.run()["tokens"] == TEXT + 130 + latent_frames(39) * FRAME
    changed = h3.queue(make([sol(**settings, dense_last_steps=0, min_tokens=255)]))
    for other in (again, changed):
        assert all(torch.equal(a, b) for a, b in zip(streams(first), streams(other), strict=True))


# -- why calls are dense -------------------------------------------------------------------------


def test_defaults_are_those_of_the_family(make, h3, sol):
    run = h3.queue(make([sol()], steps=5)).run()
    settings = run["settings"]
    assert (settings["tau"], settings["estimator"]) == (1.0, "exact")
    assert (settings["smoothing"], settings["v_bias_correction"]) == ("kv", True)
    assert (settings["token_order"], settings["fp8_layers"]) == ("none", "all")
    assert settings["dense_layers"] == "0-1"
    assert run["model"] == "MiniMax-H3 (4 blocks, 2 heads)"
    assert run["plan"] == "steps 1 dense, 2-5 sparse; dense layers 0-1"
    assert run["dense_calls"] == {"dense step": LAYERS, "dense layer": 4 * 2}
    assert run["sparse_calls"] == 4 * 2


@pytest.mark.parametrize(
    ("inputs", "reasons"),
    [
        ({"dense_steps": 1, "dense_last_steps": 1}, {"dense step": 4, "dense last step": 4}),
        ({"start_percent": 0.5}, {"outside start/end percent": 8}),
        ({"dense_layers": "0,-1"}, {"dense layer": 8}),
        ({"min_tokens": 391}, {"390 tokens < min_tokens 391": 16}),
        ({"dense_layers": "all"}, {"dense layer": 16}),
    ],
)
def test_reasons(make, h3, sol, inputs, reasons):
    run = h3.queue(make([sol(**{**SPARSE, **inputs})], steps=4)).run()
    assert TEXT + AUDIO + latent_frames(22) * FRAME == 390
    assert run["dense_calls"] == reasons
    assert run["sparse_calls"] == 4 * LAYERS - sum(reasons.values())
    assert run["status"] == "finished" and run["nonfinite"] == []


def test_no_backend_is_said(make, h3, sol):
    patches = [("kernel", "ProbeKernel", {"mode": "decline", "name": "n"}), sol(**SPARSE)]
    unpatched = h3.queue(make(report=False))
    result = h3.queue(make(patches))
    ((reason, count),) = result.run()["dense_calls"].items()
    assert reason.startswith("no backend") and "probe: declines every call" in reason
    assert count == 2 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(streams(result), streams(unpatched), strict=True))


def test_a_failing_kernel_leaves_the_models_own_latents(make, h3, sol):
    patches = [("kernel", "ProbeKernel", {"mode": "raise", "name": "n"})]
    unpatched = h3.queue(make(report=False))
    result = h3.queue(make([sol(**{**SPARSE, "precision": "fp8"}), *patches]))
    run = result.run()
    assert run["sparse_calls"] == run["row_calls"] == 0
    assert run["dense_calls"]["backend 'reference' failed"] == 1
    assert all(torch.equal(a, b) for a, b in zip(streams(result), streams(unpatched), strict=True))


def test_on_decline_error_stops_before_sampling(make, h3, sol):
    patches = [
        ("kernel", "ProbeKernel", {"mode": "decline", "name": "n"}),
        sol(**SPARSE, min_tokens=0, on_decline="error"),
    ]
    message = h3.refused(make(patches))
    assert "Sol Attention can't run here" in message and "probe: declines every call" in message


# -- nothing is left behind ----------------------------------------------------------------------


def test_disabled_and_closed_window_are_no_node(make, h3, sol):
    unpatched = h3.queue(make(report=False))
    for inputs in ({"enabled": False}, {"min_tokens": 10**6}, {"dense_steps": 100}):
        result = h3.queue(make([sol(**{**SPARSE, **inputs})]))
        pairs = zip(streams(result), streams(unpatched), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), inputs


def test_removing_the_node_leaves_nothing(make, h3, sol, node):
    def graph(patches):
        graph = make(patches, report=bool(patches))
        graph["state"] = node("ProbeH3State", model=["shift", 0], latent=["sample", 0])
        return graph

    before = h3.queue(graph([]))
    during = h3.queue(graph([sol(**SPARSE, token_order="morton_2d")]))
    after = h3.queue(graph([]))
    clean = before.probe("state")
    assert clean["hooks"] == 0 and clean["own"] == [] and clean["attachments"] == []
    assert during.probe("state") == after.probe("state") == clean
    assert during.run()["sparse_calls"] == 2 * LAYERS
    pairs = zip(streams(before), streams(after), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_text_refiner_stays_dense(make, h3, sol):
    """Its calls come with the run's options, ahead of the blocks; ours are those of the blocks."""
    raw = ("raw", "ProbeH3RawText", {})
    unpatched = h3.queue(make([raw], report=False))
    patches = [sol(**ALL_EXACT), raw, counter("k")]
    result = h3.queue(make(patches, reads=["k"]))
    run = result.run()
    assert run["other_calls"] == {"text refiner": 2}
    assert run["sparse_calls"] == len(result.probe()) == 2 * LAYERS and run["dense_calls"] == {}
    assert_same(result, unpatched)
    assert not any("computed instead" in note for note in run["notes"])


def test_torch_compile(make, h3, sol):
    """One block: tracing takes its time for each."""
    one = {"file": "h3-one-block.safetensors"}
    compiled = ("compile", "ProbeCompile", {})
    unpatched = h3.queue(make(report=False, **one))
    before = h3.server.log_text().count("recompile_limit")
    for patches in ([compiled, sol(**ALL_EXACT)], [sol(**ALL_EXACT), compiled]):
        result = h3.queue(make(patches, **one))
        assert result.run()["sparse_calls"] == 2
        assert_same(result, unpatched)
    assert h3.server.log_text().count("recompile_limit") == before


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_forward_that_computes_by_itself_is_named(make, h3, sol, ours_first):
    """As low-memory attention patches of this model do."""
    forwards = [
        ("takes", "ProbeForwards", {"attention": "attn", "blocks": "1,2", "how": "computes"}),
        ("wraps", "ProbeForwards", {"attention": "attn", "blocks": "0", "how": "wraps"}),
    ]
    patches = [sol(**SPARSE), *forwards] if ours_first else [*forwards, sol(**SPARSE)]
    run = h3.queue(make(patches)).run()
    assert run["sparse_calls"] == run["self_attention_calls"] == 2 * 2
    (note,) = [note for note in run["notes"] if "computed instead" in note]
    assert note.startswith(
        "no self-attention call from blocks 1-2; computed instead by "
        "diffusion_model.blocks.1-2.attn.forward ("
    )


def test_other_block_patches_stay_in_the_chain(make, h3, sol):
    patches = [("block", "ProbeBlockPatch", {"name": "b"}), sol(**ALL_EXACT)]
    unpatched = h3.queue(make(report=False))
    result = h3.queue(make(patches, reads=["b"]))
    assert len(result.probe()) == 2  # block 1 in two steps
    assert result.run()["sparse_calls"] == 2 * LAYERS
    assert_same(result, unpatched)


@pytest.fixture(scope="session")
def lora(h3):
    """A LoRA of the blocks, as distilled few-step models come."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for block in range(LAYERS):
        for name, (out, into) in {"attn.qkv_proj": (768, 256), "mlp.fc2": (256, 512)}.items():
            key = f"diffusion_model.blocks.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(4, into, generator=generator) * 0.1
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.1
    path = h3.base / "models" / "loras" / "h3-turbo.safetensors"
    return tiny_h3.write_checkpoint(path, tensors).name


def test_turbo_chain(make, h3, sol, lora):
    """LoRA, another pack's override, FP8 Linear and a preset for few steps, on one model."""
    turbo = ("lora", "LoraLoaderModelOnly", {"lora_name": lora, "strength_model": 1.0})
    without, unpatched = (
        h3.queue(make(patches, report=False, steps=8)) for patches in ([], [turbo])
    )
    assert not torch.equal(without.latent(), unpatched.latent())
    exact = h3.queue(make([turbo, override("o"), sol(**ALL_EXACT)], steps=8))
    assert_same(exact, unpatched)
    fp8 = ("fp8", "HopperSolFP8Linear", {})
    patches = [turbo, override("o"), sol(preset="turbo-8"), fp8]
    run = h3.queue(make(patches, steps=8)).run()
    kinds = "".join("d" if row[2] == 1.0 else "s" for row in run["map"])
    assert kinds == "ddsssssd" and run["dense_calls"]["dense layer"] == 2 * 5
    assert run["linear"]["fp8_calls"] == 8 * 4 * LAYERS and run["nonfinite"] == []


# -- Linears -------------------------------------------------------------------------------------

LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def test_fp8_linear_takes_the_four_of_each_block(make, h3, sol):
    patches = [("fp8", "HopperSolFP8Linear", {}), sol(**SPARSE)]
    unpatched = h3.queue(make(report=False))
    result = h3.queue(make(patches))
    linear = result.run()["linear"]
    assert linear["converted"] == 4 * LAYERS and linear["skipped"] == []
    assert linear["converted_layers"] == dict.fromkeys(LINEARS, f"0-{LAYERS - 1}")
    assert linear["calls"] == linear["fp8_calls"] == 2 * 4 * LAYERS
    assert not torch.equal(result.latent(), unpatched.latent())


@pytest.mark.parametrize(("scope", "names"), [("attention", LINEARS[:2]), ("ffn", LINEARS[2:])])
def test_fp8_linear_scopes(make, h3, scope, names):
    result = h3.queue(make([("fp8", "HopperSolFP8Linear", {"scope": scope})]))
    linear = result.run()["linear"]
    assert list(linear["converted_layers"]) == list(names)
    assert linear["converted"] == 2 * LAYERS


@pytest.mark.parametrize("file", ["h3", "h3-curves"])
def test_fp8_at_load_keeps_modulation_small_and_islands_large(make, h3, sol, node, file):
    """The four Linears run in FP8; modulation is kept in it and computed without, unless it is over
    curve points (FP32, a few columns); all else stays."""
    graph = make([sol(**SPARSE)], file=f"{file}.safetensors")
    graph["load"]["inputs"]["linear_precision"] = "fp8"
    graph["weights"] = node("ProbeH3Weights", model=["load", 0], latent=["sample", 0])
    result = h3.queue(graph)
    weights = result.probe("weights")
    fp8 = {name for name, dtype in weights.items() if dtype == "float8_e4m3fn"}
    computed = {f"blocks.{i}.{name}" for i in range(LAYERS) for name in LINEARS}
    stored = {f"blocks.{i}.adaln_proj.linear" for i in range(LAYERS)}
    assert fp8 == (computed if file == "h3-curves" else computed | stored)
    linear = result.run()["linear"]
    assert linear["converted"] == 4 * LAYERS and linear["fallbacks"] == {}
    assert linear["calls"] == linear["fp8_calls"] == 2 * 4 * LAYERS
    islands = (
        "video_patch_proj",
        "audio_patch_proj",
        "final_layer.video_out",
        "final_layer.audio_out",
    )
    assert {weights[name] for name in islands} == {"float32"}
    note = "4 further Linears are kept in FP8 and computed without"
    assert (note in linear["notes"]) == (file == "h3")
    assert result.run()["nonfinite"] == []


# -- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["h3", "h3-curves", "h3-prefixed"])
def test_load_video_model_loads_what_core_loads(make, h3, file):
    got, want = (
        h3.queue(make(report=False, file=f"{file}.safetensors", loader=loader))
        for loader in ("HopperSolLoadVideoModel", "UNETLoader")
    )
    assert all(torch.equal(a, b) for a, b in zip(streams(got), streams(want), strict=True))


def test_a_comfyui_without_the_model_says_so(comfy, sol):
    if comfy.version >= FIRST_WITH_H3:
        pytest.skip("this ComfyUI has MiniMax-H3")
    write(comfy)
    message = comfy.refused(comfy.graph([sol()], file="h3.safetensors"))
    assert "is a MiniMax-H3 model, which this ComfyUI does not have" in message
    assert "0.29 or newer" in message
