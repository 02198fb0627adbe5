"""The public op: checks, forwarding, statistics, choice of a backend, and torch.compile."""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_sol.kernels import (
    BackendUnavailable,
    DeviceFacts,
    SolAttnCall,
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    UnknownBackend,
    describe_call,
    list_backends,
    sol_attention,
    why_not,
)
from hopper_sol.kernels import registry as registry_module
from hopper_sol.kernels.registry import Backend
from hopper_sol.kernels.sol_attn.emulation import sol_attention_fp8_emulation
from hopper_sol.kernels.sol_attn.op import OP, check_inputs
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference

BF16 = torch.bfloat16
CONFIG = SolAttnConfig()
LAYOUT = TokenLayout(sink_kv=((0, 3), (290, 300)), dense_q=((130, 131),))


def flat_arguments(
    q, k, v, *, config=CONFIG, layout=LAYOUT, backend="reference", with_lse=True, order=None
):
    """Arguments of the custom op itself."""
    sink_kv, dense_q = (
        list(itertools.chain.from_iterable(x)) for x in (layout.sink_kv, layout.dense_q)
    )
    plan = list(layout.video or ()), list(layout.grid or ())
    numbers = 0.1, float(config.tau), config.variant
    return q, k, v, *numbers, sink_kv, dense_q, *plan, backend, with_lse, order


def layouts(*qkv):
    """The same values packed, as views of a fused projection, and with heads before tokens."""
    fused = torch.cat(qkv, -1).split(128, -1)
    heads_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    return qkv, fused, heads_first


# --- Values


@pytest.mark.parametrize(
    "dtype", [torch.float32, BF16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, None),
        ({"tau": 8.0}, TokenLayout(sink_kv=LAYOUT.sink_kv)),
        ({"tau": 8.0}, TokenLayout(dense_q=LAYOUT.dense_q)),
        ({"tau": 0.2, "estimator": "exact"}, LAYOUT),
        ({"routing": False}, None),
    ],
    ids=["default", "sink", "dense_q", "all", "no-routing"],
)
def test_sol_attention_forwards_everything(make_qkv, settings, layout, dtype):
    q, k, v = make_qkv(300, heads=2, dtype=dtype, spread=0.3)
    config = SolAttnConfig(**settings)
    out, lse = sol_attention(
        q, k, v, config=config, layout=layout, scale=0.1, backend="reference", return_lse=True
    )
    layout = layout or TokenLayout()
    want = sol_attention_reference(
        q, k, v, scale=0.1, sink_kv=layout.sink_kv, dense_q=layout.dense_q, **settings
    )
    assert torch.equal(out, want.out) and torch.equal(lse, want.lse)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == q.shape and lse.shape == (1, 2, 300) and out.is_contiguous()


def test_sol_attention_forwards_fp8_settings(make_qkv):
    q, k, v = make_qkv(300, heads=2, dtype=BF16, spread=0.3)
    config = SolAttnConfig(
        tau=0.5, precision="fp8", k_smoothing="mean", v_smoothing="mean", exp_mode="expcast"
    )
    got = sol_attention(q, k, v, config=config, layout=LAYOUT, backend="reference")
    want = sol_attention_fp8_emulation(
        q,
        k,
        v,
        tau=0.5,
        k_smoothing="mean",
        v_smoothing="mean",
        v_bias_correction=True,
        exp_mode="expcast",
        sink_kv=LAYOUT.sink_kv,
        dense_q=LAYOUT.dense_q,
    )
    assert torch.equal(got, want.out)


def test_sol_attention_default_scale_and_backend(make_qkv):
    q, k, v = make_qkv(130)
    got = sol_attention(q, k, v, config=CONFIG)
    want = sol_attention(q, k, v, config=CONFIG, scale=128**-0.5, backend="reference")
    assert isinstance(got, torch.Tensor) and torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 63, 65])
def test_sol_attention_short(make_qkv, tokens):
    q, k, v = make_qkv(tokens, batch=2)
    stats = SolAttnStats()
    out, lse = sol_attention(q, k, v, config=CONFIG, return_lse=True, stats=stats)
    assert out.shape == q.shape and lse.shape == (2, 1, tokens)
    assert out.isfinite().all() and (stats.density() == 1).all()  # no block is further than one


def test_sol_attention_takes_strided_views(make_qkv):
    packed, *views = layouts(*make_qkv(200, batch=2, heads=2, spread=0.3))
    want = sol_attention(*packed, config=CONFIG)
    for inputs in views:
        assert not any(x.is_contiguous() for x in inputs)
        got = sol_attention(*inputs, config=CONFIG)
        assert torch.equal(got, want) and got.is_contiguous()


def test_sol_attention_leaves_its_inputs_alone(make_qkv):
    q, k, v = make_qkv(130)
    before = [x.clone() for x in (q, k, v)]
    for precision in ("bf16", "fp8"):
        out = sol_attention(q, k, v, config=SolAttnConfig(precision=precision))
        assert out.data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


# --- Order


def shuffled(tokens, seed=7):
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_sol_attention_order_permutes_inside(make_qkv, precision):
    """Blocks and layout follow the order, the output stays in the order of the input."""
    q, k, v = make_qkv(300, heads=2, dtype=BF16, spread=0.3)
    order = shuffled(300)
    options = {"config": SolAttnConfig(precision=precision, tau=0.3), "layout": LAYOUT}
    stats = [SolAttnStats(), SolAttnStats()]
    out, lse = sol_attention(
        q, k, v, order=order, return_lse=True, stats=stats[0], backend="reference", **options
    )
    permuted = (x[:, order] for x in (q, k, v))
    want, want_lse = sol_attention(
        *permuted, return_lse=True, stats=stats[1], backend="reference", **options
    )
    assert torch.equal(out[:, order], want) and torch.equal(lse[:, :, order], want_lse)
    assert torch.equal(stats[0].exact_blocks, stats[1].exact_blocks)
    plain = sol_attention(q, k, v, backend="reference", **options)
    assert not torch.equal(out, plain)
    identity = sol_attention(q, k, v, order=torch.arange(300), backend="reference", **options)
    assert torch.equal(identity, plain)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            torch.arange(69),
            r"order: got torch.int64 \(69,\) on cpu, need torch.int64 \(70,\) on cpu",
        ),
        (torch.arange(70).int(), r"order: got torch.int32 \(70,\) on cpu, need torch.int64"),
        (torch.arange(70)[None], r"order: got torch.int64 \(1, 70\) on cpu, need"),
        (torch.arange(140)[::2], "order: got a strided view, need a contiguous tensor"),
    ],
    ids=["short", "int32", "2d", "strided"],
)
def test_sol_attention_rejects_orders(order, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        sol_attention(*tensors(), config=CONFIG, order=order)


# --- Statistics


@pytest.mark.parametrize(
    ("dtype", "precision", "want_precision", "cast_from"),
    [
        (torch.float32, None, "float32", None),
        (torch.float32, "bf16", "float32", None),
        (torch.float16, "bf16", "float16", None),
        (BF16, "bf16", "bfloat16", None),
        (BF16, "fp8", "fp8", None),
        (torch.float32, "fp8", "fp8", torch.float32),
    ],
    ids=str,
)
def test_sol_attention_stats(make_qkv, dtype, precision, want_precision, cast_from):
    q, k, v = make_qkv(300, batch=2, heads=3, dtype=dtype, spread=0.3)
    stats = SolAttnStats()
    config = SolAttnConfig(precision=precision)
    sol_attention(q, k, v, config=config, layout=LAYOUT, backend="reference", stats=stats)
    assert stats.backend == "reference" and stats.declined == {}
    assert (stats.precision, stats.cast_from) == (want_precision, cast_from)
    assert stats.num_kv_blocks == 5 and stats.exact_blocks.shape == (2, 3, 5)
    run = sol_attention_fp8_emulation if precision == "fp8" else sol_attention_reference
    mask = run(q, k, v, sink_kv=LAYOUT.sink_kv, dense_q=LAYOUT.dense_q).exact_mask
    assert torch.equal(stats.density(), mask.float().mean(-1).transpose(1, 2))
    assert 0 < stats.density().min() < 1


def test_sol_attention_stats_list_what_auto_passed_over(make_qkv, monkeypatch):
    q, k, v = make_qkv(65)
    known = registry_module._BACKENDS
    picky = Backend("picky", load=lambda: None, rules=(lambda call: f"{call.tokens} are few",))
    monkeypatch.setattr(registry_module, "_BACKENDS", {**known, OP: {"picky": picky, **known[OP]}})
    stats = SolAttnStats()
    sol_attention(q, k, v, config=CONFIG, stats=stats)
    assert stats.backend == "reference"
    assert stats.declined["picky"] == "65 are few"
    with pytest.raises(BackendUnavailable, match=r"'picky' can't run sol_attention: 65 are few"):
        sol_attention(q, k, v, config=CONFIG, backend="picky")


def test_sol_attention_fills_the_defaults_of_the_backend(make_qkv, monkeypatch):
    q, k, v = make_qkv(65, dtype=torch.float16)
    seen = []

    def implementation(q, k, v, *, config, layout, scale, with_lse, order):
        seen.append((config, layout, scale, with_lse, order))
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return out, q.new_zeros(1, 1, 65, dtype=torch.float32), torch.ones(1, 1, 2).int()

    fake = Backend(
        "fake",
        load=lambda: implementation,
        defaults=lambda call: (("precision", "fp8" if call.tokens == 65 else "bf16"),),
    )
    monkeypatch.setattr(registry_module, "_BACKENDS", {OP: {"fake": fake}})
    stats = SolAttnStats()
    sol_attention(q, k, v, config=SolAttnConfig(tau=0.5), layout=LAYOUT_65, scale=2, stats=stats)
    assert seen == [(SolAttnConfig(tau=0.5, precision="fp8"), LAYOUT_65, 2.0, False, None)]
    assert (stats.backend, stats.precision, stats.cast_from) == ("fake", "fp8", torch.float16)
    assert stats.density().tolist() == [[[0.5], [0.5]]]


LAYOUT_65 = TokenLayout(sink_kv=((0, 1), (64, 65)), dense_q=((3, 4),))

# --- Errors

SHAPE = (1, 70, 2, 128)


def tensors(**changes):
    base = {name: torch.zeros(SHAPE) for name in "qkv"}
    return {**base, **changes}.values()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (tensors(q=torch.zeros(70, 2, 128)), ValueError, "q: got 3 dimensions, need 4"),
        (tensors(k=torch.zeros(70, 2, 128)), ValueError, "k: got 3 dimensions, need 4"),
        (tensors(k=torch.zeros(1, 71, 2, 128)), ValueError, "k: got shape .*71.*need q's"),
        (tensors(v=torch.zeros(1, 70, 1, 128)), ValueError, "v: got shape .*need q's.*self-att"),
        (tensors(q=torch.zeros(1, 70, 4, 128)), ValueError, "k: got shape"),
        (tensors(v=torch.zeros(SHAPE, dtype=BF16)), ValueError, "v: got torch.bfloat16 on cpu"),
        (
            [torch.zeros(SHAPE, dtype=torch.float64)] * 3,
            TypeError,
            "q: got torch.float64, need bfloat16, float16 or float32",
        ),
        ([torch.zeros(SHAPE, dtype=torch.int8)] * 3, TypeError, "q: got torch.int8"),
        ([torch.zeros(1, 70, 2, 96)] * 3, ValueError, "q: got head_dim 96, need 128"),
        ([torch.zeros(1, 70, 2, 256)[..., ::2]] * 3, ValueError, "q: last dimension has stride 2"),
        (
            tensors(v=torch.zeros(1, 70, 128, 2).transpose(2, 3)),
            ValueError,
            "v: last dimension has stride 2, need 1",
        ),
        ([torch.zeros(1, 0, 2, 128)] * 3, ValueError, "q: got shape .*at least one"),
        ([torch.zeros(0, 70, 2, 128)] * 3, ValueError, "q: got shape .*at least one"),
    ],
    ids=[
        "q-3d",
        "k-3d",
        "k-tokens",
        "v-heads",
        "gqa",
        "mixed-dtype",
        "fp64",
        "int8",
        "head_dim",
        "stride",
        "v-stride",
        "no-tokens",
        "no-batch",
    ],
)
def test_sol_attention_rejects_inputs(inputs, error, message):
    inputs = tuple(inputs)
    with pytest.raises(error, match=f"^{message}"):
        check_inputs(*inputs)
    with pytest.raises(error, match=f"^{message}"):
        sol_attention(*inputs, config=CONFIG)


@pytest.mark.parametrize("field", ["sink_kv", "dense_q"])
def test_sol_attention_rejects_a_layout_past_the_end(field):
    layout = TokenLayout(**{field: ((0, 5), (60, 71))})
    with pytest.raises(ValueError, match=r"^layout: range \(60, 71\) ends past the 70 tokens of q"):
        sol_attention(*tensors(), config=CONFIG, layout=layout)


def test_check_inputs_checks_the_video_span():
    for call in (check_inputs, lambda *x: sol_attention(*x[:3], config=CONFIG, layout=x[3])):
        with pytest.raises(ValueError, match=r"^layout: range \(5, 71\) ends past the 70 tokens"):
            call(*tensors(), TokenLayout(video=(5, 71)))


def test_sol_attention_rejects_unknown_backends():
    for attempt in (
        lambda: sol_attention(*tensors(), config=CONFIG, backend="sm89"),
        lambda: why_not(describe_call(torch.zeros(SHAPE), CONFIG, TokenLayout()), "sm89"),
    ):
        with pytest.raises(UnknownBackend, match="'sm89': sol_attention has no such backend") as e:
            attempt()
        assert e.value.known == list_backends()


def test_sol_attention_explicit_backend_declines_with_reason():
    config = SolAttnConfig(block_skip=0.1)
    with pytest.raises(BackendUnavailable) as e:
        sol_attention(*tensors(), config=config, backend="reference")
    assert str(e.value) == (
        "backend 'reference' can't run sol_attention: block_skip is not in the reference"
    )
    assert (e.value.op, e.value.backend) == ("sol_attention", "reference")
    assert e.value.reasons == {"reference": "block_skip is not in the reference"}


def test_sol_attention_auto_lists_every_reason_when_all_decline(monkeypatch):
    no = Backend("no", load=lambda: None, rules=(lambda call: "never does",))
    known = registry_module._BACKENDS
    reference = known[OP]["reference"]
    monkeypatch.setattr(registry_module, "_BACKENDS", {OP: {"no": no, "reference": reference}})
    with pytest.raises(BackendUnavailable) as e:
        sol_attention(*tensors(), config=SolAttnConfig(block_skip=0.1))
    assert str(e.value) == (
        "no backend can run sol_attention: no: never does; "
        "reference: block_skip is not in the reference"
    )
    assert list(e.value.reasons) == ["no", "reference"]


# --- why_not

CPU = DeviceFacts("cpu", "cpu")
DEVICES = [
    DeviceFacts("cuda", "NVIDIA GeForce GTX 1080", (6, 1)),
    DeviceFacts("cuda", "AMD Radeon RX 7900", is_rocm=True),
    DeviceFacts("mps", "mps"),
]


def fake_call(device, **settings):
    return SolAttnCall((1, 4096, 8, 128), BF16, device, SolAttnConfig(**settings))


def test_why_not_runs_on_cpu():
    assert why_not(fake_call(CPU)) is None
    assert why_not(fake_call(CPU), "reference") is None
    assert why_not(fake_call(CPU, block_skip=0.1), "reference").startswith("block_skip")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_why_not_auto_holds_the_reference_back_off_cpu(device):
    reason = why_not(fake_call(device))
    assert f"reference: slower than dense attention on {device.describe()}" in reason
    assert reason.count(": ") >= len(list_backends())  # one for every backend
    assert why_not(fake_call(device), "reference") is None  # by name it runs


def test_why_not_without_backends(monkeypatch):
    monkeypatch.setattr(registry_module, "_BACKENDS", {})
    assert why_not(fake_call(CPU)) == "no backend is registered"


def test_list_backends_ends_with_the_reference():
    assert list_backends()[-1] == "reference"


def test_describe_call():
    call = describe_call(torch.zeros(SHAPE, dtype=BF16), CONFIG, LAYOUT)
    assert call == SolAttnCall(SHAPE, BF16, CPU, CONFIG, LAYOUT)


# --- torch.compile and the operator registration


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_sol_attention_compiles_to_one_graph(make_qkv, dynamic):
    def attention(q, k, v):
        out, lse = sol_attention(
            q * 2, k, v, config=CONFIG, layout=LAYOUT, backend="reference", return_lse=True
        )
        return out + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (300, 333):
        q, k, v = make_qkv(tokens, heads=2, dtype=BF16, spread=0.3)
        for got, want in zip(compiled(q, k, v), attention(q, k, v), strict=True):
            assert torch.equal(got, want)


def test_sol_attention_asks_for_the_lse_only_if_it_is_wanted(make_qkv, monkeypatch):
    """A backend may save the work; without it the op has an empty tensor in its place."""
    seen = []
    original = registry_module.get(OP, "reference")

    def implementation(q, k, v, *, with_lse, **options):
        seen.append(with_lse)
        out, lse, exact = registry_module.loaded(original)(q, k, v, with_lse=with_lse, **options)
        return out, lse if with_lse else None, exact

    spy = dataclasses.replace(original, load=lambda: implementation)
    monkeypatch.setitem(registry_module._BACKENDS[OP], "reference", spy)
    q, k, v = make_qkv(130, heads=2)
    torch.compiler.reset()
    compiled = torch.compile(sol_attention, backend="aot_eager", fullgraph=True)
    options = {"config": CONFIG, "backend": "reference"}
    for call in (sol_attention, compiled):
        seen.clear()
        out = call(q, k, v, **options)
        both = call(q, k, v, return_lse=True, **options)
        assert seen == [False, True]
        assert torch.equal(out, both[0]) and both[1].shape == (1, 2, 130)


def test_sol_attention_compiled_still_raises(make_qkv):
    torch.compiler.reset()
    compiled = torch.compile(sol_attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(BackendUnavailable, match="block_skip is not in the reference"):
        compiled(*make_qkv(65), config=SolAttnConfig(block_skip=0.1), backend="reference")


@pytest.mark.parametrize("with_lse", [False, True], ids=["no-lse", "lse"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_custom_op_passes_opcheck(make_qkv, precision, with_lse):
    q, k, v = make_qkv(300, heads=2, dtype=BF16, spread=0.3)
    options = {"config": SolAttnConfig(precision=precision), "with_lse": with_lse}
    for inputs in layouts(q, k, v):
        for order in (None, torch.arange(299, -1, -1)):
            result = torch.library.opcheck(
                torch.ops.hopper_sol.sol_attention, flat_arguments(*inputs, **options, order=order)
            )
            assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_lse", [False, True], ids=["no-lse", "lse"])
def test_custom_op_fake_shapes(make_qkv, with_lse):
    for inputs in layouts(*make_qkv(333, batch=2, heads=3, dtype=torch.float16)):
        want = torch.ops.hopper_sol.sol_attention(*flat_arguments(*inputs, with_lse=with_lse))
        assert want[1].shape == ((2, 3, 333) if with_lse else (0,))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in inputs]
            got = torch.ops.hopper_sol.sol_attention(*flat_arguments(*fakes, with_lse=with_lse))
        for fake, true in zip(got, want, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (
                true.shape,
                true.dtype,
                true.stride(),
            )


def test_custom_op_schema_is_stable():
    # ComfyUI users may have exported graphs with this name and signature.
    schema = torch.ops.hopper_sol.sol_attention.default._schema
    assert schema.name == "hopper_sol::sol_attention"
    assert [argument.name for argument in schema.arguments] == [
        "q",
        "k",
        "v",
        "scale",
        "tau",
        "variant",
        "sink_kv",
        "dense_q",
        "video",
        "grid",
        "backend",
        "with_lse",
        "order",
        "skip_q",
    ]
    assert [result.name for result in schema.returns] == ["out", "lse", "exact_blocks"]


def test_sol_attention_hands_on_the_whole_layout(monkeypatch):
    """What rules see when a backend is chosen is what the backend gets."""
    seen = []

    def implementation(q, k, v, *, layout, **options):
        seen.append(layout)
        return registry_module.loaded(original)(q, k, v, layout=layout, **options)

    original = registry_module.get(OP, "reference")
    spy = dataclasses.replace(original, load=lambda: implementation)
    monkeypatch.setitem(registry_module._BACKENDS[OP], "reference", spy)
    layout = TokenLayout(sink_kv=((0, 6),), dense_q=((1, 2),), video=(6, 70), grid=(4, 4, 4))
    sol_attention(*tensors(), config=CONFIG, layout=layout)
    assert seen == [layout]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_sol_attention_rejects_scale(scale):
    with pytest.raises(ValueError, match=r"^scale: got .*, need a finite number above 0"):
        sol_attention(*tensors(), config=CONFIG, scale=scale)
