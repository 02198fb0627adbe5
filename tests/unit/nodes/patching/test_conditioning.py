"""Forwards with more than the video in their sequence, and models with blocks inside blocks."""

from dataclasses import dataclass

import pytest
import torch

from hopper_sol.kernels import SolAttnConfig, TokenLayout, morton_order, sol_attention, span_order
from hopper_sol.nodes.models import TokenSequence
from hopper_sol.nodes.patching import run as run_module
from hopper_sol.nodes.patching.latent_mark import mark_of

GRID = (5, 7, 9)
VIDEO = 5 * 7 * 9


@dataclass(frozen=True)
class Sizes:
    """What stands for a model's conditioning: numbers of tokens."""

    before: int = 0
    after: int = 0


@pytest.fixture
def sampler(make_sampler, make_adapter, monkeypatch):
    """Factory: a sampler of a model that puts ``before`` and ``after`` tokens beside the video."""

    def make(before=0, after=0, nested_blocks=False, publishes=True, **changes):
        adapter = make_adapter(nested_blocks=nested_blocks, publishes_block_index=publishes)

        def sequence(self, latent_shape, inputs):
            sizes = inputs.get("sizes", Sizes(before, after))
            return TokenSequence(self.grid(latent_shape), sizes.before, sizes.after)

        monkeypatch.setattr(type(adapter), "sequence", sequence)
        monkeypatch.setattr(type(adapter), "prefix_words", "reference tokens")
        return make_sampler(adapter=adapter, **changes)

    return make


def attend(sampler, tensors, block=1):
    """One forward of one self-attention call on (B, T, H, D) tensors."""
    q, k, v = (x.flatten(2) for x in tensors)
    out = sampler.once(lambda o: sampler.attend(q, k, v, 2, transformer_options=o), block=block)
    return out.unflatten(2, (2, -1))


def config(**changes):
    return SolAttnConfig(
        **{"estimator": "exact", "precision": "bf16", "v_bias_correction": False, **changes}
    )


PLACES = [(0, 0), (63, 0), (64, 0), (70, 0), (0, 1), (0, 100), (37, 50)]


@pytest.mark.parametrize(("before", "after"), PLACES)
@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
def test_all_exact_equals_sdpa(before, after, order, sampler, qkv, sdpa):
    tensors = qkv(before + VIDEO + after)
    patched = sampler(before, after, tau=-1000.0, token_order=order)
    out = attend(patched, tensors)
    want = sdpa(*(x.flatten(2) for x in tensors), 2).unflatten(2, (2, -1))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert patched.report["sparse_calls"] == 1
    assert patched.report["tokens"] == before + VIDEO + after


@pytest.mark.parametrize(("before", "after"), PLACES)
@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
def test_sparse_equals_the_op_on_permuted_tensors(before, after, order, sampler, qkv):
    tokens = before + VIDEO + after
    tensors = qkv(tokens)
    out = attend(sampler(before, after, token_order=order, tau=1.0), tensors)

    positions = torch.arange(tokens)
    if order != "none":
        curve = morton_order(GRID, per_frame=order == "morton_2d")
        positions = span_order(curve, before, tokens)
    ranges = tuple(r for r in ((0, before), (before + VIDEO, tokens)) if r[0] < r[1])
    want = torch.empty_like(out)
    want[:, positions] = sol_attention(
        *(x[:, positions] for x in tensors),
        config=config(tau=1.0),
        layout=TokenLayout(sink_kv=ranges),
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["none", "morton_3d", "morton_2d"])
def test_every_block_of_the_video_is_one_cell_whatever_stands_in_front(order, sampler, kernel):
    """A span that starts inside a block is rotated; the first whole block starts a cell."""
    patched = sampler(70, 30, token_order=order)
    attend(patched, [torch.zeros(1, 415, 2, 128)] * 3)
    ((_, call, _),) = kernel.calls
    if order == "none":
        assert call["order"] is None
        return
    positions = call["order"]
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert sorted(positions.tolist()) == list(range(415))
    assert positions[:70].tolist() == list(range(70))
    assert positions[-30:].tolist() == list(range(385, 415))
    curve = morton_order(GRID, per_frame=order == "morton_2d") + 70
    assert positions[128:192].tolist() == curve[:64].tolist()


def test_tokens_stay_where_the_model_put_them(sampler, kernel, qkv):
    """The op gets the model's own tensors: permuting is its business."""
    q, k, v = (x.flatten(2) for x in qkv(VIDEO))
    patched = sampler(token_order="morton_3d")
    patched.once(lambda o: patched.attend(q, k, v, 2, transformer_options=o))
    ((args, _, _),) = kernel.calls
    assert [x.data_ptr() for x in args] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize(
    ("sinks", "sink_kv", "dense_q"),
    [
        ("auto", True, False),
        ("kv", True, False),
        ("audio_rows", True, False),
        ("kv_and_rows", True, True),
        ("off", False, False),
    ],
)
def test_sinks_decide_what_conditioning_is(sinks, sink_kv, dense_q, sampler, kernel):
    patched = sampler(70, 30, sinks=sinks)
    attend(patched, [torch.zeros(1, 415, 2, 128)] * 3)
    layout = kernel.calls[0][1]["layout"]
    ranges = ((0, 70), (385, 415))
    assert layout.sink_kv == (ranges if sink_kv else ())
    assert layout.dense_q == (ranges if dense_q else ())
    assert (layout.video, layout.grid) == ((70, 385), GRID)


def test_conditioning_reaches_every_token_exactly(sampler, qkv):
    """A huge value in one reference token: its weight in each row is that of dense attention."""
    q, k, v = qkv(64 + VIDEO)
    v = torch.zeros_like(v)
    v[:, 5] = 1000.0
    out = attend(sampler(before=64, tau=8.0), (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k) * 128**-0.5
    # Summaries of the other blocks stand for sums of exponents by their mean: compare the ratio of
    # two reference tokens, which no summary enters.
    v2 = torch.zeros_like(v)
    v2[:, 6] = 1000.0
    other = attend(sampler(before=64, tau=8.0), (q, k, v2))
    ratio = (out / other)[..., 0].permute(0, 2, 1)
    want = (weights[..., 5] - weights[..., 6]).exp()
    torch.testing.assert_close(ratio, want, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("before", "after", "sinks", "note"),
    [
        (70, 0, "auto", "reference tokens: 70 in front of the video; they are exact for every token"),
        (0, 9, "kv", "reference tokens: 9 behind the video; they are exact for every token"),
        (
            70, 9, "kv_and_rows",
            "reference tokens: 70 in front of and 9 behind the video; they are exact, and so is "
            "their own attention",
        ),
        (70, 0, "off", "reference tokens: 70 in front of the video; they are treated like the video"),
    ],
)  # fmt: skip
def test_conditioning_is_noted_once_a_run(before, after, sinks, note, sampler):
    patched = sampler(before, after, sinks=sinks)
    tokens = before + VIDEO + after
    q = torch.zeros(1, tokens, 256)

    def model(options):
        for index in range(4):
            options["block_index"] = index
            patched.attend(q, q, q, 2, transformer_options=options)

    patched.run(lambda: [patched.forward(s, model) for s in (0.75, 0.5)])
    assert patched.report["notes"] == [note]
    assert patched.report["sparse_calls"] == 8


@pytest.mark.parametrize("sinks", ["kv", "kv_and_rows", "audio_rows"])
def test_sinks_with_nothing_to_act_on_are_noted(sinks, sampler):
    patched = sampler(sinks=sinks)
    patched.run()
    note = f"sinks {sinks}: this run had no reference tokens in its sequence"
    assert patched.report["notes"] == [note]


@pytest.mark.parametrize("sinks", ["auto", "off"])
def test_sinks_nobody_asked_for_are_not_noted(sinks, sampler):
    patched = sampler(sinks=sinks)
    patched.run()
    assert patched.report["notes"] == []


def test_conditioning_may_differ_between_forwards(sampler, executor, kernel, qkv):
    """With and without a reference (a conditional and an unconditional call), other lengths."""
    patched = sampler(token_order="morton_3d")
    options = {}

    def body():
        for sizes in (Sizes(), Sizes(before=64), Sizes(), Sizes(after=64)):
            tensors = [x.flatten(2) for x in qkv(VIDEO + sizes.before + sizes.after)]

            def model(*args, tensors=tensors, **kwargs):
                inner = {**options, **patched.guider.model_options["transformer_options"]}
                patched.attend(*tensors, 2, transformer_options={**inner, "block_index": 1})

            call = executor(model, None)
            args = (patched.latent, None, None, None, None, options)
            patched.runtime.apply_model(call, *args, sizes=sizes)

    patched.run(body)
    assert patched.report["sparse_calls"] == 4
    assert [call["layout"].video for _, call, _ in kernel.calls] == [
        (0, VIDEO), (64, 64 + VIDEO), (0, VIDEO), (0, VIDEO),
    ]  # fmt: skip
    lengths = [call["order"].numel() for _, call, _ in kernel.calls]
    assert lengths == [VIDEO, VIDEO + 64, VIDEO, VIDEO + 64]
    first, second, third, fourth = (call["order"] for _, call, _ in kernel.calls)
    assert first is third
    assert not torch.equal(second, fourth)
    notes = [note for note in patched.report["notes"] if note.startswith("reference tokens")]
    assert [note.split(" the video")[0] for note in notes] == [
        "reference tokens: 64 in front of", "reference tokens: 64 behind",
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [VIDEO, VIDEO + 63, VIDEO + 65])
def test_another_length_than_foreseen_stays_dense(tokens, sampler, kernel):
    patched = sampler(before=64)
    attend(patched, [torch.zeros(1, tokens, 2, 128)] * 3)
    assert kernel.calls == []
    reason = f"{tokens} tokens, need the {VIDEO + 64} of the video and its conditioning"
    assert patched.report["dense_calls"] == {reason: 1}


def test_min_tokens_counts_the_whole_sequence(sampler, kernel):
    for min_tokens, calls in ((VIDEO + 64, 1), (VIDEO + 65, 0)):
        kernel.calls.clear()
        patched = sampler(before=64, min_tokens=min_tokens)
        attend(patched, [torch.zeros(1, VIDEO + 64, 2, 128)] * 3)
        assert len(kernel.calls) == calls


def test_orders_are_kept_apart_by_what_follows_the_video(sampler, monkeypatch):
    """Same grid and place, other length: a cached order of the wrong length would be refused."""
    made = []
    real = run_module.span_order
    monkeypatch.setattr(run_module, "span_order", lambda *a: made.append(a[1:]) or real(*a))
    patched = sampler(token_order="morton_2d")

    def body():
        run = patched.runtime._active[-1]
        for after in (0, 5, 0, 5):
            info = run.begin_forward(patched.latent, {"sizes": Sizes(after=after)})
            order = run.token_order(info, torch.device("cpu"))
            assert order.numel() == VIDEO + after

    patched.run(body)
    assert made == [(0, VIDEO), (0, VIDEO + 5)]


# -- blocks inside blocks (VACE) -----------------------------------------------------------------


def vace_model(sampler, length, nested):
    """Four blocks, each with a cross-attention of ``length`` tokens, ``nested`` further blocks."""
    tensor = torch.zeros(1, VIDEO, 256)
    text = torch.zeros(1, length, 256)

    def model(options):
        for index in range(4):

            def block(options):
                sampler.attend(tensor, tensor, tensor, 2, transformer_options=options)
                sampler.attend(tensor, text, text, 2, transformer_options=options)

            sampler.block(options, index, block)
            for _ in range(nested[index]):  # VACE: after its block, with the forward's options
                block(options)

    return model


def run_vace(sampler, text, nested, executor):
    """A forward as ComfyUI begins it, c_crossattn by position."""
    model = vace_model(sampler, text, nested)
    options = {}

    def inside(*args, **kwargs):
        merged = {**sampler.guider.model_options["transformer_options"], **options}
        model(merged)

    def body():
        call = executor(inside, None)
        context = torch.zeros(1, text, 8)
        sampler.runtime.apply_model(call, sampler.latent, None, None, context, None, options)

    sampler.run(body)
    return sampler.report


@pytest.mark.parametrize("publishes", [True, False], ids=["published", "patched"])
def test_nested_blocks_are_sparse_under_their_blocks_index(publishes, sampler, executor):
    patched = sampler(nested_blocks=True, publishes=publishes, dense_layers="0")
    report = run_vace(patched, 77, [2, 0, 1, 0], executor)
    assert report["sparse_calls"] == 3 + 1
    assert report["dense_calls"] == {"dense layer": 1 + 2}
    assert report["other_calls"] == {"cross-attention": 7}


def test_nested_blocks_decline_where_text_is_as_long_as_the_video(sampler, executor, kernel):
    report = run_vace(sampler(nested_blocks=True), VIDEO, [1, 0, 0, 0], executor)
    assert kernel.calls == []
    (reason,) = report["dense_calls"]
    assert reason.startswith("315 tokens, as many as the text has")
    assert report["sparse_calls"] == 0


def test_without_nested_blocks_a_text_of_that_length_is_told_apart(sampler, executor):
    report = run_vace(sampler(), VIDEO, [0, 0, 0, 0], executor)
    assert report["sparse_calls"] == 4
    assert report["other_calls"] == {"cross-attention": 4}


# -- rows that stay exact (MiniMax-H3) -----------------------------------------------------------


@pytest.fixture
def packed(make_sampler, make_adapter, monkeypatch):
    """Factory: a sampler of a model with text and audio in front of its video."""

    def make(text=37, audio=50, publishes=True, **changes):
        adapter = make_adapter(publishes_block_index=publishes)
        before = text + audio
        span = (text, before) if audio else None
        parts = (("text", text), ("audio", audio))

        def sequence(self, latent_shape, inputs):
            return TokenSequence(self.grid(latent_shape), before, audio=span, parts=parts)

        monkeypatch.setattr(type(adapter), "sequence", sequence)
        monkeypatch.setattr(type(adapter), "prefix_words", "conditioning tokens")
        monkeypatch.setattr(type(adapter), "default_sinks", "kv_and_rows")
        monkeypatch.setattr(type(adapter), "before_blocks", "text refiner")
        return make_sampler(adapter=adapter, **changes)

    return make


ROWS = [("auto", ((0, 87),)), ("kv_and_rows", ((0, 87),)), ("audio_rows", ((37, 87),))]


@pytest.mark.parametrize(("sinks", "ranges"), ROWS)
@pytest.mark.parametrize("smoothing", ["none", "k", "kv", "block"])
def test_rows_of_an_fp8_layer_are_the_models_own(sinks, ranges, smoothing, packed, qkv):
    """Bit for bit ``func`` of those queries and the original keys and values; the rest is the op's,
    with its correction for centred values."""
    tensors = qkv(87 + VIDEO)
    patched = packed(precision="fp8", fp8_layers="all", smoothing=smoothing, sinks=sinks, tau=1.0)
    out = attend(patched, tensors)
    settings = patched.runtime.attention.fp8
    want = sol_attention(
        *tensors,
        config=settings,
        layout=TokenLayout(sink_kv=((0, 87),)),
        order=patched_order(patched),
    )
    (start, stop), *_ = ranges
    assert [call[0][0].shape for call in patched.func.calls] == [(1, stop - start, 256)]
    own = patched.func.calls[0][2].unflatten(2, (2, -1))
    assert torch.equal(out[:, start:stop], own)
    assert torch.equal(out[:, stop:], want[:, stop:]) and torch.equal(
        out[:, :start], want[:, :start]
    )
    k, v = patched.func.calls[0][0][1:3]
    assert torch.equal(k, tensors[1].flatten(2)) and torch.equal(v, tensors[2].flatten(2))
    assert patched.report["row_calls"] == patched.report["fp8_calls"] == 1


def patched_order(sampler):
    """The order that its node takes by default: curves inside a frame."""
    return span_order(morton_order(GRID, per_frame=True), 87, 87 + VIDEO)


@pytest.mark.parametrize(("sinks", "skipped"), [("kv_and_rows", 87), ("audio_rows", 0)])
def test_rows_of_an_fp8_layer_need_not_be_computed(sinks, skipped, packed, kernel, qkv):
    """Rows in front that the model computes are left out by the kernel; those behind text are not."""
    attend(packed(precision="fp8", fp8_layers="all", sinks=sinks), qkv(87 + VIDEO))
    layout = kernel.calls[0][1]["layout"]
    assert (layout.skip_q, layout.dense_q) == (skipped, ())
    attend(packed(precision="bf16", sinks=sinks), qkv(87 + VIDEO))
    assert kernel.calls[1][1]["layout"].skip_q == 0


@pytest.mark.parametrize(("sinks", "ranges"), ROWS)
def test_rows_of_a_bf16_layer_are_in_the_kernel(sinks, ranges, packed, kernel, qkv):
    patched = packed(precision="bf16", sinks=sinks)
    attend(patched, qkv(87 + VIDEO))
    layout = kernel.calls[0][1]["layout"]
    assert layout.sink_kv == ((0, 87),) and layout.dense_q == ranges
    assert patched.func.calls == [] and patched.report["row_calls"] == 0


@pytest.mark.parametrize("sinks", ["kv", "off"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_rows_nobody_asked_for(sinks, precision, packed, kernel, qkv):
    patched = packed(precision=precision, fp8_layers="all", sinks=sinks)
    attend(patched, qkv(87 + VIDEO))
    layout = kernel.calls[0][1]["layout"]
    assert layout.dense_q == () and bool(layout.sink_kv) == (sinks == "kv")
    assert patched.func.calls == []


@pytest.mark.parametrize("skip_reshape", [True, False])
@pytest.mark.parametrize("skip_output_reshape", [True, False])
def test_rows_come_in_every_shape(skip_reshape, skip_output_reshape, packed, qkv):
    """MiniMax-H3 hands over (1, H, T, D) views, Wan (B, T, H * D)."""
    tensors = qkv(87 + VIDEO)
    shape = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    views = [x.transpose(1, 2) if skip_reshape else x.flatten(2) for x in tensors]
    patched = packed(precision="fp8", fp8_layers="all")
    out = patched.once(lambda o: patched.attend(*views, 2, transformer_options=o, **shape))
    if skip_output_reshape:
        assert out.shape == (1, 2, 87 + VIDEO, 128)
        out = out.transpose(1, 2)
    else:
        assert out.shape == (1, 87 + VIDEO, 256)
        out = out.unflatten(2, (2, 128))
    want = attend(packed(precision="fp8", fp8_layers="all"), tensors)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)


def test_rows_go_to_the_override_behind_us(packed, qkv, spy):
    def other(func, *args, **kwargs):
        return func(*args, **kwargs)

    behind = spy(other)
    options = {"transformer_options": {"optimized_attention_override": behind}}
    patched = packed(precision="fp8", fp8_layers="all", options=options)
    attend(patched, qkv(87 + VIDEO))
    ((args, kwargs, _),) = behind.calls
    assert args[0] is patched.func and args[1].shape == (1, 87, 256)
    assert kwargs["_inside_attn_wrapper"] is True


def test_rows_count_as_exact(packed, qkv):
    """tau 8 leaves what must be exact. 87 tokens: one whole block of rows and a ragged one."""
    densities = {}
    for sinks in ("kv", "kv_and_rows"):
        patched = packed(precision="fp8", fp8_layers="all", sinks=sinks, tau=8.0)
        attend(patched, qkv(87 + VIDEO))
        densities[sinks] = patched.report["density"]
    blocks = -(-(87 + VIDEO) // 64)
    sink = sum(j < 2 or abs(i - j) <= 1 for i in range(blocks) for j in range(blocks))
    rows = blocks - sum(j < 2 or j <= 1 for j in range(blocks))  # the first row gains these
    assert densities["kv"] == pytest.approx(sink / blocks**2)
    assert densities["kv_and_rows"] == pytest.approx((sink + rows) / blocks**2)


def test_a_failing_kernel_asks_for_the_whole_call_once(packed, qkv, sdpa, monkeypatch):
    """No rows, no correction: the model's own attention of the original tensors."""

    def fail(*args, **kwargs):
        raise RuntimeError("boom")

    monkeypatch.setattr(run_module, "sol_attention", fail)
    tensors = qkv(87 + VIDEO)
    patched = packed(precision="fp8", fp8_layers="all", smoothing="kv")
    out = attend(patched, tensors)
    want = sdpa(*(x.flatten(2) for x in tensors), 2).unflatten(2, (2, -1))
    assert torch.equal(out, want)
    assert len(patched.func.calls) == 1 and patched.report["row_calls"] == 0


@pytest.mark.parametrize(
    ("sinks", "how"),
    [
        ("auto", "they are exact, and so is their own attention"),
        ("kv", "they are exact for every token"),
        ("audio_rows", "they are exact for every token, and so is the attention of the audio"),
        ("off", "they are treated like the video"),
    ],
)
def test_parts_are_noted(sinks, how, packed, qkv):
    patched = packed(sinks=sinks)
    attend(patched, qkv(87 + VIDEO))
    note = f"conditioning tokens: 87 (37 text, 50 audio) in front of the video; {how}"
    assert patched.report["notes"][0] == note


def test_audio_rows_without_audio(packed, kernel, qkv):
    patched = packed(text=87, audio=0, sinks="audio_rows")
    attend(patched, qkv(87 + VIDEO))
    assert kernel.calls[0][1]["layout"].dense_q == ()
    assert patched.report["notes"][0].endswith("they are exact for every token")


@pytest.mark.parametrize("publishes", [True, False])
def test_attention_ahead_of_the_blocks_is_passed_on(publishes, packed, kernel, qkv):
    """A refiner of the text gets the forward's options, before any block."""
    patched = packed(publishes=publishes)
    text, q = torch.zeros(1, 37, 256), torch.zeros(1, 87 + VIDEO, 256)

    def model(options):
        patched.attend(text, text, text, 2, transformer_options=options)
        for index in range(4):
            patched.block(
                options, index, lambda o: patched.attend(q, q, q, 2, transformer_options=o)
            )

    patched.run(lambda: patched.forward(0.5, model))
    assert patched.report["other_calls"] == {"text refiner": 1}
    assert patched.report["sparse_calls"] == len(kernel.calls) == 4
    assert not any("computed instead" in note for note in patched.report["notes"])


def test_a_call_of_full_length_outside_the_blocks_is_dense_with_a_reason(packed):
    patched = packed()
    q = torch.zeros(1, 87 + VIDEO, 256)
    patched.run(
        lambda: patched.forward(0.5, lambda o: patched.attend(q, q, q, 2, transformer_options=o))
    )
    assert patched.report["dense_calls"] == {"block index unknown": 1}


def test_what_the_model_says_of_its_tokens_wins(packed, kernel, monkeypatch):
    """A newer ComfyUI publishes the layout that it packed."""
    patched = packed(token_order="none")
    said = TokenSequence(GRID, 20, audio=(5, 20), parts=(("text", 5), ("audio", 15)))
    kind = type(patched.adapter)
    monkeypatch.setattr(kind, "published", lambda self, options: options.get("said"))
    q = torch.zeros(1, 20 + VIDEO, 256)

    def model(options):
        options["said"] = said
        patched.attend(q, q, q, 2, transformer_options=options)

    patched.once(model)
    assert patched.report["tokens"] == 20 + VIDEO
    assert kernel.calls[0][1]["layout"].sink_kv == ((0, 20),)
    assert patched.report["notes"][0] == (
        "conditioning tokens: 20 (5 text, 15 audio) in front of the video; they are exact, and so is "
        "their own attention"
    )


# -- video and audio in one row ------------------------------------------------------------------


def test_a_run_of_packed_latents(make_sampler, make_adapter, monkeypatch):
    """The sampler carries (1, 1, N) and the shapes beside it; the mark is that of the video."""
    shapes = [(1, 4, *GRID), (1, 2, 2, 5)]
    kind = type(make_adapter())

    def video_shape(self, latent_shape, inputs):
        given = inputs.get("latent_shapes")
        return tuple(given[0]) if given else None

    monkeypatch.setattr(kind, "video_shape", video_shape)
    patched = make_sampler()
    row = torch.randn(1, 1, 4 * VIDEO + 20, generator=torch.Generator().manual_seed(1))
    run = run_module.SolAttentionRun(
        patched.runtime.attention, patched.adapter, patched.guider, row, patched.sigmas, shapes
    )
    info = run.begin_forward(row, {"latent_shapes": shapes})
    assert (info.tokens, info.layout.grid, info.why_dense) == (VIDEO, GRID, None)
    assert run.begin_forward(row, {}).why_dense == "the latent has 3 dimensions, need 5"

    class Executor:
        class_obj = patched.guider

        def __call__(self, *args, **kwargs):
            return row

    sigmas = torch.tensor(patched.sigmas)
    arguments = (row, row, "sampler", sigmas, None, None, True, 0)
    video = row[..., : 4 * VIDEO].reshape(shapes[0])
    for args, kwargs in ((arguments, {"latent_shapes": shapes}), ((*arguments, shapes), {})):
        patched.runtime.outer_sample(Executor(), *args, **kwargs)
        _, mark = patched.runtime.history._kept[-1]
        assert mark == mark_of(video)
    assert mark_of(row) != mark_of(video) and mark_of(row, [(1, 1, row.numel())]) == mark_of(row)


def test_error_before_sampling_looks_at_the_video_of_packed_latents(
    make_sampler, make_adapter, monkeypatch
):
    shapes = [(1, 4, *GRID), (1, 2, 2, 5)]
    kind = type(make_adapter())
    monkeypatch.setattr(
        kind, "video_shape", lambda self, shape, inputs: tuple(inputs["latent_shapes"][0])
    )
    adapter = make_adapter(head_dim=64)
    patched = make_sampler(adapter=adapter, on_decline="error")
    row = torch.zeros(1, 1, 4 * VIDEO + 20)
    executor = type("Executor", (), {"class_obj": patched.guider})()
    with pytest.raises(RuntimeError, match="Sol Attention can't run here: head_dim 64, need 128"):
        patched.runtime.outer_sample(
            executor, row, row, "sampler", torch.tensor(patched.sigmas), latent_shapes=shapes
        )
