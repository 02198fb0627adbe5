"""What the Triton backend declines, and what it fills in. Needs neither Triton nor a GPU."""

import pytest
import torch

from hopper_sol.kernels import registry, requirements, why_not
from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.sol_attn.config import SolAttnCall, SolAttnConfig, TokenLayout
from hopper_sol.kernels.sol_attn.rules import (
    MAX_BLOCKS,
    MAX_HEADS,
    MAX_RANGES,
    slower_than_dense,
)
from hopper_sol.kernels.sol_attn.triton_rules import defaults, unsupported_option

BF16 = torch.bfloat16
A100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0))
L40 = DeviceFacts("cuda", "NVIDIA L40", (8, 9))
H100 = DeviceFacts("cuda", "NVIDIA H100", (9, 0))
CPU = DeviceFacts("cpu", "cpu")


def call(device=H100, *, shape=(1, 4096, 8, 128), layout=None, dtype=BF16, **settings):
    config = SolAttnConfig(**settings)
    return SolAttnCall(shape, dtype, device, config, layout or TokenLayout())


@pytest.mark.parametrize(
    ("device", "precision"), [(A100, "bf16"), (L40, "fp8"), (H100, "fp8"), (CPU, "bf16")]
)
def test_default_precision_is_fp8_where_the_gpu_has_it(device, precision):
    assert defaults(call(device)) == (("precision", precision),)
    filled = SolAttnConfig().filled(defaults(call(device)))
    assert filled.precision == precision
    assert unsupported_option(call(device, precision=precision)) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_skip": 0.1, "precision": "bf16"}, "block_skip is not in the Triton kernels"),
        ({"block_skip": 0.1, "precision": "fp8"}, "block_skip is not in the Triton kernels"),
        (
            {"precision": "fp8", "qk_dtype": "int8"},
            "qk_dtype 'int8' is not in the Triton kernels, which have e4m3",
        ),
        (
            {"precision": "bf16", "route_source": "kernel"},
            "route_source 'kernel' is not in the Triton kernels, which have prepass",
        ),
        (
            {"precision": "fp8", "exp_mode": "expcast"},
            "exp_mode 'expcast' is not in the Triton kernels, which have exp2",
        ),
        (
            {"precision": "fp8", "exp_mode": "mixed"},
            "exp_mode 'mixed' is not in the Triton kernels, which have exp2",
        ),
        (
            {"precision": "fp8", "probability_scale": 1.0},
            "probability_scale 1 is not in the Triton kernels, which have 256",
        ),
    ],
    ids=["skip-bf16", "skip-fp8", "int8", "kernel", "expcast", "mixed", "scale"],
)
def test_unsupported_options(settings, reason):
    assert unsupported_option(call(**settings)) == reason


def test_fp8_needs_sm89():
    reason = unsupported_option(call(A100, precision="fp8"))
    assert reason == f"FP8 needs SM89 or newer, this GPU is {A100.describe()}"
    assert unsupported_option(call(L40, precision="fp8")) is None


@pytest.mark.parametrize("precision", ["bf16", None])
def test_fp8_settings_do_not_count_without_fp8(precision):
    """On a GPU without FP8, None becomes BF16."""
    options = {"qk_dtype": "int8", "exp_mode": "mixed", "probability_scale": 1.0}
    assert unsupported_option(call(A100, precision=precision, **options)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "exact"},
        {"routing": False},
        {"k_smoothing": "mean", "v_smoothing": "mean"},
        {"k_smoothing": "block"},
        {"kv_splits": 4},
        {"tau": -1000.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_the_kernels_have(precision, settings):
    assert unsupported_option(call(precision=precision, **settings)) is None


@pytest.mark.parametrize("name", ["sink_kv", "dense_q"])
def test_ranges(name):
    ranges = tuple((256 * n, 256 * n + 1) for n in range(MAX_RANGES + 1))
    assert unsupported_option(call(layout=TokenLayout(**{name: ranges[:-1]}))) is None
    reason = unsupported_option(call(layout=TokenLayout(**{name: ranges})))
    assert reason == f"{name} has 5 ranges, the Triton kernels take 4"


def test_sizes():
    most = MAX_BLOCKS * 64
    assert unsupported_option(call(shape=(1, most, 1, 128))) is None
    reason = unsupported_option(call(shape=(1, most + 1, 1, 128)))
    assert reason == f"{most + 1} tokens, the Triton kernels take {most}"
    assert unsupported_option(call(shape=(MAX_HEADS // 5, 64, 5, 128))) is None
    reason = unsupported_option(call(shape=(2**12, 64, 16, 128)))
    assert reason == f"batch times heads is {2**16}, the Triton kernels take {MAX_HEADS}"
    # int16 block numbers, and a launch dimension.
    assert torch.iinfo(torch.int16).max == MAX_BLOCKS and MAX_HEADS == 65535


def test_slower_than_dense_holds_back_only_auto():
    reason = "BF16 with every block exact is slower than dense attention, runs only when named"
    for settings in ({"tau": -1000.0}, {"routing": False}):
        for precision, want in (("bf16", reason), ("fp8", None), (None, None)):
            assert slower_than_dense(call(precision=precision, **settings)) == want
    assert slower_than_dense(call(precision="bf16")) is None
    assert slower_than_dense(call(precision="bf16", tau=-999.0)) is None


# --- As registered


@pytest.fixture
def with_triton(monkeypatch):
    """As on a machine that has Triton, whether or not this one has."""
    monkeypatch.setattr(requirements, "_importable", lambda module: module == "triton")


def test_order_and_declines(with_triton):
    assert registry.list_backends("sol_attention") == ("sm90", "triton", "reference")
    chosen, declined = registry.select("sol_attention", call())
    assert chosen.name == "triton"
    assert declined == {
        "sm90": "needs the Python module 'nvidia_cutlass_dsl', which is not installed"
    }
    assert "needs a cuda device" in why_not(call(CPU), "triton")
    assert why_not(call(DeviceFacts("cuda", "NVIDIA V100", (7, 0))), "triton") is not None
    assert why_not(call(DeviceFacts("cuda", "AMD MI300X", is_rocm=True)), "triton") is not None
    assert why_not(call(shape=(1, 64, 1, 64)), "triton") is not None
    for dtype in (BF16, torch.float16, torch.float32):
        assert why_not(call(dtype=dtype), "triton") is None
    dense = call(precision="bf16", tau=-1000.0)
    assert why_not(dense, "triton") is None
    assert "slower than dense" in why_not(dense)


def test_declines_without_triton(monkeypatch):
    monkeypatch.setattr(requirements, "_importable", lambda module: False)
    reason = "needs the Python module 'triton', which is not installed"
    assert why_not(call(), "triton") == reason
    assert f"triton: {reason}" in why_not(call())
