"""The ops that quantise what they produce: backends, shapes, checks, choice, torch.compile."""

import pytest
import torch

from hopper_sol.kernels import BackendUnavailable, UnknownBackend, fp8_linear, quantize_rowwise
from hopper_sol.kernels import registry as registry_module
from hopper_sol.kernels.fp8_linear import (
    ACTIVATION_OP,
    NORM_OP,
    quantize_gelu,
    quantize_norm,
    quantize_swiglu,
    torch_quant,
)
from hopper_sol.kernels.fp8_linear.config import NormSettings
from hopper_sol.kernels.fp8_linear.fused_op import check_activation, check_norm
from hopper_sol.kernels.fp8_linear.fused_reference import activation_reference, norm_reference
from hopper_sol.kernels.fp8_linear.reference import E4M3, quantize_rowwise_reference

BF16 = torch.bfloat16
BACKENDS = ["auto", "torch", "reference"]
LEADING = [(), (1,), (7,), (2, 3), (2, 1, 3)]


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows(rows, h, shape):
    """``rows`` are the quantisation of ``h`` (M, K), in ``shape``."""
    want = quantize_rowwise_reference(h)
    assert rows.codes.shape == shape and rows.codes.dtype == E4M3
    assert rows.scale.shape == (*shape[:-1], 1) and rows.scale.dtype == torch.float32
    assert rows.codes.is_contiguous() and rows.scale.is_contiguous()
    codes = rows.codes.view(torch.uint8).reshape(want.codes.shape)
    assert torch.equal(codes, want.codes.view(torch.uint8))
    assert torch.equal(rows.scale.reshape(-1, 1).nan_to_num(-1), want.scale.nan_to_num(-1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("leading", LEADING)
def test_activations(leading, dtype, backend):
    x = normal(*leading, 34, dtype=dtype)
    flat = x.reshape(-1, 34)
    gelu = quantize_gelu(x, backend=backend)
    assert_rows(gelu, activation_reference(flat, "gelu_tanh"), (*leading, 34))
    swiglu = quantize_swiglu(x, backend=backend)
    assert_rows(swiglu, activation_reference(flat, "swiglu"), (*leading, 17))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(kind, leading, dtype, backend):
    x = normal(*leading, 33, dtype=dtype)
    weight, bias, scale, shift = normal(4, 33, seed=1, dtype=dtype)
    settings = NormSettings(kind, 1e-5, True)
    for vectors in ((None, None), (weight, None), (None, bias), (weight, bias)):
        for modulation in ((None, None), (scale, shift)):
            rows = quantize_norm(
                x,
                kind=kind,
                eps=1e-5,
                weight=vectors[0],
                bias=vectors[1],
                scale=modulation[0],
                shift=modulation[1],
                round_product=True,
                backend=backend,
            )
            tables = [None if v is None else v.view(1, -1) for v in modulation]
            h = norm_reference(x.reshape(-1, 33), settings, *vectors, *tables)
            assert_rows(rows, h, (*leading, 33))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_modulation_of_batches_and_views(backend):
    """As Wan has it: chunks of one (B, 6, K), and of (B, G, 6, K) for groups of tokens."""
    x, e = normal(2, 6, 48), normal(2, 6, 48, seed=1)
    shift, scale = e.chunk(6, dim=1)[:2]
    assert not scale.is_contiguous()
    rows = quantize_norm(x, scale=scale, shift=shift, backend=backend)
    for item in range(2):
        h = norm_reference(x[item], NormSettings(), None, None, scale[item], shift[item])
        want = quantize_rowwise_reference(h)
        assert torch.equal(rows.codes[item].float(), want.codes.float())
    groups = normal(2, 3, 6, 48, seed=2)
    shift, scale = groups.unbind(2)[:2]
    rows = quantize_norm(x, scale=scale, shift=shift, backend=backend)
    repeated = [v.repeat_interleave(2, dim=1).reshape(-1, 48) for v in (scale, shift)]
    h = norm_reference(x.reshape(-1, 48), NormSettings(), None, None, *repeated)
    assert_rows(rows, h, (2, 6, 48))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("leading", [(2, 1), (1,), (2, 3)])
def test_scale_that_holds_one(leading, dtype, backend):
    """The sum that a model has rounded by itself gives the codes of its addend."""
    x = normal(2, 6, 48, dtype=dtype)
    scale, shift = 0.5 * normal(2, *leading, 48, seed=1, dtype=dtype)
    want = quantize_norm(x, scale=scale, shift=shift, backend=backend)
    got = quantize_norm(x, scale=1 + scale, shift=shift, scale_has_one=True, backend=backend)
    assert torch.equal(got.codes.float(), want.codes.float())
    assert torch.equal(got.scale, want.scale)
    other = quantize_norm(x, scale=1 + scale, shift=shift, backend=backend)
    assert not torch.equal(other.scale, want.scale)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_modulation_by_row(dtype, backend):
    x, scale, shift = normal(2, 5, 48), normal(3, 48, seed=1), normal(3, 48, seed=2)
    mod_row = torch.tensor([[2, 2, 0, 1, 1], [0, 1, 2, 0, 1]], dtype=dtype)
    rows = quantize_norm(x, scale=scale, shift=shift, mod_row=mod_row, backend=backend)
    index = mod_row.flatten()
    h = norm_reference(x.reshape(-1, 48), NormSettings(), None, None, scale[index], shift[index])
    assert_rows(rows, h, (2, 5, 48))


@pytest.mark.parametrize("mod_row", [None, torch.tensor([1, 1, 0, 2, 0, 1, 2, 2, 0])])
def test_in_several_groups(monkeypatch, mod_row):
    x, scale, shift = normal(9, 40), normal(3, 40, seed=1), normal(3, 40, seed=2)
    x[4, 1] = float("nan")
    whole = quantize_norm(x, scale=scale, shift=shift, mod_row=mod_row, backend="reference")
    activations = [quantize_gelu(x, backend="reference"), quantize_swiglu(x, backend="reference")]
    monkeypatch.setattr(torch_quant, "_CHUNK", 2 * 40)
    grouped = quantize_norm(x, scale=scale, shift=shift, mod_row=mod_row, backend="torch")
    again = [quantize_gelu(x, backend="torch"), quantize_swiglu(x, backend="torch")]
    for got, want in zip((grouped, *again), (whole, *activations), strict=True):
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scale.isnan(), want.scale.isnan())
        assert got.scale.isnan().flatten().tolist() == [i == 4 for i in range(9)]


def test_strided_inputs():
    x = normal(6, 4, 100)
    weight = normal(100, 2, seed=1)[:50, 0]
    for view in (x.transpose(0, 1)[..., :50], x[..., 1:99:2][..., :48], x[::2, :, 10:60]):
        k = view.shape[-1]
        packed = view.contiguous()
        same = [
            (quantize_gelu(view), quantize_gelu(packed)),
            (quantize_swiglu(view), quantize_swiglu(packed)),
            (quantize_norm(view, weight=weight[:k]), quantize_norm(packed, weight=weight[:k])),
        ]
        for got, want in same:
            assert torch.equal(got.codes.float(), want.codes.float())
            assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_nothing(shape):
    x = torch.empty(shape)
    for rows, columns in ((quantize_gelu(x), 16), (quantize_swiglu(x), 8), (quantize_norm(x), 16)):
        assert rows.codes.shape == (*shape[:-1], columns)
        assert rows.scale.shape == (*shape[:-1], 1)


def test_results_feed_a_linear_as_rows_do():
    x, scale, shift = normal(2, 9, 64), normal(64, seed=1), normal(64, seed=2)
    h = norm_reference(x.view(-1, 64), NormSettings(), None, None, scale[None], shift[None])
    rows = quantize_norm(x, scale=scale, shift=shift)
    for seed in (1, 2, 3):  # q, k, v
        weight = quantize_rowwise(normal(32, 64, seed=seed))
        out = fp8_linear(rows, *weight)
        assert out.shape == (2, 9, 32) and out.dtype == BF16
        assert torch.equal(out, fp8_linear(h.view(2, 9, 64), *weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_stay_alone(bad):
    x = normal(5, 48)
    x[2, 7] = bad
    # GELU(-inf) is NaN, silu(-inf) too: a model's row would be lost as well.
    for rows in (quantize_gelu(x), quantize_swiglu(x), quantize_norm(x)):
        assert rows.scale.flatten().isnan().tolist() == [False, False, True, False, False]
        assert rows.codes[2].float().abs().max() == 0


# --- checks


@pytest.mark.parametrize("quantize", [quantize_gelu, quantize_swiglu, quantize_norm])
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.tensor(1.0), ValueError, r"x: got shape \(\), need \(\.\.\., "),
        (torch.empty(3, 0), ValueError, "K at least 1"),
        (torch.ones(3, 4, dtype=torch.int32), TypeError, "x: got torch.int32, need bfloat16"),
        (torch.ones(3, 4).to(E4M3), TypeError, "x: got torch.float8_e4m3fn"),
    ],
)
def test_refuses_x(quantize, x, error, words):
    with pytest.raises(error, match=words):
        quantize(x)


def test_swiglu_refuses_an_odd_width():
    with pytest.raises(ValueError, match=r"x: got shape \(3, 5\), need \(\.\.\., 2 K\)"):
        quantize_swiglu(torch.ones(3, 5))


ONES = torch.ones(2, 48)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kind": "group"}, ValueError, "kind: got 'group', need 'layer' or 'rms'"),
        ({"eps": -1e-6}, ValueError, "eps: got -1e-06, need a finite number, 0 or more"),
        ({"eps": float("nan")}, ValueError, "eps: got nan"),
        ({"weight": torch.ones(47)}, ValueError, r"weight: got shape \(47,\), need \(48,\)"),
        ({"weight": torch.ones(1, 48)}, ValueError, r"weight: got shape \(1, 48\)"),
        ({"bias": torch.ones(48).half()}, TypeError, "bias: got torch.float16, need x's"),
        ({"scale": ONES[0]}, ValueError, "got scale alone, need both or neither"),
        ({"shift": ONES[0]}, ValueError, "got shift alone, need both or neither"),
        ({"mod_row": torch.zeros(6).long()}, ValueError, "mod_row: got one without scale and"),
        ({"scale": ONES[0], "shift": torch.ones(47)}, ValueError, r"shift: got shape \(47,\)"),
        ({"scale": ONES[:0], "shift": ONES[0]}, ValueError, r"scale: got shape \(0, 48\)"),
        ({"scale": ONES, "shift": ONES[:1]}, ValueError, "shift: got 1 rows, need as many as"),
        (
            {"scale": torch.ones(4, 48), "shift": torch.ones(4, 48)},
            ValueError,
            "scale: got 4 rows for 6 rows of x, need a divisor of that, or mod_row",
        ),
        (
            {"scale": ONES, "shift": ONES, "mod_row": torch.zeros(6)},
            ValueError,
            r"mod_row: got torch.float32 of shape \(6,\), need int32 or int64 of x's \(6,\)",
        ),
        (
            {"scale": ONES, "shift": ONES, "mod_row": torch.zeros(5).int()},
            ValueError,
            r"mod_row: got torch.int32 of shape \(5,\)",
        ),
        ({"backend": "cuda"}, UnknownBackend, "'auto' or one of triton, torch, reference"),
        ({"backend": "triton"}, BackendUnavailable, "'triton' can't run quantize_norm"),
    ],
)
def test_norm_refuses(change, error, words):
    with pytest.raises(error, match=words):
        quantize_norm(torch.ones(6, 48), **change)


@pytest.mark.parametrize("name", ["weight", "bias", "scale", "shift", "mod_row"])
def test_norm_refuses_another_device(name):
    arguments = dict.fromkeys(("weight", "bias"), torch.ones(48))
    arguments.update(scale=ONES, shift=ONES, mod_row=torch.zeros(6).int())
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name}: got a tensor on meta, need x's cpu"):
        check_norm(torch.ones(6, 48), **arguments, kind="layer", eps=1e-6)


def test_check_activation_accepts_what_it_should():
    check_activation(torch.ones(1), "gelu_tanh")
    check_activation(torch.ones(2, 2), "swiglu")


# --- choice, custom ops


@pytest.mark.parametrize("op", [ACTIVATION_OP, NORM_OP])
def test_backends_in_order(op):
    assert registry_module.list_backends(op) == ("triton", "torch", "reference")


@pytest.mark.parametrize(("k", "fits"), [(32768, True), (32769, False)])
def test_width_rule_counts_columns_of_the_result(monkeypatch, k, fits):
    """SwiGLU reads twice as many columns as it keeps."""
    seen = {}
    select = registry_module.select

    def spy(op, call, backend):
        seen["call"] = call
        return select(op, call, backend)

    monkeypatch.setattr(registry_module, "select", spy)
    quantize_swiglu(torch.ones(2, 2 * k))
    assert (seen["call"].rows, seen["call"].columns) == (2, k)
    rule = registry_module.get(ACTIVATION_OP, "triton").rules[0](seen["call"])
    assert rule is None if fits else "needs K up to 32768, got 32769" in rule


def test_opcheck():
    x = normal(2, 3, 48).transpose(0, 1)
    for activation in ("gelu_tanh", "swiglu"):
        torch.library.opcheck(
            torch.ops.hopper_sol.quantize_activation.default,
            (x, activation, "torch"),
            test_utils=("test_schema", "test_faketensor"),
        )
    scale, shift = normal(3, 48, seed=1), normal(3, 48, seed=2)
    mod_row = torch.zeros(3, 2, dtype=torch.int32)
    for vectors in (
        (None,) * 5,
        (scale[0], shift[0], None, None, None),
        (None, None, scale, shift, mod_row),
    ):
        torch.library.opcheck(
            torch.ops.hopper_sol.quantize_norm.default,
            (x, *vectors, "rms", 1e-5, True, False, "torch"),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_compiled_caller():
    """One graph, and values as without; the compiler keeps x's dtype as the rounding points."""
    weight = quantize_rowwise(normal(32, 64, seed=1))
    scale, shift = normal(64, seed=2), normal(64, seed=3)

    def layer(x):
        rows = quantize_norm(x, scale=scale, shift=shift)
        up = torch.cat([fp8_linear(rows, *weight), fp8_linear(rows, *weight)], -1)
        return fp8_linear(quantize_gelu(up), *weight), quantize_swiglu(up).scale

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x = normal(2, tokens, 64)
        for got, want in zip(compiled(x), layer(x), strict=True):
            assert torch.equal(got, want)
