"""Fused quantisation on a GPU against the specification on the CPU, and against the model's own way."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from hopper_sol.kernels import describe_linear, fp8_linear, quantize_rowwise, why_not_linear
from hopper_sol.kernels.fp8_linear import quantize_gelu, quantize_norm, quantize_swiglu
from hopper_sol.kernels.fp8_linear.config import NormSettings
from hopper_sol.kernels.fp8_linear.fused_reference import (
    activation_reference,
    norm_reference,
    quantize_activation_reference,
    quantize_norm_reference,
)
from hopper_sol.kernels.fp8_linear.reference import QuantizedRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
DTYPES = [BF16, torch.float16, torch.float32]
KERNELS = ["triton", "torch"]
# Tails of a piece, of a row of pieces; the models' widths.
SIZES = [(1, 48), (63, 77), (65, 1000), (300, 1536), (300, 5120), (65, 5376)]
INNER = [(300, 8960), (65, 13824), (65, 14336)]


@pytest.fixture(autouse=True, scope="module")
def fp8_device():
    call = describe_linear(torch.empty(16, 16, device="cuda", dtype=BF16), torch.empty(16, 16))
    reason = why_not_linear(call, "triton")
    if reason:
        pytest.skip(f"triton: {reason}")


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cuda(tensors):
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}


def assert_close(got, want, h):
    """``got`` against the specification's rows ``want`` and what was quantised there, ``h``.

    FP32 results that differ by some 2^-20 of themselves fall on two sides of a BF16 middle once in
    2^-20 / 2^-8, an FP16 middle in 2^-9; with up to four roundings a value in less than 2^-7 cases.
    An E4M3 step is at least four steps of FP16 and 16 of BF16: a quarter of those cases, 2^-9, at
    the most change a code, and by one. A missing rounding moves a third of all values, and so more
    than 2^-7 of the codes.
    A scale follows the row's largest value: with it, by at most 3 steps of 2^-8 (a flip of each
    rounding), seldom.
    """
    got = QuantizedRows(*(t.cpu() for t in got))
    assert got.codes.shape == want.codes.shape and got.scale.shape == want.scale.shape
    assert torch.equal(got.scale.isnan(), want.scale.isnan())
    usable = ~want.scale.isnan().flatten()
    torch.testing.assert_close(got.scale, want.scale, rtol=3 * 2**-8, atol=0, equal_nan=True)
    same_scale = usable & (got.scale == want.scale).flatten()
    if h.dtype == torch.float32:  # nothing is rounded: scales differ in their last bits
        close = (got.scale / want.scale - 1).abs().flatten() <= 2**-18
        assert close[usable].all()
        same_scale = usable
    assert (usable & ~same_scale).sum() <= 1 + 0.05 * usable.sum()
    a, b = got.codes.view(torch.uint8)[same_scale], want.codes.view(torch.uint8)[same_scale]
    assert (a != b).sum() <= 1 + 2**-9 * a.numel()
    back = got.codes.float() * got.scale
    # Half an E4M3 step of what was quantised, and its own distance from ``h``.
    step = torch.finfo(h.dtype).eps if h.dtype != torch.float32 else 2**-18
    size = h.float().abs()
    allowed = torch.maximum(size * 2**-4, got.scale * 2**-10) + 4 * step * (size + got.scale * 448)
    assert ((back - h.float()).abs() <= allowed)[usable].all()


def assert_same_rows(got, want):
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)


# --- activations


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [*SIZES, *INNER])
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_activations(activation, rows, columns, dtype, backend):
    gated = activation == "swiglu"
    x = 2 * normal(rows, columns * (2 if gated else 1), dtype=dtype)
    got = (quantize_swiglu if gated else quantize_gelu)(x.cuda(), backend=backend)
    want = quantize_activation_reference(x, activation)
    assert_close(got, want, activation_reference(x, activation))


def test_gelu_of_every_bf16_value():
    """From -inf to inf: tails, where 1 + tanh cancels, and rows that are not finite."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 256)
    got = QuantizedRows(*(t.cpu() for t in quantize_gelu(every.cuda(), backend="triton")))
    want = quantize_activation_reference(every, "gelu_tanh")
    finite = every.isfinite().all(1)
    assert torch.equal(got.scale.isnan().flatten(), ~finite)
    h = activation_reference(every, "gelu_tanh").float()
    back = got.codes.float() * got.scale
    # 1 + tanh(u) in FP32 is off by 2^-24, times x / 2; a BF16 step and half an E4M3 step on top.
    noise = every.float().abs() * 2**-24 + h.abs() * 2**-7
    allowed = torch.maximum(h.abs() * 2**-4, got.scale * 2**-10) * 1.02 + noise
    assert ((back - h).abs() <= allowed)[finite].all()
    assert (got.scale / want.scale - 1).abs()[finite & (h.abs().amax(1) > 1e-10)].max() <= 2**-7


# --- norms


def modulated(rows, columns, dtype, kind):
    """Arguments of ``quantize_norm`` as the two models have them, on the CPU."""
    weight, bias = 0.5 * normal(2, columns, seed=5, dtype=dtype)
    scale, shift = 0.5 * normal(2, 3, columns, seed=6, dtype=dtype)
    if kind == "wan":
        return {"eps": 1e-6, "scale": scale[:1], "shift": shift[:1]}
    if kind == "affine":
        return {"eps": 1e-6, "weight": 1 + weight, "bias": bias}
    mod_row = torch.arange(rows, dtype=torch.int32) * 3 // max(rows, 1)
    h3 = {"kind": "rms", "eps": 1e-5, "round_product": True, "weight": 1 + weight}
    return {**h3, "scale": scale, "shift": shift, "mod_row": mod_row}


def reference_arguments(arguments):
    names = ("weight", "bias", "scale", "shift", "mod_row")
    settings = NormSettings(
        arguments.get("kind", "layer"), arguments["eps"], arguments.get("round_product", False)
    )
    return settings, *(arguments.get(name) for name in names)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", ["wan", "affine", "h3"])
def test_norms(kind, rows, columns, dtype, backend):
    x = (3 * normal(rows, columns, dtype=torch.float32) + 1).to(dtype)
    arguments = modulated(rows, columns, dtype, kind)
    got = quantize_norm(x.cuda(), **cuda(arguments), backend=backend)
    plain = reference_arguments(arguments)
    assert_close(got, quantize_norm_reference(x, *plain), norm_reference(x, *plain))


@pytest.mark.parametrize("round_product", [False, True])
def test_each_way_to_modulate(round_product):
    """A compiler that merges the rounded product and the sum is seen."""
    x, scale, shift = normal(300, 5120), *(0.5 * normal(2, 1, 5120, seed=1))
    options = {"scale": scale.cuda(), "shift": shift.cuda(), "round_product": round_product}
    got = quantize_norm(x.cuda(), **options, backend="triton")
    for expected, same in ((round_product, True), (not round_product, False)):
        arguments = (NormSettings("layer", 1e-6, expected), None, None, scale, shift, None)
        want, h = quantize_norm_reference(x, *arguments), norm_reference(x, *arguments)
        if same:
            assert_close(got, want, h)
        else:
            with pytest.raises(AssertionError):
                assert_close(got, want, h)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wan", "h3"])
def test_scale_that_has_its_one(kind, dtype, backend):
    """1 + scale in x's dtype, rounded by PyTorch, is what the kernel adds by itself: the same bits."""
    x = (3 * normal(65, 1000, dtype=torch.float32) + 1).to(dtype).cuda()
    arguments = cuda(modulated(65, 1000, dtype, kind))
    plain = quantize_norm(x, **arguments, backend=backend)
    arguments["scale"] = 1 + arguments["scale"]
    assert_same_rows(quantize_norm(x, **arguments, scale_has_one=True, backend=backend), plain)
    # Taken for a plain scale it gives other rows.
    other = quantize_norm(x, **arguments, backend=backend)
    assert not torch.equal(other.codes.view(torch.uint8), plain.codes.view(torch.uint8))


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_eps_and_small_rows(size):
    x = size * normal(60, 5120, dtype=torch.float32)
    x[1], x[2] = 0.0, 0.25
    x = x.to(BF16)
    for kind in ("wan", "h3"):
        arguments = modulated(60, 5120, BF16, kind)
        got = quantize_norm(x.cuda(), **cuda(arguments), backend="triton")
        plain = reference_arguments(arguments)
        assert_close(got, quantize_norm_reference(x, *plain), norm_reference(x, *plain))


def test_modulations_of_a_batch():
    """Chunks of one (B, 6, K), and groups of tokens."""
    x, e = normal(3, 40, 1536), normal(3, 6, 1536, seed=1)
    shift, scale = e.cuda().chunk(6, dim=1)[:2]
    got = quantize_norm(x.cuda(), scale=scale, shift=shift, backend="triton")
    for item in range(3):
        rows = QuantizedRows(got.codes[item], got.scale[item])
        plain = (NormSettings(), None, None, e[item, 1:2], e[item, :1], None)
        assert_close(
            rows, quantize_norm_reference(x[item], *plain), norm_reference(x[item], *plain)
        )


# --- the same as the model's own operations


def flips(got, want):
    """Share of codes that differ in rows of equal scale, and share of rows of another scale."""
    same = (got.scale == want.scale).flatten()
    a, b = got.codes.view(torch.uint8)[same], want.codes.view(torch.uint8)[same]
    return (a != b).float().mean().item(), 1 - same.float().mean().item()


@pytest.mark.parametrize("name", ["gelu", "swiglu", "wan", "affine", "h3"])
def test_equals_the_models_operations_before_quantisation(name):
    """Bounds as in ``assert_close``: rounding points are where PyTorch's CUDA kernels round."""
    columns = {"gelu": 13824, "swiglu": 14336}.get(name, 5120)
    x = normal(300, columns * (2 if name == "swiglu" else 1)).cuda()
    arguments = cuda(modulated(300, columns, BF16, name if name in ("wan", "affine") else "h3"))
    weight, scale, shift = (arguments.get(k) for k in ("weight", "scale", "shift"))
    if name == "gelu":
        got, h = quantize_gelu(x), gelu(x, approximate="tanh")
    elif name == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        got, h = quantize_swiglu(x), silu(gate).mul_(up)
    else:
        got = quantize_norm(x, **arguments)
        if name == "wan":
            h = torch.addcmul(shift, layer_norm(x, (columns,), eps=1e-6), 1 + scale)
        elif name == "affine":
            h = layer_norm(x, (columns,), weight, arguments["bias"], eps=1e-6)
        else:
            h = rms_norm(x, (columns,), weight, eps=1e-5)
            for row in range(3):
                of = arguments["mod_row"] == row
                h[of] = h[of].mul_(1.0 + scale[row]).add_(shift[row])
    codes, scales = flips(got, quantize_rowwise(h))
    assert codes <= 2**-9 and scales <= 0.05


# --- memory


def test_strided_rows():
    fused = normal(300, 3 * 1536).cuda()
    fused[:, 1536:1544] = float("nan")
    view = fused[:, 1544 : 1544 + 1500]
    packed = view.contiguous()
    assert_same_rows(quantize_gelu(view), quantize_gelu(packed))
    assert_same_rows(quantize_swiglu(view), quantize_swiglu(packed))
    assert_same_rows(quantize_norm(view), quantize_norm(packed))


def test_rows_beyond_two_to_the_31():
    """Offsets of the last rows do not fit 32 bits."""
    x = torch.zeros(2**31 // 32768 + 3, 32768, dtype=BF16, device="cuda")
    last = normal(2, 32768)
    x[-2:] = last.cuda()
    for got, want, h in (
        (
            quantize_gelu(x, backend="triton"),
            quantize_activation_reference(last, "gelu_tanh"),
            activation_reference(last, "gelu_tanh"),
        ),
        (
            quantize_norm(x, backend="triton"),
            quantize_norm_reference(last, NormSettings()),
            norm_reference(last, NormSettings()),
        ),
    ):
        assert_close(QuantizedRows(got.codes[-2:], got.scale[-2:]), want, h)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_rows_stay_alone(bad, dtype):
    x = normal(40, 2 * 1000, dtype=dtype)
    x[3, 100], x[39, 999] = bad, bad
    lost = torch.zeros(40, dtype=torch.bool)
    lost[[3, 39]] = True
    device = x.cuda()
    narrow = device[:, :1000]
    for got in (quantize_gelu(narrow), quantize_swiglu(device), quantize_norm(narrow)):
        assert torch.equal(got.scale.isnan().flatten().cpu(), lost)
        assert got.codes.float()[lost.cuda()].abs().sum() == 0


def test_rows_of_one_gpu_while_another_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = normal(40, 512)
    with torch.cuda.device(0):
        assert_close(
            quantize_gelu(x.to("cuda:1")),
            quantize_activation_reference(x, "gelu_tanh"),
            activation_reference(x, "gelu_tanh"),
        )


def test_nothing_waits_for_the_device():
    x = normal(300, 1536).cuda()
    arguments = cuda(modulated(300, 1536, BF16, "h3"))

    def everything():
        for backend in KERNELS:
            quantize_gelu(x, backend=backend)
            quantize_swiglu(x, backend=backend)
            quantize_norm(x, **arguments, backend=backend)

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_quantisation_feeds_three_linears():
    x, scale, shift = normal(300, 1536).cuda(), *(normal(2, 1, 1536, seed=1).cuda())
    rows = quantize_norm(x, scale=scale, shift=shift)
    h = torch.addcmul(shift, layer_norm(x, (1536,), eps=1e-6), 1 + scale)
    for seed in (1, 2, 3):
        w = quantize_rowwise(normal(512, 1536, seed=seed).cuda())
        out, want = fp8_linear(rows, *w), fp8_linear(h, *w)
        assert out.dtype == BF16
        # Codes differ in 2^-9 of all cases at most, by 2^-3: sums by 2^-3 2^-4.5 of their size.
        assert ((out - want).float().norm() / want.float().norm()) <= 2**-7


def test_compiled_caller():
    weight = quantize_rowwise(normal(64, 512, seed=1).cuda())
    scale, shift = normal(2, 1, 512, seed=2).cuda()

    def layer(x):
        rows = quantize_norm(x, scale=scale, shift=shift)
        up = torch.cat([fp8_linear(rows, *weight)] * 8, -1)
        return fp8_linear(quantize_gelu(up), *weight)

    compiled = torch.compile(layer, fullgraph=True)
    for rows in (40, 77):
        x = normal(rows, 512).cuda()
        assert torch.equal(compiled(x), layer(x))
