"""Nothing leaks: into other branches, later runs, other packs' patches, or core."""

import pytest
import torch

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="session")
def plain(comfy):
    return comfy.queue(comfy.graph(report=False, loader="UNETLoader")).latent()


@pytest.fixture(scope="session")
def sparse(comfy, sol):
    return comfy.queue(comfy.graph([sol()])).latent()


def test_disabled_node_is_no_node(comfy, sol, node, plain):
    graph = comfy.graph([sol(enabled=False)])
    graph["state"] = node("ProbeState", model=["sol", 0])
    graph["bare"] = node("ProbeState", model=["shift", 0])
    result = comfy.queue(graph)
    assert torch.equal(result.latent(), plain)
    assert result.report() == [] and "nothing to report" in result.text()
    assert result.probe("state") == result.probe("bare")
    assert result.probe("state")["attachments"] == []


def test_removing_the_node_leaves_nothing(comfy, sol, node, plain, sparse):
    before = comfy.graph(report=False)
    before["state"] = node("ProbeState", model=["shift", 0], latent=["sample", 0])
    clean = comfy.queue(before).probe("state")
    assert not torch.equal(sparse, plain)
    comfy.queue(comfy.graph([sol(tau=0.5)], seed=11))
    after = comfy.graph(report=False)
    after["state"] = node("ProbeState", model=["shift", 0], latent=["sample", 0])
    result = comfy.queue(after)
    assert torch.equal(result.latent(), plain)
    assert result.probe("state") == clean
    assert clean["hooks"] == 0 and clean["attachments"] == []


def test_two_branches_of_one_loader(comfy, sol, node, plain, sparse):
    graph = comfy.graph([sol()])
    other = {**graph["sample"]["inputs"], "model": ["shift", 0]}
    graph["sample2"] = node("KSampler", **other)
    graph["save2"] = node("SaveLatent", samples=["sample2", 0], filename_prefix="test")
    result = comfy.queue(graph)
    assert torch.equal(result.latent("save"), sparse)
    assert torch.equal(result.latent("save2"), plain)
    assert len(result.report()) == 1


def test_second_run_and_changed_widget(comfy, sol, sparse):
    again = comfy.queue(comfy.graph([sol(dense_last_steps=0, kv_splits="1")]))
    assert torch.equal(again.latent(), sparse)
    stricter = comfy.queue(comfy.graph([sol(tau=3.0)]))
    assert stricter.run()["density"] < again.run()["density"]
    assert torch.equal(
        comfy.queue(
            comfy.graph(
                [
                    sol(),
                ]
            )
        ).latent(),
        sparse,
    )


def test_a_later_shift_node_changes_nothing(comfy, sol, sparse):
    """Our node before or after a node that clones the model: the same run."""
    graph = comfy.graph([sol()])
    graph["sol"]["inputs"]["model"] = ["load", 0]
    graph["shift"]["inputs"]["model"] = ["sol", 0]
    for name in ("sample", "report"):
        graph[name]["inputs"]["model"] = ["shift", 0]
    result = comfy.queue(graph)
    assert torch.equal(result.latent(), sparse)
    assert result.run()["sparse_calls"] > 0


def test_interrupted_run(comfy, sol, plain, sparse):
    stop = ("stop", "ProbeInterrupt", {"after": 3, "how": "interrupt"})
    assert "interrupt" in comfy.refused(comfy.graph([sol(), stop], cfg=1.0)).lower()
    assert torch.equal(comfy.queue(comfy.graph([sol(v_bias_correction=False)])).latent(), sparse)
    assert torch.equal(comfy.queue(comfy.graph(report=False)).latent(), plain)


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_an_aborted_run_is_reported(comfy, sol, node, how):
    stop = ("stop", "ProbeInterrupt", {"after": 3, "how": how})
    graph = comfy.graph([sol(), stop], cfg=1.0, report=False)
    comfy.refused(graph)
    # The aborted run made no latent; a report shows it as the model's last, and says so.
    model, _ = comfy.model([sol()])
    model["empty"] = graph["empty"]
    model["report"] = node("HopperSolRunReport", latent=["empty", 0], model=["sol", 0])
    result = comfy.queue(model)
    (run,) = result.report()
    assert run["status"] == {"interrupt": "interrupted", "error": "failed"}[how]
    assert run["forwards"] == 3
    assert ("probe error in the model" in (run["error"] or "")) == (how == "error")
    assert not run["made_this_latent"] and "For information only" in result.text()


@pytest.mark.parametrize("place", ["earlier", "later"])
@pytest.mark.parametrize("chain", [True, False])
def test_other_overrides_get_the_declined_calls(comfy, sol, sparse, place, chain):
    other = ("other", "ProbeOverride", {"name": "other", "chain": chain})
    patches = [other, sol()] if place == "earlier" else [sol(), other]
    result = comfy.queue(comfy.graph(patches, reads=["other"]))
    run = result.run()
    seen = result.probe()
    dense = sum(run["dense_calls"].values())
    assert sum(1 for kind, *_ in seen if kind == "self") == dense > 0
    assert sum(1 for kind, *_ in seen if kind == "cross") == run["other_calls"]["cross-attention"]
    assert all(inside and heads == 2 for _, _, heads, inside in seen)
    assert run["sparse_calls"] > 0
    assert torch.equal(result.latent(), sparse)


def test_block_patches_of_others_are_chained(comfy, sol, sparse):
    for patches in (
        [("block", "ProbeBlockPatch", {"name": "block"}), sol()],
        [sol(), ("block", "ProbeBlockPatch", {"name": "block"})],
    ):
        result = comfy.queue(comfy.graph(patches, reads=["block"]))
        run = result.run()
        assert len(result.probe()) == run["forwards"]
        assert run["dense_calls"]["dense layer"] > 0  # the block index still arrives
        assert torch.equal(result.latent(), sparse)


def test_a_bypass_is_named(comfy, sol):
    run = comfy.queue(
        comfy.graph([sol(), ("forward", "ProbeForward", {})], cfg=1.0, save=False)
    ).run()
    assert run["self_attention_calls"] == 0
    notes = " ".join(run["notes"])
    assert "no self-attention call reached" in notes and "self_attn.forward" in notes


def test_cached_sampler_shows_the_run_that_made_the_latent(comfy, sol, node):
    """Also when another latent of the same model was sampled in between."""
    graph = comfy.graph([sol(tau=0.75)], seed=21, report=False)
    comfy.queue(graph)
    graph["empty2"] = node("EmptyHunyuanLatentVideo", width=192, height=192, length=9, batch_size=1)
    other = {**graph["sample"]["inputs"], "seed": 22, "steps": 3, "latent_image": ["empty2", 0]}
    graph["sample2"] = node("KSampler", **other)
    graph["save2"] = node("SaveLatent", samples=["sample2", 0], filename_prefix="test")
    comfy.queue(graph)
    graph["report"] = node("HopperSolRunReport", latent=["sample", 0], model=["sol", 0])
    result = comfy.queue(graph)
    (run,) = result.report()
    assert run["steps"] == 6 and run["made_this_latent"]
    assert result.text().startswith("The sampler's output was reused")


def test_a_sampler_that_bypasses_the_node_is_not_reported_as_ours(comfy, sol, node):
    graph = comfy.graph([sol(tau=0.8)])
    graph["sample"]["inputs"]["model"] = ["shift", 0]  # wired past Sol Attention
    assert "no sampler has run this model" in comfy.queue(graph).text()
    comfy.queue(comfy.graph([sol(tau=0.8)], seed=5))
    graph["sample"]["inputs"]["seed"] = 6
    result = comfy.queue(graph)
    assert "the sampler used another model" in result.text()
    assert [run["made_this_latent"] for run in result.report()] == [False]


def test_many_samplers_of_one_prompt_are_all_reported(comfy, sol, node):
    graph = comfy.graph(
        [sol(tau=0.9)], cfg=1.0, steps=1, size=(64, 64, 5), report=False, save=False
    )
    first = graph["sample"]["inputs"]
    for index in range(10):
        latent = ["sample" if index == 0 else f"sample{index}", 0]
        graph[f"sample{index + 1}"] = node(
            "KSampler", **{**first, "latent_image": latent, "seed": index}
        )
    comfy.finish(graph, ["sol", 0], ["sample10", 0], save=False)
    runs = comfy.queue(graph).report()
    assert len(runs) == 11
    assert [run["made_this_latent"] for run in runs] == [False] * 10 + [True]
