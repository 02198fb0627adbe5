"""Patches of other nodes that keep calls from Sol Attention are named; harmless ones are not."""

import functools
import logging
from types import SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.patching import neighbours
from hopper_sol.nodes.patching.neighbours import name_of
from hopper_sol.nodes.patching.override import OVERRIDE
from hopper_sol.nodes.patching.plan import KEY

HERE = __name__


def theirs(*args, **kwargs):
    """A function of another node."""


def silent(options):
    """A model whose attention goes elsewhere."""


def only(sampler, blocks):
    """A model of which only ``blocks`` call attention."""

    def model(options):
        q = torch.zeros(1, 315, 256)
        for index in blocks:
            call = functools.partial(sampler.attend, q, q, q, 2)
            sampler.block(options, index, lambda o, call=call: call(transformer_options=o))

    return model


def notes(sampler):
    return sampler.report["notes"]


# -- names -------------------------------------------------------------------------------------


def test_name_of_a_function():
    assert name_of(theirs) == f"{HERE}.theirs"
    assert name_of(functools.partial(theirs, 1)) == f"{HERE}.theirs"
    assert name_of(dict.get) == "builtins.dict.get"  # has no module of its own
    assert name_of(None) == "nothing"


def test_name_of_a_bound_method_and_of_an_object():
    class Patch:
        def forward(self):
            pass

    assert name_of(Patch().forward).endswith("Patch.forward")
    assert name_of(Patch()).endswith(".Patch")


@pytest.mark.parametrize("separator", ["/", "\\"])
def test_name_of_a_custom_nodes_function_has_no_folders_above_it(separator):
    def patched():
        pass

    path = ["", "home", "me", "ComfyUI", "custom_nodes", "Some-Pack_x_1.nodes.sage"]
    patched.__module__ = separator.join(path)
    patched.__qualname__ = "Sage.patch.<locals>.override"
    assert name_of(patched) == "Some-Pack_x_1.nodes.sage.Sage.patch.<locals>.override"


# -- replaced forwards -------------------------------------------------------------------------


def test_replaced_forwards_are_named_by_key_when_no_call_came(make_sampler):
    sampler = make_sampler()
    for index in range(4):
        key = f"diffusion_model.blocks.{index}.self_attn.forward"
        sampler.patcher.object_patches[key] = theirs
    sampler.run(lambda: sampler.forward(0.5, silent))
    assert any(
        f"diffusion_model.blocks.0-3.self_attn.forward ({HERE}.theirs)" in note
        for note in notes(sampler)
    )


def test_blocks_without_a_call_are_named(make_sampler):
    """Only what was patched in those blocks is to blame."""
    sampler = make_sampler()
    patches = sampler.patcher.object_patches
    patches["diffusion_model.blocks.1.attn.forward"] = theirs
    patches["diffusion_model.blocks.2.forward"] = theirs
    patches["diffusion_model.blocks.3.attn.forward"] = theirs
    sampler.run(lambda: sampler.forward(0.5, only(sampler, [0, 3])))
    assert (
        "no self-attention call from blocks 1-2; computed instead by "
        f"diffusion_model.blocks.1.attn.forward ({HERE}.theirs); "
        f"diffusion_model.blocks.2.forward ({HERE}.theirs)"
    ) in notes(sampler)


def test_blocks_without_a_call_and_without_a_trace(make_sampler):
    sampler = make_sampler()
    sampler.run(lambda: sampler.forward(0.5, only(sampler, [0, 1, 2])))
    (note,) = notes(sampler)
    assert "from blocks 3;" in note and "left no trace" in note


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("diffusion_model.blocks.0.cross_attn.forward", theirs),
        ("diffusion_model.blocks.0.ffn.forward", theirs),
        ("diffusion_model.blocks.0", SimpleNamespace(_orig_mod=None)),
        ("model_sampling", theirs),
    ],
)
def test_patches_elsewhere_are_not_blamed(key, value, make_sampler):
    sampler = make_sampler()
    sampler.patcher.object_patches[key] = value
    sampler.run(lambda: sampler.forward(0.5, silent))
    assert not any(key in note and "instead" in note for note in notes(sampler))


def test_functions_written_onto_modules_are_named(make_sampler):
    """As packs do that know no object patches."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
    for block in model.blocks:
        block.self_attn = torch.nn.Identity()
        block.cross_attn = torch.nn.Identity()
    model.forward_orig = theirs
    model.blocks[2].self_attn.forward = theirs
    model.blocks[2].cross_attn.forward = theirs
    sampler = make_sampler()
    sampler.patcher.model.diffusion_model = model
    sampler.run(lambda: sampler.forward(0.5, silent))
    note = notes(sampler)[0]
    assert f"diffusion_model.forward_orig ({HERE}.theirs)" in note
    assert f"diffusion_model.blocks.2.self_attn.forward ({HERE}.theirs)" in note
    assert "cross_attn" not in note


def test_a_forward_that_was_put_back_is_not_blamed(make_sampler):
    """Taking an object patch off, ComfyUI writes the module's own forward onto it."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Module()])
    model.blocks[0].self_attn = torch.nn.Identity()
    model.blocks[0].self_attn.forward = model.blocks[0].self_attn.forward
    sampler = make_sampler()
    sampler.patcher.model.diffusion_model = model
    sampler.run(lambda: sampler.forward(0.5, silent))
    assert not any("instead" in note for note in notes(sampler))


def test_callbacks_are_named_when_no_call_came(make_sampler):
    """Another sparse node that puts its override in place at every step."""
    sampler = make_sampler()
    sampler.patcher.callbacks = {"on_prepare_state": {"sparse": [theirs], KEY: [theirs]}}
    sampler.run(lambda: sampler.forward(0.5, silent))
    assert f"instead: sparse ({HERE}.theirs)" in notes(sampler)[0]


def test_a_patched_forward_that_still_calls_attention_is_not_blamed(make_sampler):
    sampler = make_sampler()
    for index in range(4):
        sampler.patcher.object_patches[f"diffusion_model.blocks.{index}.forward"] = theirs
    sampler.run()
    assert notes(sampler) == []


# -- skipped evaluations -----------------------------------------------------------------------


def test_skipped_evaluations_name_the_wrappers(make_sampler):
    sampler = make_sampler()
    sampler.patcher.wrappers = {
        "diffusion_model": {"somecache": [theirs], "torch.compile": [theirs]},
        "apply_model": {KEY: [theirs], None: [theirs]},
        "outer_sample": {"unrelated": [theirs]},
    }

    def body():
        for sigma in sampler.sigmas[:-1]:
            sampler.forward(sigma, silent if sigma == 0.5 else None)

    sampler.run(body)
    (note,) = notes(sampler)
    assert note == (
        "1 of 4 evaluations made no attention call; answered instead by "
        f"{HERE}.theirs; somecache ({HERE}.theirs)"
    )
    # By sigma: a step that ran no attention moves no other.
    assert sampler.report["map"][2] == [None] * 4
    assert sampler.report["density_by_step"][3] is not None


def test_steps_that_never_ran_the_model_name_what_stands_around_a_step(make_sampler):
    options = {"transformer_options": {"wrappers": {"predict_noise": {"lazy": [theirs]}}}}
    options["model_function_wrapper"] = theirs
    sampler = make_sampler(options=options)
    sampler.run(lambda: [sampler.forward(sigma) for sigma in (1.0, 0.25)])
    (note,) = notes(sampler)
    assert note.startswith("2 of 4 steps did not run the model; what may have answered: lazy (")
    assert f"model_function_wrapper ({HERE}.theirs)" in note
    assert sampler.report["forwards"] == sampler.report["evaluations"] == 2


def test_a_cache_that_skips_nothing_is_not_named(make_sampler):
    sampler = make_sampler()
    sampler.patcher.wrappers = {"diffusion_model": {"somecache": [theirs]}}
    sampler.run()
    assert notes(sampler) == []


def test_an_aborted_run_blames_nobody(make_sampler):
    sampler = make_sampler()
    sampler.patcher.object_patches["diffusion_model.forward"] = theirs

    def body():
        sampler.forward(1.0, silent)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        sampler.run(body)
    assert notes(sampler) == []


# -- other overrides ---------------------------------------------------------------------------


def test_an_override_before_ours_is_named_with_what_it_handed_on(make_sampler):
    sampler = make_sampler()

    def model(options):
        ours = options[OVERRIDE]

        def sparse(func, q, *args, **kwargs):
            index = kwargs["transformer_options"]["block_index"]
            own = index == 2 and q.shape == args[0].shape
            return q if own else ours(func, q, *args, **kwargs)

        options[OVERRIDE] = sparse
        sampler.blocks(options)

    sampler.run(lambda: sampler.forward(0.5, model))
    first, second = notes(sampler)
    # 4 cross-attention calls and the self-attention of 3 blocks.
    assert first.startswith("another override stood before Sol Attention and handed on 7 calls: ")
    assert first.endswith("<locals>.sparse")
    assert second.startswith("no self-attention call from blocks 2;")
    assert sampler.report["sparse_calls"] == 3


def test_an_override_that_replaced_ours_and_hands_on_is_named_once(make_sampler):
    options = {"transformer_options": {}}
    sampler = make_sampler(options=options)

    def body():
        ours = options["transformer_options"][OVERRIDE]
        options["transformer_options"][OVERRIDE] = lambda *args, **kwargs: ours(*args, **kwargs)
        sampler.euler()

    sampler.run(body)
    (note,) = notes(sampler)
    assert note.startswith("another override stood before")
    assert sampler.report["sparse_calls"] == 16
    assert options == {"transformer_options": {}}


def test_our_own_override_is_no_neighbour(make_sampler):
    sampler = make_sampler(
        options={"transformer_options": {OVERRIDE: lambda f, *a, **k: f(*a, **k)}}
    )
    sampler.run()
    assert notes(sampler) == []


# -- robustness --------------------------------------------------------------------------------


def test_nothing_another_pack_keeps_can_fail_a_finished_run(make_sampler, caplog):
    sampler = make_sampler()
    sampler.patcher.wrappers = {"diffusion_model": ["not", "a", "dict"]}
    with caplog.at_level(logging.ERROR):
        sampler.run(lambda: sampler.forward(0.5, silent))
    assert sampler.report["status"] == "finished"
    assert any("can't be told" in note for note in notes(sampler))
    assert "Traceback" in caplog.text


def test_patterns_know_where_self_attention_is():
    inside = ["", ".blocks.0", ".blocks.39", ".blocks.1.self_attn", ".blocks.1.attn"]
    outside = [".blocks", ".blocks.1.cross_attn", ".blocks.1.self_attn.q", ".head"]
    match = neighbours._PLACE.fullmatch
    assert [place for place in inside if not match("diffusion_model" + place)] == []
    assert [place for place in outside if match("diffusion_model" + place)] == []
