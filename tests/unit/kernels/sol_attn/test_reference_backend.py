"""The reference as a backend: what it forwards, what it declines, where it holds itself back."""

import pytest
import torch

from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.sol_attn import reference_backend
from hopper_sol.kernels.sol_attn.config import SolAttnCall, SolAttnConfig, TokenLayout
from hopper_sol.kernels.sol_attn.emulation import sol_attention_fp8_emulation
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference
from hopper_sol.kernels.sol_attn.reference_backend import (
    slower_than_dense,
    sol_attention_fwd_reference,
    unsupported_option,
)

CPU = DeviceFacts("cpu", "cpu")
LAYOUT = TokenLayout(sink_kv=((0, 3),), dense_q=((200, 201),))


def call(device=CPU, **settings):
    return SolAttnCall((1, 300, 1, 128), torch.bfloat16, device, SolAttnConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"tau": 1.0}),
        ({"tau": 0.3}, {"tau": 0.3}),
        ({"estimator": "exact"}, {"estimator": "exact"}),
        ({"routing": False}, {"routing": False}),
        ({"kv_splits": 4, "k_smoothing": "mean"}, {}),  # no effect without rounding
    ],
    ids=["default", "tau", "exact", "no-routing", "fp8-only"],
)
def test_fwd_reference_bf16_is_the_specification(make_qkv, settings, options):
    q, k, v = make_qkv(700, heads=2, spread=0.3)
    config = SolAttnConfig(precision="bf16", **settings)
    got = sol_attention_fwd_reference(q, k, v, config=config, layout=LAYOUT, scale=0.1)
    common = {"scale": 0.1, "sink_kv": LAYOUT.sink_kv, "dense_q": LAYOUT.dense_q}
    want = sol_attention_reference(q, k, v, **common, **options)
    if options not in ({}, {"tau": 1.0}):  # the option has something to do on this input
        assert not torch.equal(want.out, sol_attention_reference(q, k, v, **common).out)
    assert torch.equal(got[0], want.out) and torch.equal(got[1], want.lse)
    assert got[2].dtype == torch.int32
    assert torch.equal(got[2], want.exact_mask.sum(-1).int())


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"tau": 0.3}, {"tau": 0.3}),
        ({"estimator": "exact"}, {"estimator": "exact"}),
        ({"routing": False}, {"routing": False}),
        ({"k_smoothing": "mean"}, {"k_smoothing": "mean"}),
        ({"k_smoothing": "block"}, {"k_smoothing": "block"}),
        ({"v_smoothing": "mean"}, {"v_smoothing": "mean", "v_bias_correction": True}),
        ({"v_smoothing": "mean", "v_bias_correction": False}, {"v_smoothing": "mean"}),
        ({"exp_mode": "expcast"}, {"exp_mode": "expcast"}),
        ({"probability_scale": 1.0}, {"probability_scale": 1.0}),
    ],
    ids=[
        "default",
        "tau",
        "exact",
        "dense",
        "k",
        "block",
        "v",
        "v-uncorrected",
        "expcast",
        "scale1",
    ],
)
def test_fwd_reference_fp8_is_the_emulation(make_qkv, settings, options):
    q, k, v = make_qkv(700, heads=2, spread=0.3)
    config = SolAttnConfig(precision="fp8", **settings)
    got = sol_attention_fwd_reference(q, k, v, config=config, layout=LAYOUT, scale=0.1)
    common = {"scale": 0.1, "sink_kv": LAYOUT.sink_kv, "dense_q": LAYOUT.dense_q}
    want = sol_attention_fp8_emulation(q, k, v, **common, **options)
    if options:
        assert not torch.equal(want.out, sol_attention_fp8_emulation(q, k, v, **common).out)
    assert torch.equal(got[0], want.out) and torch.equal(got[1], want.lse)
    assert torch.equal(got[2], want.exact_mask.sum(-1).int())


@pytest.mark.parametrize(
    ("kv_splits", "tokens", "want"), [("auto", 16_384, 2), ("auto", 16_383, 1), (4, 130, 4)]
)
def test_fwd_reference_fp8_resolves_splits(monkeypatch, kv_splits, tokens, want):
    seen = {}

    def spy(q, k, v, **options):
        seen.update(options)
        raise InterruptedError  # the answer is in the arguments

    monkeypatch.setattr(reference_backend, "sol_attention_fp8_emulation", spy)
    q = torch.empty(1, tokens, 1, 128)
    config = SolAttnConfig(precision="fp8", kv_splits=kv_splits)
    with pytest.raises(InterruptedError):
        sol_attention_fwd_reference(q, q, q, config=config, layout=TokenLayout(), scale=0.1)
    assert seen["kv_splits"] == want


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_skip": 0.1}, "block_skip is not in the reference"),
        ({"precision": "fp8", "block_skip": 0.1}, "block_skip is not in the reference"),
        ({"precision": "fp8", "qk_dtype": "int8"}, "qk_dtype 'int8' is not in the emulation"),
        ({"precision": "fp8", "exp_mode": "mixed"}, "exp_mode 'mixed' is not in the emulation"),
        ({"precision": "fp8", "route_source": "prepass"}, "route_source 'prepass' is not in the"),
    ],
    ids=["block_skip", "fp8-block_skip", "qk_dtype", "exp_mode", "route_source"],
)
def test_unsupported_option_says_which(settings, reason):
    assert unsupported_option(call(**settings)).startswith(reason)


@pytest.mark.parametrize("precision", ["bf16", None])
def test_unsupported_option_ignores_fp8_settings_without_fp8(precision):
    config = {"qk_dtype": "int8", "exp_mode": "mixed", "route_source": "prepass"}
    assert unsupported_option(call(precision=precision, **config)) is None


def test_unsupported_option_agrees_with_the_implementation(make_qkv):
    q, k, v = make_qkv(65)
    for settings in ({"k_smoothing": "block"}, {"exp_mode": "expcast"}, {"v_smoothing": "mean"}):
        config = SolAttnConfig(precision="fp8", **settings)
        assert unsupported_option(call(precision="fp8", **settings)) is None
        out, *_ = sol_attention_fwd_reference(
            q, k, v, config=config, layout=TokenLayout(), scale=0.1
        )
        assert out.isfinite().all()


@pytest.mark.parametrize(
    "device",
    [
        DeviceFacts("cuda", "NVIDIA H100", (9, 0)),
        DeviceFacts("cuda", "AMD MI300X", is_rocm=True),
        DeviceFacts("mps", "mps"),
    ],
    ids=["sm90", "rocm", "mps"],
)
def test_slower_than_dense_everywhere_but_on_cpu(device):
    assert slower_than_dense(call()) is None
    want = f"slower than dense attention on {device.describe()}, runs there only when named"
    assert slower_than_dense(call(device)) == want
