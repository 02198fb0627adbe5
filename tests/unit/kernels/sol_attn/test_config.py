"""Validation and canonical form of settings, layouts, calls and statistics."""

import dataclasses
import math

import pytest
import torch

from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.sol_attn.config import (
    SolAttnCall,
    SolAttnConfig,
    SolAttnStats,
    TokenLayout,
    num_blocks,
    resolve_kv_splits,
)

BAD = {
    "tau": [math.nan, math.inf, -math.inf, -1000.5, 8.5, True, "1.0", None],
    "estimator": ["second", "DIAG", "", None, True, 1],
    "precision": ["fp16", "FP8", 8, True, False],
    "routing": [1, 0, 1.0, None, "yes"],
    "route_source": ["words", "Kernel", None, True],
    "qk_dtype": ["e5m2", "fp8", None, True],
    "k_smoothing": ["kv", None, True, False],
    "v_smoothing": ["block", None, True, False],
    "v_bias_correction": [1, 0, "yes", 1.0],
    "exp_mode": ["exp", None, True],
    "probability_scale": [0.5, 0, 257, 448.0, math.nan, math.inf, True, "256", None],
    "kv_splits": [0, 3, 8, -1, True, False, 1.0, 2.0, "1", None],
    "block_skip": [-0.1, 0.0, 1.0, 1.5, math.nan, True, False, "0.1"],
}
GOOD = {
    "tau": [-1000.0, -1000, 8, 0, 1.5],
    "estimator": ["diag", "exact"],
    "precision": ["bf16", "fp8", None],
    "routing": [True, False],
    "route_source": ["auto", "prepass", "kernel"],
    "qk_dtype": ["e4m3", "int8"],
    "k_smoothing": ["none", "mean", "block"],
    "v_smoothing": ["none", "mean"],
    "v_bias_correction": [False, None],
    "exp_mode": ["exp2", "expcast", "mixed"],
    "probability_scale": [1, 1.0, 37.5, 256],
    "kv_splits": ["auto", 1, 2, 4],
    "block_skip": [None, 1e-6, 0.5],
}
H100 = DeviceFacts("cuda", "NVIDIA H100", (9, 0))


def cases(table):
    return [pytest.param(f, v, id=f"{f}={v!r}") for f, values in table.items() for v in values]


def test_config_tables_cover_every_field():
    names = {f.name for f in dataclasses.fields(SolAttnConfig) if f.init}
    assert set(BAD) == set(GOOD) == names


@pytest.mark.parametrize(("field", "value"), cases(BAD))
def test_config_rejects(field, value):
    with pytest.raises((ValueError, TypeError), match=rf"^{field}: got .* need "):
        SolAttnConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), cases(GOOD))
def test_config_accepts(field, value):
    config = SolAttnConfig(**{field: value})
    assert getattr(config, field) == value
    assert SolAttnConfig.from_variant(config.variant, config.tau) == config


@pytest.mark.parametrize("field", ["tau", "probability_scale", "block_skip"])
def test_config_numbers_are_no_flags_or_strings(field):
    for value in (True, "0.5"):
        with pytest.raises(TypeError, match=f"^{field}: got"):
            SolAttnConfig(**{field: value})


def test_config_v_bias_correction_needs_v_smoothing():
    with pytest.raises(ValueError, match=r"v_bias_correction: got True with v_smoothing 'none'"):
        SolAttnConfig(v_bias_correction=True)
    assert SolAttnConfig(v_bias_correction=True, v_smoothing="mean").corrects_v_bias


@pytest.mark.parametrize(
    ("smoothing", "correction", "want"),
    [
        ("none", None, False),
        ("none", False, False),
        ("mean", None, True),
        ("mean", False, False),
        ("mean", True, True),
    ],
)
def test_config_corrects_v_bias(smoothing, correction, want):
    config = SolAttnConfig(v_smoothing=smoothing, v_bias_correction=correction)
    assert config.corrects_v_bias is want


def test_config_defaults():
    config = SolAttnConfig()
    assert (config.tau, config.estimator, config.routing) == (1.0, "diag", True)
    assert (config.precision, config.kv_splits, config.block_skip) == (None, "auto", None)
    assert config.probability_scale == 256.0  # the E4M3 scale without a loss of light keys


def test_config_is_frozen_and_hashable():
    config = SolAttnConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tau = 2.0
    assert len({config, SolAttnConfig(), SolAttnConfig(tau=1.5)}) == 2


def test_config_variant_ignores_tau_only():
    base = SolAttnConfig()
    assert SolAttnConfig(tau=-1000.0).variant == SolAttnConfig(tau=8.0).variant == base.variant
    configs = {
        SolAttnConfig(**{field: value})
        for field, values in GOOD.items()
        for value in values
        if field != "tau"
    }
    assert len({config.variant for config in configs}) == len(configs)


@pytest.mark.parametrize(("field", "value"), [("probability_scale", 256), ("probability_scale", 1)])
def test_config_equal_settings_have_equal_variants(field, value):
    whole, real = (SolAttnConfig(**{field: x}) for x in (value, float(value)))
    assert whole == real and whole.variant == real.variant


def test_config_from_variant_round_trip():
    config = SolAttnConfig(
        tau=-0.5,
        estimator="exact",
        precision="fp8",
        routing=False,
        qk_dtype="int8",
        k_smoothing="block",
        v_smoothing="mean",
        v_bias_correction=True,
        exp_mode="mixed",
        probability_scale=64.0,
        kv_splits=2,
        block_skip=0.125,
    )
    again = SolAttnConfig.from_variant(config.variant, -0.5)
    assert again == config and again.variant == config.variant
    assert type(again.kv_splits) is int and again.routing is False


def test_config_from_variant_validates():
    broken = SolAttnConfig().variant.replace('"diag"', '"second"')
    with pytest.raises(ValueError, match=r"^estimator: got 'second'"):
        SolAttnConfig.from_variant(broken, 1.0)


def test_config_filled_fills_only_what_is_open():
    defaults = (("precision", "fp8"), ("estimator", "exact"))
    filled = SolAttnConfig(tau=2.0).filled(defaults)
    assert filled == SolAttnConfig(tau=2.0, precision="fp8")
    assert filled.variant == SolAttnConfig(precision="fp8").variant
    given = SolAttnConfig(precision="bf16")
    assert given.filled(defaults) is given


@pytest.mark.parametrize(
    ("kv_splits", "tokens", "precision", "want"),
    [
        ("auto", 1, "fp8", 1),
        ("auto", 16_383, "fp8", 1),
        ("auto", 16_384, "fp8", 2),
        ("auto", 65_535, "fp8", 2),
        ("auto", 65_536, "fp8", 2),
        ("auto", 16_384, "bf16", 1),
        ("auto", 65_535, "bf16", 1),
        ("auto", 65_536, "bf16", 4),
        (1, 65_536, "bf16", 1),
        (4, 100, "fp8", 4),
        (2, 100, "bf16", 2),
    ],
)
def test_resolve_kv_splits(kv_splits, tokens, precision, want):
    assert resolve_kv_splits(kv_splits, tokens, precision) == want


@pytest.mark.parametrize(("tokens", "want"), [(1, 1), (63, 1), (64, 1), (65, 2), (4171, 66)])
def test_num_blocks(tokens, want):
    assert num_blocks(tokens) == want


# --- TokenLayout


@pytest.mark.parametrize("field", ["sink_kv", "dense_q", "video"])
@pytest.mark.parametrize(
    "token_range",
    [(5, 5), (6, 5), (-1, 5), (1,), (1, 2, 3), 7, (0.0, 64.0), (False, True)],
    ids=str,
)
def test_token_layout_rejects_range(field, token_range):
    value = token_range if field == "video" else ((0, 1), token_range)
    with pytest.raises(ValueError, match=rf"^{field}: got .* need \(start, stop\)"):
        TokenLayout(**{field: value})


@pytest.mark.parametrize(
    "grid", [(0, 4, 4), (4, 4), (1, 2, 3, 4), (2, -1, 2), (2.0, 4, 4), (True, 4, 4), 64], ids=str
)
def test_token_layout_rejects_grid(grid):
    with pytest.raises(ValueError, match=r"^grid: got .* need three sizes \(t, h, w\)"):
        TokenLayout(grid=grid)


def test_token_layout_grid_must_fill_the_video():
    assert TokenLayout(video=(7, 67), grid=(3, 4, 5)).grid == (3, 4, 5)
    with pytest.raises(ValueError, match=r"^grid: \(3, 4, 5\) holds 60 tokens, .* 61$"):
        TokenLayout(video=(7, 68), grid=(3, 4, 5))


@pytest.mark.parametrize("field", ["sink_kv", "dense_q", "video"])
def test_token_layout_check_tokens(field):
    layout = TokenLayout(**{field: (3, 100) if field == "video" else ((0, 5), (3, 100))})
    layout.check_tokens(100)
    with pytest.raises(ValueError, match=r"^layout: range \(3, 100\) ends past the 99 tokens of q"):
        layout.check_tokens(99)


def test_token_layout_defaults_are_empty_and_equal():
    assert TokenLayout() == TokenLayout(sink_kv=(), dense_q=(), video=None, grid=None)
    TokenLayout().check_tokens(1)
    assert len({TokenLayout(), TokenLayout()}) == 1


# --- SolAttnCall and SolAttnStats


def test_call_properties():
    call = SolAttnCall((2, 300, 4, 128), torch.bfloat16, H100, SolAttnConfig())
    assert (call.tokens, call.head_dim, call.layout) == (300, 128, TokenLayout())


def test_stats_density_is_exact_blocks_over_all_blocks():
    exact = torch.tensor([[[3, 1], [4, 2]]], dtype=torch.int32)  # B = 1, H = 2, NT = 2
    density = SolAttnStats(exact_blocks=exact, num_kv_blocks=4).density()
    assert density.dtype == torch.float32
    assert density.tolist() == [[[0.75, 1.0], [0.25, 0.5]]]  # (B, NT, H)


def test_stats_do_not_share_their_dict():
    first, second = SolAttnStats(), SolAttnStats()
    first.declined["x"] = "y"
    assert second.declined == {}


@pytest.mark.parametrize("value", [-1, 1.0, True, None])
def test_token_layout_rejects_skipped_queries(value):
    with pytest.raises(ValueError, match=r"skip_q: got .*need a number of tokens, 0 or more"):
        TokenLayout(skip_q=value)


def test_token_layout_skips_whole_blocks_and_not_everything():
    assert [TokenLayout(skip_q=n).skipped_blocks for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]
    TokenLayout(skip_q=99).check_tokens(100)
    with pytest.raises(ValueError, match="skip_q is 100, need less than the 100 tokens of q"):
        TokenLayout(skip_q=100).check_tokens(100)
