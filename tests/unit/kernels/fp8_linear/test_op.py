"""The public ops: backends against the reference, shapes, checks, choice, torch.compile."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_sol.kernels import (
    BackendUnavailable,
    DeviceFacts,
    FP8LinearCall,
    FP8LinearStats,
    QuantizedRows,
    UnknownBackend,
    choose_linear_backend,
    describe_linear,
    fp8_linear,
    list_linear_backends,
    quantize_rowwise,
    why_not_linear,
)
from hopper_sol.kernels import registry as registry_module
from hopper_sol.kernels.fp8_linear import QUANTIZE_OP, torch_quant
from hopper_sol.kernels.fp8_linear.config import use_fast_accum
from hopper_sol.kernels.fp8_linear.op import check_weight
from hopper_sol.kernels.fp8_linear.reference import (
    E4M3,
    fp8_linear_reference,
    quantize_rowwise_reference,
)

BF16 = torch.bfloat16
CPU = DeviceFacts("cpu", "cpu")
H200 = DeviceFacts("cuda", "NVIDIA H200", (9, 0))
A100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0))
AMD = DeviceFacts("cuda", "AMD Instinct MI300X", is_rocm=True)
MAC = DeviceFacts("mps", "mps")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_rows(a, b):
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(
        a.scale.nan_to_num(-1), b.scale.nan_to_num(-1)
    )


@pytest.fixture(scope="module")
def weight():
    return quantize_rowwise(normal(32, 48, seed=9))


# --- quantize_rowwise


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (4, 1), (3, 7), (2, 3, 33), (2, 3, 4, 16)])
def test_quantize_shapes(shape, dtype, backend):
    x = normal(*shape, dtype=dtype)
    rows = quantize_rowwise(x, backend=backend)
    assert rows.codes.shape == shape and rows.codes.dtype == E4M3
    assert rows.scale.shape == (*shape[:-1], 1) and rows.scale.dtype == torch.float32
    assert rows.codes.is_contiguous() and rows.scale.is_contiguous()
    assert same_rows(rows, quantize_rowwise_reference(x))


def test_quantize_in_several_chunks(monkeypatch):
    monkeypatch.setattr(torch_quant, "_CHUNK", 3 * 40)
    x = normal(10, 40)
    x[4, 1], x[7] = float("nan"), 0.0
    for grid in (None, 0.01):
        want = quantize_rowwise_reference(x, grid)
        assert same_rows(quantize_rowwise(x, grid=grid, backend="torch"), want)


def test_quantize_strided_inputs():
    x = normal(6, 4, 50)
    views = [x.transpose(0, 1), x[..., 1:34], x[::2], x.permute(2, 0, 1), x[:, 0]]
    for view in views:
        want = quantize_rowwise_reference(view.contiguous())
        for backend in ("torch", "reference"):
            assert same_rows(quantize_rowwise(view, backend=backend), want)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_quantize_nothing(shape):
    rows = quantize_rowwise(torch.empty(shape))
    assert rows.codes.shape == shape and rows.scale.shape == (*shape[:-1], 1)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.tensor(1.0), ValueError, r"x: got shape \(\), need \(\.\.\., K\)"),
        (torch.empty(3, 0), ValueError, "K at least 1"),
        (torch.ones(3, 4, dtype=torch.int32), TypeError, "x: got torch.int32, need bfloat16"),
        (torch.ones(3, 4).to(E4M3), TypeError, "or QuantizedRows"),
    ],
)
def test_quantize_refuses(x, error, words):
    with pytest.raises(error, match=words):
        quantize_rowwise(x)


@pytest.mark.parametrize("grid", [0.0, -1.0, float("inf"), float("nan")])
def test_quantize_refuses_a_grid(grid):
    with pytest.raises(ValueError, match=r"grid: got .*, need a finite number above 0"):
        quantize_rowwise(torch.ones(2, 16), grid=grid)


# --- fp8_linear: values


def exact(x, weight, bias=None):
    """FP64 product of what the codes mean, and its rounding allowance: BF16 and FP32 sums."""
    rows = x if isinstance(x, QuantizedRows) else quantize_rowwise_reference(x)
    left = rows.codes.double() * rows.scale.double()
    right = weight.codes.double() * weight.scale.double()
    out = left @ right.t()
    size = left.abs() @ right.abs().t()
    if bias is not None:
        out = out + bias.to(BF16).double()
    # Half a BF16 step of the result; FP32 sums of K terms in any order, K 2^-24 of the absolute sum.
    return out, out.abs() * 2**-8 + size * left.shape[-1] * 2**-23


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 16), (15, 32, 48), (16, 48, 16), (17, 16, 1536), (255, 64, 80)]
)
def test_values(m, n, k, with_bias, backend):
    x, w = normal(m, k, dtype=BF16), quantize_rowwise(normal(n, k, seed=1))
    bias = normal(n, seed=2) if with_bias else None
    out = fp8_linear(x, *w, bias, backend=backend)
    want, allowed = exact(x, w, bias)
    assert out.shape == (m, n) and out.dtype == BF16 and out.is_contiguous()
    assert ((out.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_output_dtype_is_the_inputs(weight, dtype):
    """FP32 and FP16 are quantised as they are; the result is a BF16 number in their dtype."""
    x = normal(5, 48, dtype=dtype)
    out = fp8_linear(x, *weight)
    want = fp8_linear_reference(quantize_rowwise_reference(x), *weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), want.float(), rtol=2**-7, atol=1e-3)
    assert torch.equal(out.to(BF16).to(dtype), out)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32])
def test_output_dtype_may_be_named(weight, out_dtype, backend):
    """Quantised rows have forgotten the dtype of the model that they come from."""
    x = normal(5, 48)
    rows = quantize_rowwise(x)
    want = fp8_linear(rows, *weight, backend=backend)
    assert want.dtype == BF16
    for operand in (x, rows):
        out = fp8_linear(operand, *weight, backend=backend, out_dtype=out_dtype)
        assert out.dtype == out_dtype and torch.equal(out.to(BF16), want)
    none = fp8_linear(torch.empty(0, 48), *weight, backend=backend, out_dtype=out_dtype)
    assert none.dtype == out_dtype and none.shape == (0, 32)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (2, 1, 3, 48)])
def test_leading_dimensions(weight, shape, backend):
    x = normal(*shape)
    out = fp8_linear(x, *weight, backend=backend)
    flat = fp8_linear(x.reshape(-1, 48), *weight, backend=backend)
    assert out.shape == (*shape[:-1], 32) and torch.equal(out.reshape(-1, 32), flat)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_empty_batch(weight, shape, backend):
    out = fp8_linear(torch.empty(shape, dtype=BF16), *weight, normal(32), backend=backend)
    assert out.shape == (*shape[:-1], 32) and out.dtype == BF16
    rows = quantize_rowwise(torch.empty(shape))
    assert fp8_linear(rows, *weight, backend=backend).shape == (*shape[:-1], 32)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_strided_inputs(weight, backend):
    x = normal(4, 6, 100)
    for view in (x[..., :48], x[..., 1:97:2], x.transpose(0, 1)[..., 3:51]):
        assert not view.is_contiguous()
        packed = fp8_linear(view.contiguous(), *weight, backend=backend)
        assert torch.equal(fp8_linear(view, *weight, backend=backend), packed)
    wide = quantize_rowwise(normal(48, 32, seed=9))
    turned = wide.codes.t()  # (32, 48), not row-major
    scale = torch.rand(32, 2)[:, :1]
    got = fp8_linear(x[..., :48], turned, scale, backend=backend)
    want = fp8_linear(x[..., :48], turned.contiguous(), scale.contiguous(), backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_one_quantisation_serves_several_linears(backend):
    x = normal(2, 9, 64, dtype=BF16)
    rows = quantize_rowwise(x)
    for seed in (1, 2, 3):
        w = quantize_rowwise(normal(32, 64, seed=seed))
        shared = fp8_linear(rows, *w, normal(32), backend=backend)
        assert shared.dtype == BF16
        assert torch.equal(shared, fp8_linear(x, *w, normal(32), backend=backend))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_row_does_not_spread(weight, backend, bad):
    x = normal(2, 5, 48)
    clean = fp8_linear(x, *weight, normal(32), backend=backend)
    x[1, 2, 7] = bad
    out = fp8_linear(x, *weight, normal(32), backend=backend)
    dense = torch.nn.functional.linear(x, normal(32, 48, seed=9))
    assert not dense[1, 2].isfinite().any()  # what it must be like
    assert out[1, 2].isnan().all()
    out[1, 2] = clean[1, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_zero_rows_give_the_bias(weight, backend):
    bias = normal(32)
    out = fp8_linear(torch.zeros(3, 48), *weight, bias, backend=backend)
    assert torch.equal(out, bias.to(BF16).float().expand(3, 32))


def test_inputs_are_left_alone(weight):
    x, bias = normal(4, 48), normal(32)
    kept = [t.clone() for t in (x, *weight, bias)]
    fp8_linear(x, *weight, bias)
    for tensor, before in zip((x, *weight, bias), kept, strict=True):
        assert torch.equal(tensor.float(), before.float())


# --- checks


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight8": torch.ones(32, 48)}, TypeError, "weight8: got torch.float32"),
        ({"weight_scale": torch.ones(32, 1).half()}, TypeError, "weight_scale of torch.float16"),
        ({"weight8": torch.ones(32, 64).to(E4M3)}, ValueError, r"need \(N, 48\)"),
        ({"weight8": torch.ones(32, 2, 48).to(E4M3)}, ValueError, "weight8: got shape"),
        ({"weight8": torch.ones(0, 48).to(E4M3)}, ValueError, "weight8: got shape"),
        ({"weight_scale": torch.ones(1)}, ValueError, r"need \(32,\) or \(32, 1\)"),
        ({"weight_scale": torch.ones(1, 32)}, ValueError, "weight_scale: got shape"),
        ({"bias": torch.ones(31)}, ValueError, r"bias: got shape \(31,\), need \(32,\)"),
        ({"x": torch.tensor(1.0)}, ValueError, "x: got shape"),
        ({"out_dtype": E4M3}, TypeError, "out_dtype: got torch.float8_e4m3fn, need bfloat16"),
        ({"x": torch.ones(2, 48).long()}, TypeError, "x: got torch.int64"),
        (
            {"x": QuantizedRows(torch.ones(2, 48).to(E4M3), torch.ones(3, 1))},
            ValueError,
            r"need \(2, 1\)",
        ),
        ({"x": QuantizedRows(torch.ones(2, 48), torch.ones(2, 1))}, TypeError, "x: got codes of"),
    ],
)
def test_refuses(weight, change, error, words):
    arguments = {"x": normal(2, 48), "weight8": weight.codes, "weight_scale": weight.scale}
    with pytest.raises(error, match=words):
        fp8_linear(**{**arguments, **change})


@pytest.mark.parametrize("name", ["weight8", "weight_scale", "bias"])
def test_refuses_another_device(weight, name):
    arguments = {"weight8": weight.codes, "weight_scale": weight.scale, "bias": normal(32)}
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name}: got a tensor on meta, need x's cpu"):
        check_weight(normal(2, 48), **arguments)


@pytest.mark.parametrize(("n", "k"), [(32, 50), (20, 48), (17, 17)])
def test_unaligned_sizes(n, k):
    """The GEMM backends decline by shape alone; the reference computes them, on a CPU unasked."""
    x, w = normal(5, k), quantize_rowwise(normal(n, k, seed=1))
    with pytest.raises(BackendUnavailable, match=f"multiples of 16, got K {k}, N {n}"):
        fp8_linear(x, *w, backend="torch")
    stats = FP8LinearStats()
    out = fp8_linear(x, *w, stats=stats)
    want, allowed = exact(x, w)
    assert stats.backend == "reference" and set(stats.declined) == {"triton", "torch"}
    assert ((out.double() - want).abs() <= allowed).all()


# --- choice of a backend


def call(device=H200, m=17, n=32, k=48, dtype=BF16):
    return FP8LinearCall(m, n, k, dtype, device)


def test_backends_in_order():
    assert list_linear_backends() == ("triton", "torch", "reference")
    assert registry_module.list_backends(QUANTIZE_OP) == list_linear_backends()


@pytest.fixture
def with_triton(monkeypatch):
    from hopper_sol.kernels import requirements

    monkeypatch.setattr(requirements, "_importable", lambda module: True)


@pytest.mark.parametrize(
    ("device", "chosen"), [(H200, "triton"), (CPU, "torch"), (DeviceFacts("cpu", "cpu"), "torch")]
)
def test_auto_choice(with_triton, device, chosen):
    assert choose_linear_backend(call(device))[0] == chosen
    assert why_not_linear(call(device)) is None


def test_auto_passes_over_what_failed(with_triton):
    name, declined = choose_linear_backend(call(), exclude=frozenset({"triton"}))
    assert name == "torch" and declined == {"triton": "switched off after it failed"}


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (A100, ["triton: needs SM89 or newer", "torch: needs an NVIDIA GPU of SM89 or newer"]),
        (AMD, ["triton: needs an NVIDIA GPU", "torch: needs an NVIDIA GPU of SM89"]),
        (MAC, ["triton: needs a cuda device", "torch: needs a cpu or cuda device"]),
    ],
)
def test_no_backend_elsewhere(with_triton, device, words):
    reason = why_not_linear(call(device))
    assert all(word in reason for word in (*words, "reference: slower than F.linear"))
    assert why_not_linear(call(device), "reference") is None


def test_shape_rules(with_triton):
    assert why_not_linear(call(k=32784, n=16), "triton") == "needs K up to 32768, got 32784"
    assert why_not_linear(call(k=32768), "triton") is None
    assert why_not_linear(call(k=32784), "torch") is None
    assert "got K 40, N 32" in why_not_linear(call(k=40), "triton")
    assert why_not_linear(call(m=1), "triton") is None
    assert why_not_linear(call(dtype=E4M3), "triton") is None


def test_unknown_backend(weight):
    with pytest.raises(UnknownBackend, match="'auto' or one of triton, torch, reference"):
        fp8_linear(normal(2, 48), *weight, backend="cuda")


def test_explicit_backend_is_never_replaced(weight):
    with pytest.raises(BackendUnavailable, match="'triton' can't run fp8_linear: needs a cuda"):
        fp8_linear(normal(2, 48), *weight, backend="triton")


def test_fast_accumulation_rule():
    assert use_fast_accum(5120) and use_fast_accum(8176)
    assert not use_fast_accum(8192) and not use_fast_accum(13824)


@pytest.mark.parametrize(("k", "fast"), [(48, True), (8960, False)])
def test_fast_accumulation_reaches_the_gemm(monkeypatch, k, fast):
    seen = []
    original = torch._scaled_mm
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda *a, **kw: seen.append(kw["use_fast_accum"]) or original(*a, **kw),
    )
    stats = FP8LinearStats()
    fp8_linear(normal(2, k), *quantize_rowwise(normal(16, k)), stats=stats)
    assert seen == [fast] and stats.fast_accum is fast


def test_stats_name_what_ran(weight):
    stats = FP8LinearStats()
    fp8_linear(normal(2, 48), *weight, stats=stats)
    assert stats.backend == "torch" and "cpu" in stats.declined["triton"]
    fp8_linear(normal(2, 48), *weight, backend="reference", stats=stats)
    assert (stats.backend, stats.declined, stats.fast_accum) == ("reference", {}, False)


def test_a_backend_quantises_with_its_namesake(monkeypatch, weight):
    asked = []
    backends = registry_module._BACKENDS[QUANTIZE_OP]

    def spying(backend):
        def quantize(x, grid):
            asked.append(backend.name)
            return quantize_rowwise_reference(x, grid)

        return dataclasses.replace(backend, load=lambda: quantize)

    for name in ("torch", "reference"):
        monkeypatch.setitem(backends, name, spying(backends[name]))
    for name in ("torch", "reference"):
        fp8_linear(normal(2, 48), *weight, backend=name)
        fp8_linear(quantize_rowwise_reference(normal(2, 48)), *weight, backend=name)
    assert asked == ["torch", "reference"]  # and rows that are quantised already are not again


def test_describe_linear():
    x = normal(2, 5, 48, dtype=BF16)
    described = describe_linear(x, torch.empty(32, 48))
    assert (described.m, described.n, described.k, described.dtype) == (10, 32, 48, BF16)
    rows = describe_linear(quantize_rowwise(x), torch.empty(32, 48))
    assert rows == dataclasses.replace(described, dtype=E4M3)
    assert described.device.type == "cpu"


# --- the custom ops


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(weight, quantised, with_bias):
    """Without opcheck's schema test, which compares inputs by arithmetic that FP8 does not have."""
    x = normal(2, 3, 48)
    rows = quantize_rowwise(x) if quantised else (x, None)
    bias = normal(32) if with_bias else None
    torch.library.opcheck(
        torch.ops.hopper_sol.fp8_linear.default,
        (*rows, *weight, bias, "torch", torch.float16 if quantised else None),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("grid", [None, 0.5])
def test_opcheck_quantize(grid):
    torch.library.opcheck(
        torch.ops.hopper_sol.quantize_rowwise.default,
        (normal(2, 3, 48).transpose(0, 1), grid, "torch"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_fake_shapes():
    with FakeTensorMode():
        x = torch.empty(2, 5, 48, dtype=torch.float16)
        rows = quantize_rowwise(x)
        assert rows.codes.dtype == E4M3 and rows.scale.shape == (2, 5, 1)
        weight8, scale = torch.empty(32, 48, dtype=E4M3), torch.empty(32, 1)
        assert fp8_linear(x, weight8, scale).shape == (2, 5, 32)
        assert fp8_linear(x, weight8, scale).dtype == torch.float16
        assert fp8_linear(rows, weight8, scale).dtype == BF16


def test_compiled_caller_sees_the_ops(weight):
    def layer(x, bias):
        rows = quantize_rowwise(x * 1.0)
        return fp8_linear(rows, *weight, bias) + fp8_linear(x, *weight).to(BF16)

    x, bias = normal(3, 48), normal(32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, bias), layer(x, bias))
