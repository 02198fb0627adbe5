"""Nodes of other packs on the same model, before and after Sol Attention.

What must hold: calls that we leave reach the other node, a node that keeps calls from us is named
in the report, and steps are counted by sigma, whoever skips one.
"""

import sys

import pytest
import torch

pytestmark = pytest.mark.comfy

LAYERS = 4
PROBES = "hopper_sol_probes.neighbours"


def queue(comfy, patches, **options):
    return comfy.queue(comfy.graph(list(patches), **{"cfg": 1.0, **options}))


@pytest.fixture(params=["before", "after"])
def around(request, sol):
    """Function that puts another node's patch before or after Sol Attention."""

    def around(patch, **inputs):
        return [patch, sol(**inputs)] if request.param == "before" else [sol(**inputs), patch]

    return around


@pytest.fixture(scope="session")
def alone(comfy, sol):
    """A run with Sol Attention and nothing else."""
    return queue(comfy, [sol()])


def kinds(run, layer=1):
    """'d', 's' or '.' for every step: dense, sparse or not run."""
    values = [row[layer] for row in run["map"]]
    return "".join("." if v is None else "d" if v == 1.0 else "s" for v in values)


# -- attention backends in ComfyUI's one slot (Sage nodes, Model Attention Backend) ---------------


def test_core_attention_backend(comfy, around, alone):
    if comfy.version < (0, 31, 0):
        pytest.skip("this ComfyUI has no Model Attention Backend node")
    patch = ("backend", "ModelAttentionBackend", {"attention": "pytorch attention"})
    result = queue(comfy, around(patch))
    run = result.run()
    assert run["sparse_calls"] == alone.run()["sparse_calls"] > 0
    assert run["notes"] == []
    # Dense calls go to another implementation of the same attention, in FP32.
    assert (result.latent() - alone.latent()).abs().max() <= 1e-4


# -- replaced forwards (KJNodes' memory-efficient attention, NAG) ---------------------------------


def test_a_forward_that_computes_by_itself_is_named(comfy, around, alone):
    inputs = {"attention": "self_attn", "blocks": "1,2", "how": "computes"}
    run = queue(comfy, around(("other", "ProbeForwards", inputs)), save=False).run()
    notes = " ".join(run["notes"])
    assert "no self-attention call from blocks 1-2" in notes
    assert f"diffusion_model.blocks.1-2.self_attn.forward ({PROBES}.ProbeForwards." in notes
    assert run["self_attention_calls"] == 2 * run["forwards"] == 12
    assert kinds(run, 1) == "......" and kinds(run, 3) == "ddssss"
    # Its own calls are ordinary ones again in the next prompt.
    again = queue(comfy, [("sol", "HopperSolAttention", {"min_tokens": 256})])
    assert torch.equal(again.latent(), alone.latent())
    assert again.run()["notes"] == []


@pytest.mark.parametrize("attention", ["self_attn", "cross_attn"])
def test_a_forward_that_still_asks_for_attention_changes_nothing(comfy, around, alone, attention):
    """NAG replaces cross-attention, which is not ours."""
    inputs = {"attention": attention, "blocks": "0,1,2,3", "how": "wraps"}
    result = queue(comfy, around(("other", "ProbeForwards", inputs)))
    assert torch.equal(result.latent(), alone.latent())
    run = result.run()
    assert run["sparse_calls"] == alone.run()["sparse_calls"]
    assert not any("instead" in note for note in run["notes"])


def test_a_model_forward_that_drops_the_options_is_named(comfy, around, alone):
    result = queue(comfy, around(("other", "ProbeRewrite", {})))
    run = result.run()
    notes = " ".join(run["notes"])
    assert run["self_attention_calls"] == 0 and run["evaluations"] == 6
    assert "no self-attention call reached the override" in notes
    assert f"{PROBES}.ProbeRewrite." in notes
    assert not torch.equal(result.latent(), alone.latent())


# -- caches that skip evaluations (EasyCache, TeaCache and their kind) ----------------------------


@pytest.mark.parametrize(
    ("where", "evaluations", "name"),
    [
        ("diffusion_model", 6, "probe_neighbour"),
        ("apply_model", None, "probe_neighbour"),
        ("predict_noise", 4, "probe_neighbour"),
        ("function_wrapper", 4, "model_function_wrapper"),
    ],
)
def test_skipped_evaluations_move_no_step(comfy, around, where, evaluations, name):
    """Evaluations 3 and 5 of 6 are answered by a cache: steps 3 and 5 are empty, no other moves."""
    result = queue(comfy, around(("cache", "ProbeCache", {"where": where, "skip": "2,4"})))
    run = result.run()
    assert run["steps"] == 6 and run["forwards"] == 4
    assert kinds(run) == "dd.s.s"
    assert run["density_by_step"][2] is run["density_by_step"][4] is None
    assert run["self_attention_calls"] == 4 * LAYERS
    # Whether our own hook stands before or after one of the same kind decides what it sees.
    assert run["evaluations"] in ([evaluations] if evaluations else [4, 6])
    notes = " ".join(run["notes"])
    assert name in notes and f"{PROBES}.ProbeCache." in notes
    assert f"2 of {6} " in notes
    assert "skipped   2 of 6 steps made no attention call" in result.text()


@pytest.mark.parametrize("cache", ["EasyCache", "LazyCache"])
def test_core_caches(comfy, around, cache):
    """A threshold that skips as much as the node ever does, from the second step on."""
    inputs = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    run = queue(comfy, around(("cache", cache, inputs)), steps=8, save=False).run()
    map_ = kinds(run)
    assert len(map_) == run["steps"] == 8
    idle = map_.count(".")
    assert idle > 0
    # What ran is what the plan says for that step.
    assert all(got in (want, ".") for got, want in zip(map_, "ddssssss", strict=True))
    assert run["self_attention_calls"] == (8 - idle) * LAYERS
    (note,) = run["notes"]
    assert note.startswith(f"{idle} of 8 ") and "easycache" in note.lower()


# -- other sparse attention nodes ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["takes", "keeps"])
def test_another_sparse_node_that_takes_calls_is_named(comfy, around, how):
    run = queue(comfy, around(("other", "ProbeSparse", {"how": how})), save=False).run()
    assert run["self_attention_calls"] == 0
    notes = " ".join(run["notes"])
    assert "no self-attention call reached the override" in notes
    assert f"{PROBES}.ProbeSparse." in notes
    cross = LAYERS * run["evaluations"]
    assert (f"handed on {cross} calls: {PROBES}" in notes) == (how == "takes")


def test_another_sparse_node_that_declines_hands_on_to_us(comfy, around, alone):
    result = queue(comfy, around(("other", "ProbeSparse", {"how": "declines"})))
    run = result.run()
    assert run["sparse_calls"] == alone.run()["sparse_calls"]
    assert torch.equal(result.latent(), alone.latent())
    (note,) = run["notes"]
    calls = run["self_attention_calls"] + run["other_calls"]["cross-attention"]
    assert f"handed on {calls} calls: {PROBES}.ProbeSparse." in note


# -- torch.compile -------------------------------------------------------------------------------


def test_torch_compile_before_and_after(comfy, sol):
    """One block: tracing takes its time for each."""
    tiny_wan = sys.modules["tiny_wan"]
    path = comfy.base / "models" / "diffusion_models" / "one_block.safetensors"
    tiny_wan.write_checkpoint(path, tiny_wan.wan_state_dict(blocks=1))
    options = {"file": path.name, "steps": 3}
    ours, compile_node = sol(dense_layers="none"), ("compile", "ProbeCompile", {})
    before = comfy.server.log_text().count("recompile_limit")
    alone = queue(comfy, [ours], **options)
    for patches in ([ours, compile_node], [compile_node, ours]):
        result = queue(comfy, patches, **options)
        run = result.run()
        assert kinds(run, 0) == "dss" and run["notes"] == []
        assert run["sparse_calls"] == alone.run()["sparse_calls"] == 2
        # The traced parts run the same operations in the same order.
        assert (result.latent() - alone.latent()).abs().max() <= 1e-4
    log = comfy.server.log_text()
    assert log.count("recompile_limit") == before, log[log.rfind("recompile_limit") - 300 :][:900]


# -- several at once -----------------------------------------------------------------------------


def test_a_long_chain_in_any_order(comfy, sol):
    """LoRA-like weight patches apart: everything that shares the model's hooks, both ways round."""
    chain = [
        ("cache", "ProbeCache", {"where": "diffusion_model", "skip": "2"}),
        ("sage", "ProbeOverride", {"name": "sage", "chain": False}),
        ("nag", "ProbeForwards", {"attention": "cross_attn", "blocks": "0,1,2,3", "how": "wraps"}),
        ("fp8", "HopperSolFP8Linear", {"scope": "ffn"}),
    ]
    results = [
        queue(comfy, order, steps=4, reads=["sage"])
        for order in (
            [*chain, sol()],
            [sol(), *chain],
            [*chain[::-1], sol()],
            [*chain[:2], sol(), *chain[2:]],
        )
    ]
    first = results[0]
    assert kinds(first.run()) == "ds.s"
    sage = first.probe()
    dense = sum(first.run()["dense_calls"].values())
    assert sum(1 for kind, *_ in sage if kind == "self") == dense > 0
    for result in results[1:]:
        assert torch.equal(result.latent(), first.latent())
        run = {**result.run(), "linear": None}
        for name in ("sparse_calls", "dense_calls", "other_calls", "map", "notes"):
            assert run[name] == first.run()[name]
