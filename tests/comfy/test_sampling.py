"""Sol Attention in real sampler runs of a tiny Wan model."""

import pytest
import torch

pytestmark = pytest.mark.comfy

LAYERS = 4
TOKENS = 432  # 192 x 192, 9 frames: 3 x 12 x 12, six whole blocks and a partial one


@pytest.fixture(scope="session")
def plain(comfy):
    """Latent of the default graph without any node of ours on the model."""
    return comfy.queue(comfy.graph(report=False, loader="UNETLoader")).latent()


def row_kinds(run, layer=1):
    """'d' or 's' for every step: dense or sparse in ``layer``; '.' if it was not called."""
    values = [row[layer] for row in run["map"]]
    return "".join("." if v is None else "d" if v == 1.0 else "s" for v in values)


def test_load_video_model_loads_what_core_loads(comfy, plain):
    assert torch.equal(comfy.queue(comfy.graph(report=False)).latent(), plain)
    prefixed = comfy.graph(report=False, file="sub\\prefixed.safetensors")
    assert torch.equal(comfy.queue(prefixed).latent(), plain)


@pytest.mark.parametrize("cfg", [1.0, 5.0])
@pytest.mark.parametrize("token_order", ["none", "morton_3d", "morton_2d"])
def test_all_exact_equals_unpatched(comfy, sol, cfg, token_order):
    options = {"tau": -1000.0, "dense_steps": 0, "dense_layers": "none", "token_order": token_order}
    result = comfy.queue(comfy.graph([sol(**options)], cfg=cfg))
    unpatched = comfy.queue(comfy.graph(report=False, cfg=cfg)).latent()
    run = result.run()
    assert run["sparse_calls"] == run["self_attention_calls"] == LAYERS * run["forwards"] > 0
    assert run["density"] == 1.0
    # FP32 on both sides; only the order of summation differs, over 6 steps and 4 blocks.
    assert (result.latent() - unpatched).abs().max() <= 1e-4


def test_counts_at_tau_one(comfy, sol, plain):
    result = comfy.queue(comfy.graph([sol()]))
    run = result.run()
    assert run["status"] == "finished"
    assert run["steps"] == 6 and run["tokens"] == TOKENS
    per_step = run["forwards"] // 6
    assert run["self_attention_calls"] == LAYERS * run["forwards"]
    assert run["dense_calls"] == {"dense step": 2 * LAYERS * per_step, "dense layer": 4 * per_step}
    assert run["sparse_calls"] == 4 * (LAYERS - 1) * per_step
    assert run["other_calls"] == {"cross-attention": LAYERS * run["forwards"]}
    assert run["backend"] == {"reference": run["sparse_calls"]}
    assert row_kinds(run) == "ddssss" and row_kinds(run, layer=0) == "dddddd"
    # 7 blocks: the band of three per row alone is 19 of 49.
    assert 19 / 49 <= run["density"] < 0.8
    assert run["nonfinite"] == [] and run["notes"] == []
    assert not torch.equal(result.latent(), plain)
    text = result.text()
    assert "steps 1-2 dense, 3-6 sparse" in text and "cross-attention" in text


@pytest.mark.parametrize(
    ("sampler", "steps", "forwards", "kinds"),
    [
        ("euler", 4, 4, "dsss"),
        ("euler", 8, 8, "ddssssss"),
        ("euler", 1, 1, "d"),
        ("heun", 6, 11, "ddssss"),
        ("dpm_2", 6, 11, "ddssss"),
        ("uni_pc", 6, None, "ddssss"),
    ],
)
@pytest.mark.parametrize("cfg", [1.0, 5.0])
def test_step_index_of_samplers(comfy, sol, sampler, steps, forwards, kinds, cfg):
    run = comfy.queue(comfy.graph([sol()], sampler=sampler, steps=steps, cfg=cfg, save=False)).run()
    assert run["steps"] == steps
    assert row_kinds(run) == kinds
    if forwards is not None:
        assert run["forwards"] in (
            forwards,
            2 * forwards,
        )  # cond and uncond apart if memory is short


def test_heun_counts_both_evaluations_of_a_step(comfy, sol):
    """heun at 6 steps evaluates steps 1, 2 2, 3 3, ... 6 6 (counting from 1)."""
    run = comfy.queue(
        comfy.graph([sol(dense_layers="none")], sampler="heun", cfg=1.0, save=False)
    ).run()
    assert run["dense_calls"] == {"dense step": 3 * LAYERS}
    assert run["sparse_calls"] == 8 * LAYERS


@pytest.mark.parametrize(("dense_steps", "kinds"), [(-1, "ssss"), (1, "dsss")])
def test_denoise_half_counts_the_steps_of_its_own_run(comfy, sol, dense_steps, kinds):
    """What begins below full noise has no automatic dense steps."""
    patch = sol(dense_steps=dense_steps)
    run = comfy.queue(comfy.graph([patch], denoise=0.5, steps=4, cfg=1.0, save=False)).run()
    assert run["steps"] == 4 and row_kinds(run) == kinds


@pytest.mark.parametrize(("dense_steps", "kinds"), [(-1, ("ds", "ssss")), (1, ("ds", "dsss"))])
def test_two_stages_start_again_at_zero(comfy, sol, node, dense_steps, kinds):
    graph = comfy.graph([sol(dense_steps=dense_steps)], save=False, report=False)
    sample = graph.pop("sample")["inputs"]
    del sample["denoise"]
    seed = sample.pop("seed")
    common = {**sample, "noise_seed": seed, "steps": 6}
    graph["high"] = node(
        "KSamplerAdvanced", **common, add_noise="enable", start_at_step=0, end_at_step=2,
        return_with_leftover_noise="enable",
    )  # fmt: skip
    common["latent_image"] = ["high", 0]
    graph["low"] = node(
        "KSamplerAdvanced", **common, add_noise="disable", start_at_step=2, end_at_step=10000,
        return_with_leftover_noise="disable",
    )  # fmt: skip
    comfy.finish(graph, ["sol", 0], ["low", 0])
    high, low = comfy.queue(graph).report()
    assert (high["steps"], low["steps"]) == (2, 4)
    assert (row_kinds(high), row_kinds(low)) == kinds
    assert high["plan"].startswith("steps 1 dense, 2 sparse")


def test_dense_last_steps_and_percent_window(comfy, sol):
    options = {"dense_steps": 0, "dense_last_steps": 2}
    run = comfy.queue(comfy.graph([sol(**options)], cfg=1.0, save=False)).run()
    assert row_kinds(run) == "ssssdd" and "dense last step" in run["dense_calls"]
    options = {"dense_steps": 0, "start_percent": 0.3, "end_percent": 0.8}
    run = comfy.queue(comfy.graph([sol(**options)], steps=20, cfg=1.0, save=False)).run()
    kinds = row_kinds(run)
    assert kinds.strip("d") == "s" * kinds.count("s")  # one sparse stretch
    assert (
        kinds.startswith("ddd")
        and kinds.endswith("dd")
        and "outside start/end percent" in run["dense_calls"]
    )


def test_layer_ranges(comfy, sol):
    run = comfy.queue(
        comfy.graph([sol(dense_layers="0,-1", dense_steps=0)], cfg=1.0, save=False)
    ).run()
    assert [row_kinds(run, layer)[0] for layer in range(LAYERS)] == ["d", "s", "s", "d"]
    assert run["density_by_layer"][0] is None and run["density_by_layer"][1] is not None


def test_min_tokens_leaves_all_dense(comfy, sol, plain):
    result = comfy.queue(comfy.graph([sol(min_tokens=433)]))
    run = result.run()
    assert run["sparse_calls"] == 0
    assert run["dense_calls"] == {"432 tokens < min_tokens 433": LAYERS * run["forwards"]}
    assert torch.equal(result.latent(), plain)


def test_equally_long_cross_attention_is_not_ours(comfy, sol):
    """48 video tokens and 48 text tokens: only the order of calls tells them apart."""
    graph = comfy.graph(
        [sol(min_tokens=0, dense_steps=0)], size=(64, 64, 9), tokens=48, cfg=1.0, save=False
    )
    run = comfy.queue(graph).run()
    assert run["tokens"] == 48
    assert (
        run["self_attention_calls"]
        == run["other_calls"]["cross-attention"]
        == LAYERS * run["forwards"]
    )


def test_fp8_layers_run_in_fp8(comfy, sol):
    options = {"dense_steps": 0, "dense_layers": "none", "tau": -1000.0}
    exact = comfy.queue(comfy.graph([sol(**options)], cfg=1.0)).latent()
    for smoothing in ("none", "kv"):
        fp8 = {"precision": "fp8", "fp8_layers": "1-2", "smoothing": smoothing}
        result = comfy.queue(comfy.graph([sol(**options, **fp8)], cfg=1.0))
        run = result.run()
        assert run["fp8_calls"] == 2 * run["forwards"]
        assert run["precision"] == {"float32": 2 * run["forwards"], "fp8": 2 * run["forwards"]}
        assert run["cast_from"] == {"float32": 2 * run["forwards"]}
        error = (result.latent() - exact).norm() / exact.norm()
        # Attention in two of four blocks is off by about 5 %; it is one of three residual branches.
        assert 0 < error < 0.05


def test_batch_of_two_equals_single_runs(comfy, sol):
    both = comfy.queue(comfy.graph([sol()], batch=2, cfg=1.0))
    one = comfy.queue(comfy.graph([sol()], batch=1, cfg=1.0))
    assert both.run()["batch"] == 2 and one.run()["batch"] == 1
    assert both.latent().shape[0] == 2
    # Same noise for the first of the batch; routing must not mix the two.
    assert (both.latent()[:1] - one.latent()).abs().max() <= 1e-4
    assert not torch.equal(both.latent()[:1], both.latent()[1:])
