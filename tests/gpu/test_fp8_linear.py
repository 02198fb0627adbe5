"""FP8 Linear on a GPU: every backend's codes are the same bits, and the GEMM is right at odd sizes."""

import pytest
import torch

from hopper_sol.kernels import (
    BackendUnavailable,
    FP8LinearStats,
    QuantizedRows,
    describe_linear,
    fp8_linear,
    quantize_rowwise,
    why_not_linear,
)
from hopper_sol.kernels.fp8_linear.reference import (
    fp8_linear_reference,
    quantize_rowwise_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
DTYPES = [BF16, torch.float16, torch.float32]
ROWS = [1, 15, 16, 17, 255, 4171]
WIDTHS = [16, 48, 1536, 8960, 13824]
# Further input features of the models, and a row that ends within a piece.
MORE_WIDTHS = [1000, 5120, 5376, 7168, 14336, 32768]
KERNELS = ["triton", "torch"]


@pytest.fixture(autouse=True, scope="module")
def fp8_device():
    call = describe_linear(torch.empty(16, 16, device="cuda", dtype=BF16), torch.empty(16, 16))
    for backend in KERNELS:
        reason = why_not_linear(call, backend)
        if reason:
            pytest.skip(f"{backend}: {reason}")


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rel_l2(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


def assert_same_bits(got, want):
    assert torch.equal(got.codes.cpu().view(torch.uint8), want.codes.cpu().view(torch.uint8))
    got_scale, want_scale = got.scale.cpu(), want.scale.cpu()
    assert torch.equal(got_scale.isnan(), want_scale.isnan())
    assert torch.equal(got_scale.nan_to_num(), want_scale.nan_to_num())


# --- row quantisation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [*WIDTHS, *MORE_WIDTHS])
@pytest.mark.parametrize("rows", [1, 17, 4171])
def test_codes_and_scales_are_the_cpus(rows, columns, dtype):
    x = normal(rows, columns, dtype=dtype)
    want = quantize_rowwise_reference(x)
    for backend in ("triton", "torch", "reference"):
        assert_same_bits(quantize_rowwise(x.cuda(), backend=backend), want)


@pytest.mark.parametrize("grid", [1.0, 0.00731, 3.7e-5])
@pytest.mark.parametrize("columns", [48, 5120])
def test_grid(columns, grid):
    codes = quantize_rowwise_reference(normal(64, columns, dtype=torch.float32)).codes.float()
    x = (codes * grid).to(BF16)
    want = quantize_rowwise_reference(x, grid)
    for backend in ("triton", "torch"):
        assert_same_bits(quantize_rowwise(x.cuda(), backend=backend, grid=grid), want)


def test_every_bf16_value():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    small = every[every.isfinite() & (every.abs() <= 448)]
    small = small[: len(small) // 512 * 512].view(-1, 512).clone()
    small[:, 0] = 0.3  # values in units of an odd scale, many of them between two codes
    # In rows of this size a quotient would give other codes than the product with a reciprocal.
    odd = small.clamp(-1.5, 1.5)
    odd[:, 0] = 1.5
    for x in (every.view(-1, 64), small, odd):  # the first has rows with NaN and infinities
        want = quantize_rowwise_reference(x)
        for backend in ("triton", "torch"):
            assert_same_bits(quantize_rowwise(x.cuda(), backend=backend), want)


def test_rows_beyond_two_to_the_31():
    """Offsets of the last rows do not fit 32 bits."""
    x = torch.zeros(2**31 // 32768 + 3, 32768, dtype=BF16, device="cuda")
    x[-2:] = normal(2, 32768).cuda()
    got = quantize_rowwise(x, backend="triton")
    want = quantize_rowwise_reference(x[-2:].cpu())
    assert_same_bits(QuantizedRows(got.codes[-2:], got.scale[-2:]), want)


def test_strided_rows():
    fused = normal(300, 3 * 1536).cuda()
    for part in fused.split(1536, 1):
        want = quantize_rowwise_reference(part.contiguous().cpu())
        assert_same_bits(quantize_rowwise(part, backend="triton"), want)


def test_rows_of_one_gpu_while_another_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = normal(40, 512)
    with torch.cuda.device(0):
        assert_same_bits(quantize_rowwise(x.to("cuda:1")), quantize_rowwise_reference(x))


# --- the Linear


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("backend", KERNELS)
def test_gemm(backend, m, k, with_bias):
    n = 1536 if k >= 1536 else 48
    x, bias = normal(m, k).cuda(), normal(n, seed=2).cuda() if with_bias else None
    weight = quantize_rowwise(normal(n, k, seed=1).cuda())
    out = fp8_linear(x, *weight, bias, backend=backend)
    want = fp8_linear_reference(quantize_rowwise(x), *weight, bias)
    assert out.shape == (m, n) and out.dtype == BF16
    # Both round once to BF16. Fast accumulation (K below 8192) cuts each of up to 1536 / 32 partial
    # sums to 14 bits: 48 2^-14 at the very most, if every cut went the same way.
    assert rel_l2(out, want) <= 2**-8


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtype(backend, dtype):
    weight = quantize_rowwise(normal(64, 512, seed=1).cuda())
    x = normal(40, 512, dtype=dtype).cuda()
    out = fp8_linear(x, *weight, backend=backend)
    assert out.dtype == dtype
    assert rel_l2(out, fp8_linear_reference(quantize_rowwise(x), *weight)) <= 2**-8


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_row_does_not_spread(backend, bad):
    x, weight = normal(40, 512).cuda(), quantize_rowwise(normal(64, 512, seed=1).cuda())
    bias = normal(64).cuda()
    clean = fp8_linear(x, *weight, bias, backend=backend)
    x[3, 100], x[39, 0] = bad, bad
    out = fp8_linear(x, *weight, bias, backend=backend)
    assert out[[3, 39]].isnan().all()
    out[[3, 39]] = clean[[3, 39]]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("backend", KERNELS)
def test_zero_rows_and_no_rows(backend):
    weight, bias = quantize_rowwise(normal(64, 512).cuda()), normal(64).cuda()
    zeros = torch.zeros(2, 3, 512, dtype=BF16, device="cuda")
    assert torch.equal(fp8_linear(zeros, *weight, bias, backend=backend), bias.expand(2, 3, 64))
    assert fp8_linear(zeros[:0], *weight, bias, backend=backend).shape == (0, 3, 64)
    assert fp8_linear(zeros[0, 0], *weight, bias, backend=backend).shape == (64,)


@pytest.mark.parametrize("backend", KERNELS)
def test_weight_of_any_strides(backend):
    x, weight = normal(40, 512).cuda(), quantize_rowwise(normal(64, 512, seed=1).cuda())
    want = fp8_linear(x, *weight, backend=backend)
    turned = weight.codes.t().contiguous().t()
    wide = torch.zeros(64, 2, device="cuda")
    wide[:, :1] = weight.scale
    assert torch.equal(fp8_linear(x, turned, wide[:, :1], backend=backend), want)


@pytest.mark.parametrize("n", [16, 48, 4096])
def test_shared_quantisation_and_narrow_outputs(n):
    x, weight = normal(300, 1536).cuda(), quantize_rowwise(normal(n, 1536, seed=1).cuda())
    assert torch.equal(fp8_linear(quantize_rowwise(x), *weight), fp8_linear(x, *weight))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("k", "n"), [(1536, 1536), (1536, 8960), (8960, 1536), (13824, 5120)])
def test_error_against_bf16_at_wan_sizes(k, n, backend):
    x, w = normal(4171, k).cuda(), normal(n, k, seed=1).cuda() * k**-0.5
    out = fp8_linear(x, *quantize_rowwise(w, backend=backend), backend=backend)
    # Two operands with an E4M3 rounding each (README.md, "Accuracy").
    assert 0.033 <= rel_l2(out, torch.nn.functional.linear(x, w)) <= 0.04


def test_unaligned_sizes_decline_and_auto_does_not_crawl():
    x, weight = normal(40, 50).cuda(), quantize_rowwise(normal(64, 50).cuda())
    for backend in (*KERNELS, "auto"):
        with pytest.raises(BackendUnavailable, match="multiples of 16, got K 50"):
            fp8_linear(x, *weight, backend=backend)
    assert fp8_linear(x, *weight, backend="reference").shape == (40, 64)


def test_auto_takes_triton():
    stats = FP8LinearStats()
    x, weight = normal(40, 512).cuda(), quantize_rowwise(normal(64, 512).cuda())
    fp8_linear(x, *weight, stats=stats)
    assert stats.backend == "triton" and stats.declined == {} and stats.fast_accum


def test_nothing_waits_for_the_device():
    x, w = normal(300, 1536).cuda(), normal(1536, 1536, seed=1).cuda()
    for backend in KERNELS:
        fp8_linear(x, *quantize_rowwise(w, backend=backend, grid=0.5), backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in KERNELS:
            fp8_linear(x, *quantize_rowwise(w, backend=backend, grid=0.5), backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_caller():
    weight = quantize_rowwise(normal(64, 512).cuda())

    def layer(x):
        rows = quantize_rowwise(x * 1.0)
        return fp8_linear(rows, *weight) + fp8_linear(x, *weight)

    compiled = torch.compile(layer, fullgraph=True)
    for rows in (40, 77, 300):
        x = normal(rows, 512).cuda()
        assert rel_l2(compiled(x), layer(x)) <= 2**-8
