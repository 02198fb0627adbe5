"""The attention override: which calls it takes, and what happens to all others."""

import copy
import functools
import inspect
import types

import pytest
import torch

from hopper_sol.kernels import SolAttnConfig, TokenLayout, inverse, morton_order, sol_attention
from hopper_sol.nodes.patching.override import OVERRIDE, installed, make_override
from hopper_sol.nodes.patching.plan import KEY

TOKENS = 5 * 7 * 9
LAYOUTS = ["wan", "h3"]


def arrange(q, k, v, layout):
    """(arguments, keywords) of an attention call on (B, T, H, D) tensors.

    wan: (B, N, H * D), heads by keyword. h3: (B, H, N, D) views of one fused buffer, heads by
    position.
    """
    heads = q.shape[2]
    if layout == "wan":
        return [x.flatten(2) for x in (q, k, v)], {"heads": heads}
    fused = torch.stack([q, k, v], 2)
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    assert not any(x.is_contiguous() for x in views)
    return [*views, heads], {"mask": None, "skip_reshape": True}


def restore(out, heads, skip_output_reshape):
    """An attention output as (B, T, H, D)."""
    return out.transpose(1, 2) if skip_output_reshape else out.unflatten(2, (heads, -1))


def config(**changes):
    """Settings that a sampler of the fixtures resolves to."""
    return SolAttnConfig(
        **{"estimator": "exact", "precision": "bf16", "v_bias_correction": False, **changes}
    )


@pytest.mark.parametrize("skip_output_reshape", [False, True], ids=["bnd", "bhnd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
def test_override_all_exact_equals_sdpa(
    order, layout, skip_output_reshape, make_sampler, qkv, sdpa
):
    sampler = make_sampler(tau=-1000.0, token_order=order)
    q, k, v = qkv(TOKENS)
    args, kwargs = arrange(q, k, v, layout)
    kwargs["skip_output_reshape"] = skip_output_reshape
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    want = sdpa(*args, **kwargs)
    assert out.shape == want.shape
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert sampler.func.calls == []
    assert sampler.report["sparse_calls"] == 1
    assert sampler.report["density"] == 1.0


@pytest.mark.parametrize("skip_output_reshape", [False, True], ids=["bnd", "bhnd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
def test_override_sparse_equals_sol_attention(
    order, layout, skip_output_reshape, make_sampler, qkv, sdpa
):
    """With a token order: Sol-Attn of permuted tokens, un-permuted."""
    sampler = make_sampler(tau=1.0, token_order=order)
    q, k, v = qkv(TOKENS)
    args, kwargs = arrange(q, k, v, layout)
    kwargs["skip_output_reshape"] = skip_output_reshape
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))

    permutation = torch.arange(TOKENS)
    if order != "none":
        permutation = morton_order((5, 7, 9), per_frame=order == "morton_2d")
    permuted = [x[:, permutation] for x in (q, k, v)]
    want = sol_attention(*permuted, config=config(tau=1.0))[:, inverse(permutation)]
    got = restore(out, 2, skip_output_reshape)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    dense = restore(sdpa(*args, **kwargs), 2, skip_output_reshape)
    assert (got - dense).abs().max() > 0.1, "nothing was summarised"
    assert sampler.report["density"] < 1
    assert sampler.func.calls == []


def test_override_token_orders_give_different_blocks(make_sampler, qkv):
    args, kwargs = arrange(*qkv(TOKENS), "wan")
    outputs = []
    for order in ("none", "morton_3d", "morton_2d"):
        sampler = make_sampler(tau=1.0, token_order=order)
        attend = functools.partial(sampler.attend, *args, **kwargs)
        outputs.append(sampler.once(lambda o, a=attend: a(transformer_options=o)))
    for i in range(3):
        assert (outputs[i] - outputs[i - 1]).abs().max() > 1e-3


def test_override_passes_the_layout_on(make_sampler, qkv, kernel):
    sampler = make_sampler()
    args, kwargs = arrange(*qkv(TOKENS), "wan")
    sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    assert kernel.calls[0][1]["layout"] == TokenLayout(video=(0, TOKENS), grid=(5, 7, 9))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_override_passes_the_scale_on(layout, make_sampler, qkv, sdpa):
    sampler = make_sampler(tau=-1000.0)
    args, kwargs = arrange(*qkv(TOKENS), layout)
    kwargs["scale"] = 0.03
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    torch.testing.assert_close(out, sdpa(*args, **kwargs), rtol=1e-5, atol=1e-5)
    assert sampler.func.calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_override_keeps_the_dtype(dtype, make_sampler, qkv, sdpa):
    sampler = make_sampler(tau=-1000.0)
    args, kwargs = arrange(*qkv(TOKENS, dtype=dtype), "h3")
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    assert out.dtype == dtype
    want = sdpa(*(x.float() for x in args[:3]), *args[3:], **kwargs)
    # One rounding of the output: half a unit in the last place of its size.
    torch.testing.assert_close(out.float(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


# -- calls that are not ours -------------------------------------------------------------------


def _call(qkv, options, **changes):
    """Arguments of an eligible call, plus kwargs that only the receiver could know."""
    q, k, v = (x.flatten(2) for x in qkv(TOKENS))
    call = {
        "q": q,
        "k": k,
        "v": v,
        "heads": 2,
        "mask": None,
        "attn_precision": torch.float32,
        "skip_reshape": False,
        "skip_output_reshape": False,
        "transformer_options": options,
        "_inside_attn_wrapper": True,
        "of_a_later_comfyui": object(),
    }
    return {**call, **changes}


def _other_tokens(call):
    call.update({name: call[name][:, :-1] for name in "qkv"})


def _mask(dtype):
    def change(call):
        call["mask"] = torch.ones(TOKENS, TOKENS, dtype=dtype)

    return change


def _cross(call):
    call.update(k=call["k"][:, :77], v=call["v"][:, :77])


def _other_v(call):
    call.update(v=call["v"][..., :128])


def _set(**changes):
    return lambda call: call.update(changes)


def _no_options(call):
    del call["transformer_options"]


def _foreign_options(call):
    call["transformer_options"] = {"block_index": 1}


def _no_block_index(call):
    del call["transformer_options"]["block_index"]


def _second_call(call):
    call["transformer_options"][KEY].last_block = 1


DECLINED = {
    "bool-mask": (_mask(torch.bool), "dense_calls", "attention mask"),
    "float-mask": (_mask(torch.float32), "dense_calls", "attention mask"),
    "cross-attention": (_cross, "other_calls", "cross-attention"),
    "equal-length-cross-attention": (_second_call, "other_calls", "cross-attention"),
    "narrow-v": (_other_v, "other_calls", "cross-attention"),
    "other-tokens": (_other_tokens, "dense_calls", "314 tokens, need the 315 of the video and its conditioning"),
    "no-options": (_no_options, "other_calls", "outside the patched model"),
    "options-none": (
        _set(transformer_options=None), "other_calls", "outside the patched model",
    ),
    "foreign-options": (_foreign_options, "other_calls", "outside the patched model"),
    "full-precision": (
        _set(low_precision_attention=False), "dense_calls", "the model asks for full precision",
    ),
    "no-block-index": (_no_block_index, "dense_calls", "block index unknown"),
    "head-dim-64": (_set(heads=4), "dense_calls", "head_dim 64, need 128"),
    "head-dim-256": (_set(heads=1), "dense_calls", "head_dim 256, need 128"),
}  # fmt: skip


@pytest.mark.parametrize("chained", [False, True], ids=["func", "previous"])
@pytest.mark.parametrize("case", DECLINED)
def test_override_hands_a_declined_call_on_untouched(case, chained, make_sampler, qkv, kernel, spy):
    """Once, to whoever is next, with the same objects in every argument; returns its result."""
    change, counter, reason = DECLINED[case]
    result = object()
    func = spy(lambda *args, **kwargs: result)
    previous = spy(lambda *args, **kwargs: result)
    options = {"transformer_options": {OVERRIDE: previous} if chained else {}}
    sampler = make_sampler(options=options, fp8_layers="2")
    sent = {}

    def inside(options):
        sent.update(_call(qkv, options))
        change(sent)
        sent["versions"] = [sent[name]._version for name in "qkv"]
        arguments = {name: value for name, value in sent.items() if name != "versions"}
        return options[OVERRIDE](func, **arguments)

    assert sampler.once(inside) is result
    assert sampler.report[counter] == {reason: 1}
    assert sampler.report["sparse_calls"] == 0
    assert kernel.calls == []

    receiver, other = (previous, func) if chained else (func, previous)
    assert other.calls == []
    ((args, kwargs, _),) = receiver.calls
    if chained:
        assert args[0] is func
        args = args[1:]
    assert [id(x) for x in args] == [id(sent[name]) for name in ("q", "k", "v", "heads")]
    assert [x._version for x in args[:3]] == sent.pop("versions"), "inputs were written into"
    expected = {name: value for name, value in sent.items() if name not in ("q", "k", "v", "heads")}
    assert kwargs.keys() == expected.keys()
    assert all(kwargs[name] is value for name, value in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [40, 64, 72, 80, 96, 128, 160])
def test_override_takes_head_dim_128_only(dim, layout, make_sampler, qkv, kernel):
    sampler = make_sampler(tau=-1000.0)
    args, kwargs = arrange(*qkv(TOKENS, dim=dim), layout)
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    if dim == 128:
        assert len(kernel.calls) == 1 and sampler.func.calls == []
    else:
        assert kernel.calls == []
        assert [result for *_, result in sampler.func.calls] == [out]
        assert sampler.report["dense_calls"] == {f"head_dim {dim}, need 128": 1}


def test_override_keeps_wrap_attn_from_reentering(make_sampler, qkv):
    """A declined call that lost ``_inside_attn_wrapper`` would come back to us for ever."""
    sampler = make_sampler()

    def reentering(q, k, v, heads, **kwargs):
        return sampler.attend(q, k, v, heads, **kwargs)

    args, kwargs = arrange(*qkv(TOKENS, dim=64), "wan")

    def inside(options):
        return options[OVERRIDE](
            reentering, *args, **kwargs, transformer_options=options, _inside_attn_wrapper=True
        )

    sampler.once(inside)
    assert len(sampler.func.calls) == 1


def test_override_equal_length_cross_attention_is_told_apart(make_sampler, qkv):
    """A text of exactly as many tokens as the video: the second call of a block is its text."""
    sampler = make_sampler()
    args, kwargs = arrange(*qkv(TOKENS), "wan")

    def model(options):
        for index in range(4):
            for _ in range(2):
                sampler.block(
                    options,
                    index,
                    lambda o: sampler.attend(*args, **kwargs, transformer_options=o),
                )

    sampler.run(lambda: sampler.forward(0.5, model))
    assert sampler.report["sparse_calls"] == 4
    assert sampler.report["other_calls"] == {"cross-attention": 4}
    assert len(sampler.func.calls) == 4


def test_override_without_a_block_index_is_dense(make_sampler, qkv, kernel):
    """Whatever the layer texts say: such a call may be anything, a text refiner's too."""
    sampler = make_sampler(dense_layers="none", fp8_layers="none")
    args, kwargs = arrange(*qkv(TOKENS), "wan")
    sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o), block=None)
    assert len(kernel.calls) == 0
    assert sampler.report["dense_calls"] == {"block index unknown": 1}


# -- shapes and memory layouts -----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_override_batch_equals_single_runs(batch, layout, make_sampler, qkv):
    q, k, v = qkv(TOKENS, batch=batch)

    def attend(q, k, v):
        sampler = make_sampler(batch=q.shape[0])
        args, kwargs = arrange(q, k, v, layout)
        return sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))

    together = attend(q, k, v)
    apart = torch.cat([attend(*(x[i : i + 1] for x in (q, k, v))) for i in range(batch)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


def _fused(x):
    return torch.stack([x, x + 1, x + 2], 2)[:, :, 0]


def _batch_slice(x):
    return torch.cat([x + 1, x])[1:2]


def _offset(x):
    return torch.cat([x[:, :7], x], 1)[:, 7:]


def _from_bhnd(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _odd_offset(x):
    """Starts 4 bytes into its storage, which no 16-byte load survives."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _channels_first(x):
    """Last dimension strided: no kernel reads this as it stands."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("order", ["none", "morton_3d"])
@pytest.mark.parametrize(
    "view", [_fused, _batch_slice, _offset, _from_bhnd, _odd_offset, _channels_first]
)
def test_override_views_equal_contiguous(view, order, make_sampler, qkv, kernel):
    q, k, v = qkv(TOKENS)

    def attend(*tensors):
        sampler = make_sampler(token_order=order)
        before = [x.clone() for x in tensors]
        out = sampler.once(
            lambda o: sampler.attend(
                *(x.transpose(1, 2) for x in tensors), 2, skip_reshape=True, transformer_options=o
            )
        )
        assert sampler.report["sparse_calls"] == 1, sampler.report["notes"]
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
        return out

    views = [view(x) for x in (q, k, v)]
    assert all(torch.equal(x, y) for x, y in zip(views, (q, k, v), strict=True))
    # PyTorch's own CPU kernels round differently where memory is not aligned.
    tolerance = 1e-6 if view is _odd_offset else 0
    torch.testing.assert_close(attend(*views), attend(q, k, v), rtol=0, atol=tolerance)


@pytest.mark.parametrize("tail", [1, 16, 24, 33, 56, 63])
def test_override_any_number_of_tokens(tail, make_sampler, qkv, sdpa):
    tokens = 192 + tail
    sampler = make_sampler(tau=-1000.0, grid=(1, 1, tokens))
    args, kwargs = arrange(*qkv(tokens), "wan")
    out = sampler.once(lambda o: sampler.attend(*args, **kwargs, transformer_options=o))
    torch.testing.assert_close(out, sdpa(*args, **kwargs), rtol=1e-5, atol=1e-5)


def test_override_tokens_may_change_within_a_step(make_sampler, qkv, kernel, sdpa):
    """Conditioning areas and context windows: other sizes under one sigma, nothing stale."""
    sampler = make_sampler(tau=-1000.0)
    outputs = []

    def body():
        for grid in ((5, 7, 9), (6, 7, 9), (3, 7, 9), (5, 7, 9), (5, 9, 7)):
            latent = torch.zeros(1, 4, *grid)
            args, kwargs = arrange(*qkv(latent[0, 0].numel()), "wan")

            def model(options, args=args, kwargs=kwargs):
                options["block_index"] = 1
                out = sampler.attend(*args, **kwargs, transformer_options=options)
                outputs.append((out, sdpa(*args, **kwargs)))

            sampler.forward(0.5, model, latent)

    sampler.run(body)
    for out, want in outputs:
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert len(kernel.calls) == 5
    assert sampler.report["tokens"] == [189, 315, 378]
    assert sampler.report["map"][2][1] == 1.0


# -- what kind of object it is -----------------------------------------------------------------


def test_override_is_a_plain_function():
    """ComfyUI deep-copies callable objects, and calls a ``container_function`` instead of us."""
    override = make_override(None, None)
    assert type(override) is types.FunctionType
    assert not hasattr(override, "container_function")
    assert copy.deepcopy(override) is override


def test_override_does_not_inherit_a_container_function(spy):
    """A previous override may have one; ours can't hand boxes on."""
    previous = spy(None)
    previous.container_function = lambda *args, **kwargs: None
    assert not hasattr(make_override(None, previous), "container_function")


def test_override_is_not_traced_by_torch_compile():
    assert make_override(None, None)._torchdynamo_disable


def test_override_has_the_signature_comfyui_calls():
    parameters = inspect.signature(make_override(None, None)).parameters
    assert list(parameters) == [
        "func", "q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape",
        "skip_output_reshape", "kwargs",
    ]  # fmt: skip
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert [parameters[name].default for name in list(parameters)[5:9]] == [
        None, None, False, False,
    ]  # fmt: skip


# -- on and off again --------------------------------------------------------------------------


def _previous(func, *args, **kwargs):
    return func(*args, **kwargs)


def _existing(args, extra):
    return extra["original_block"](args)


def _with_everything():
    return {
        "transformer_options": {
            OVERRIDE: _previous,
            "patches_replace": {
                "dit": {("double_block", 1): _existing, ("single_block", 0): _existing},
                "attn1": {"x": 1},
            },
            "patches": {"attn1_patch": [1]},
        },
        "multigpu": 2,
    }


OPTIONS = {
    "plain": lambda: {"transformer_options": {}},
    "everything": _with_everything,
    "other-replacements": lambda: {
        "transformer_options": {"patches_replace": {"attn1": {"x": _existing}}}
    },
}


def snapshot(data):
    """Nested dicts as (id, items), everything else by identity."""
    if isinstance(data, dict):
        return id(data), {key: snapshot(value) for key, value in data.items()}
    return id(data)


@pytest.mark.parametrize("published", [True, False], ids=["published", "patched"])
@pytest.mark.parametrize("outcome", ["success", "exception", "interrupt", "exit"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_installed_restores_the_options(
    kind, outcome, published, make_sampler, make_adapter, interrupt
):
    """The same dict holds the same objects as before, whatever ended the run."""
    options = OPTIONS[kind]()
    before = snapshot(options)
    sampler = make_sampler(options=options, adapter=make_adapter(publishes_block_index=published))
    error = {"exception": RuntimeError, "interrupt": interrupt, "exit": KeyboardInterrupt}

    def body():
        assert options["transformer_options"][OVERRIDE] is not _previous
        sampler.forward(0.5)
        if outcome in error:
            raise error[outcome]

    if outcome in error:
        with pytest.raises(error[outcome]):
            sampler.run(body)
    else:
        sampler.run(body)
    assert snapshot(options) == before
    assert sampler.report["sparse_calls"] == 4


def test_installed_needs_no_transformer_options(make_sampler):
    options = {}
    sampler = make_sampler(options=options)
    sampler.run(lambda: sampler.forward(0.5))
    assert sampler.report["sparse_calls"] == 4
    assert options == {"transformer_options": {}}


def test_installed_restores_after_the_override_was_replaced(make_sampler):
    options = _with_everything()
    before = snapshot(options)
    sampler = make_sampler(options=options)
    sampler.run(lambda: options["transformer_options"].update({OVERRIDE: _existing}))
    assert snapshot(options) == before
    (note,) = sampler.report["notes"]
    assert note.startswith("the attention override was replaced during the run by ")
    assert note.endswith("._existing")


@pytest.mark.parametrize("replacement", [None, object(), "removed"])
def test_installed_notes_any_kind_of_replacement(replacement, make_sampler):
    options = {"transformer_options": {}}
    sampler = make_sampler(options=options)

    def body():
        if replacement == "removed":
            del options["transformer_options"][OVERRIDE]
        else:
            options["transformer_options"][OVERRIDE] = replacement

    sampler.run(body)
    (note,) = sampler.report["notes"]
    assert "was replaced during the run" in note
    assert options == {"transformer_options": {}}


def test_installed_publishes_a_block_index_for_every_block(make_sampler, make_adapter):
    """ComfyUI of 2025 tells no block index: a block replacement notes it, chained over others."""
    seen = []

    def existing(args, extra):
        seen.append((args, extra))
        return extra["original_block"](args)

    single = object()
    dit = {("double_block", 2): existing, ("single_block", 0): single}
    options = {"transformer_options": {"patches_replace": {"dit": dit, "other": 1}}}
    adapter = make_adapter(publishes_block_index=False)
    sampler = make_sampler(options=options, adapter=adapter, dense_layers="0,-1")

    def body():
        installed_dit = options["transformer_options"]["patches_replace"]["dit"]
        assert options["transformer_options"]["patches_replace"]["other"] == 1
        assert installed_dit["single_block", 0] is single
        assert set(installed_dit) == {("double_block", i) for i in range(4)} | {("single_block", 0)}
        for function in installed_dit.values():
            assert not isinstance(function, types.FunctionType) or (
                copy.deepcopy(function) is function
            )
        sampler.forward(0.5)

    sampler.run(body)
    assert dit == {("double_block", 2): existing, ("single_block", 0): single}
    ((args, extra),) = seen
    assert set(args) == {"img", "transformer_options"} and set(extra) == {"original_block"}
    first, *middle, last = sampler.report["map"][2]
    assert first == last == 1.0
    assert all(0 < density < 1 for density in middle)
    assert sampler.report["dense_calls"] == {"dense layer": 2}
    assert sampler.report["sparse_calls"] == 2


def test_installed_block_index_returns_what_the_block_returns(make_sampler, make_adapter):
    sampler = make_sampler(adapter=make_adapter(publishes_block_index=False))
    result = {"img": object()}
    assert sampler.once(lambda options: result) is result


def test_installed_block_index_leaves_the_block_to_an_existing_replacement(
    make_sampler, make_adapter
):
    """What stood there decides what the block is, and whether the original runs at all."""
    result = {"img": object()}
    dit = {("double_block", 1): lambda args, extra: result}
    options = {"transformer_options": {"patches_replace": {"dit": dit}}}
    sampler = make_sampler(options=options, adapter=make_adapter(publishes_block_index=False))
    assert sampler.once(lambda options: pytest.fail("the original block ran")) is result


def test_installed_block_index_outside_a_forward_changes_nothing(make_sampler, make_adapter):
    """Another pack may run a block by hand, with its own or no options."""
    options = {"transformer_options": {}}
    sampler = make_sampler(options=options, adapter=make_adapter(publishes_block_index=False))

    def body():
        patch = options["transformer_options"]["patches_replace"]["dit"]["double_block", 0]
        args = {"img": 1}
        assert patch(args, {"original_block": lambda args: ("block", args)}) == ("block", args)

    sampler.run(body)


@pytest.mark.parametrize(
    ("published", "unsupported", "patched"),
    [(True, None, False), (False, None, True), (False, "not yet", False)],
)
def test_installed_patches_blocks_only_where_needed(
    published, unsupported, patched, make_sampler, make_adapter
):
    """Variants that we leave alone may not survive a block replacement."""
    options = {"transformer_options": {}}
    adapter = make_adapter(publishes_block_index=published, unsupported=unsupported)
    sampler = make_sampler(options=options, adapter=adapter)
    sampler.run(
        lambda: (
            pytest.fail("patches_replace")
            if ("patches_replace" in options["transformer_options"]) != patched
            else None
        )
    )


def test_installed_is_asked_first(make_sampler, qkv, spy, kernel):
    """An earlier override gets what we decline and nothing else (A1)."""
    previous = spy(_previous)
    sampler = make_sampler(options={"transformer_options": {OVERRIDE: previous}}, dense_layers="0")
    sampler.run(lambda: sampler.forward(0.5))
    assert len(kernel.calls) == 3
    assert len(previous.calls) == 1 + 4  # the dense layer and every cross-attention
    assert len(sampler.func.calls) == 5
    assert sampler.report["sparse_calls"] == 3
    assert sampler.report["dense_calls"] == {"dense layer": 1}
    assert sampler.report["other_calls"] == {"cross-attention": 4}


def test_installed_on_unrelated_options_is_inert(make_sampler, qkv):
    """The override of a run answers only for forwards of that run."""
    sampler = make_sampler()
    foreign = {"transformer_options": {}}
    args, kwargs = arrange(*qkv(TOKENS), "wan")

    def body():
        with installed(sampler.runtime._active[-1], foreign):
            options = {**foreign["transformer_options"], "block_index": 1}
            sampler.attend(*args, **kwargs, transformer_options=options)

    sampler.run(body)
    assert len(sampler.func.calls) == 1
    assert sampler.report["other_calls"] == {"outside the patched model": 1}
