"""What the SM90 backend declines, fills in and splits. Needs neither CuTe DSL nor a GPU."""

import pytest
import torch

from hopper_sol.kernels import registry, requirements, why_not
from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.sol_attn import sm90_rules
from hopper_sol.kernels.sol_attn.config import SolAttnCall, SolAttnConfig, TokenLayout
from hopper_sol.kernels.sol_attn.sm90_rules import choose_splits, defaults, unsupported_option
from hopper_sol.kernels.sol_attn.sm90_variant import SHARED_BYTES, Variant

BF16 = torch.bfloat16
H100 = DeviceFacts("cuda", "NVIDIA H100", (9, 0))
B200 = DeviceFacts("cuda", "NVIDIA B200", (10, 0))
L40 = DeviceFacts("cuda", "NVIDIA L40", (8, 9))


def call(device=H100, *, shape=(1, 4096, 8, 128), layout=None, dtype=BF16, **settings):
    config = SolAttnConfig(**settings)
    return SolAttnCall(shape, dtype, device, config, layout or TokenLayout())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_skip": 0.1, "precision": "bf16"}, "block_skip is not in the SM90 kernels"),
        ({"qk_dtype": "int8"}, "qk_dtype 'int8' is not in the SM90 kernels, which have e4m3"),
        ({"exp_mode": "mixed"}, "exp_mode 'mixed' is not in the SM90 kernels, which have exp2"),
        (
            {"probability_scale": 1.0},
            "probability_scale 1 is not in the SM90 kernels, which have 256",
        ),
        (
            {"k_smoothing": "block"},
            "k_smoothing 'block' is not in the SM90 kernels, which have none and mean",
        ),
    ],
    ids=["skip", "int8", "mixed", "scale", "block"],
)
def test_unsupported_options(settings, reason):
    assert unsupported_option(call(**{"precision": "fp8", **settings})) == reason


@pytest.mark.parametrize("name", ["qk_dtype", "exp_mode", "probability_scale", "k_smoothing"])
def test_fp8_settings_do_not_count_in_bf16(name):
    value = {"qk_dtype": "int8", "exp_mode": "mixed", "probability_scale": 1.0}.get(name, "block")
    assert unsupported_option(call(precision="bf16", **{name: value})) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "exact"},
        {"routing": False},
        {"k_smoothing": "mean", "v_smoothing": "mean"},
        {"kv_splits": 4},
        {"tau": -1000.0},
        {"route_source": "prepass"},
        {"route_source": "kernel"},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["bf16", "fp8", None])
def test_what_the_kernel_has(precision, settings):
    assert unsupported_option(call(precision=precision, **settings)) is None


def test_ranges_and_sizes():
    ranges = tuple((256 * n, 256 * n + 1) for n in range(5))
    for name in ("sink_kv", "dense_q"):
        assert unsupported_option(call(layout=TokenLayout(**{name: ranges[:4]}))) is None
        reason = unsupported_option(call(layout=TokenLayout(**{name: ranges})))
        assert reason == f"{name} has 5 ranges, the SM90 kernels take 4"
    assert unsupported_option(call(shape=(1, 64 * 32_767, 1, 128))) is None
    reason = unsupported_option(call(shape=(1, 64 * 32_767 + 1, 1, 128)))
    assert reason == "2097089 tokens, the SM90 kernels take 2097088"
    reason = unsupported_option(call(shape=(2**12, 64, 16, 128)))
    assert reason == "batch times heads is 65536, the SM90 kernels take 65535"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bits_must_fit_where_they_are_decided(precision):
    """896 words of 32 blocks; the prepass takes more."""
    most = 896 * 32 * 64
    for source, tokens, fits in [
        ("kernel", most, True),
        ("kernel", most + 1, False),
        ("prepass", most + 1, True),
        ("auto", most + 1, True),
    ]:
        shape = (1, tokens, 8, 128)
        reason = unsupported_option(call(shape=shape, precision=precision, route_source=source))
        assert (reason is None) == fits
    reason = unsupported_option(call(shape=(1, most + 1, 8, 128), route_source="kernel"))
    assert reason == "route_source 'kernel' with 1835009 tokens, the SM90 kernels take 1835008"


def test_default_precision():
    assert defaults(call()) == (("precision", "fp8"),)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((1, 32_760, 40, 128), 1),  # 171 row tiles of 40 heads
        ((1, 32_760, 1, 128), 1),  # 171 row tiles are enough for 132 multiprocessors
        ((1, 16_384, 1, 128), 2),  # 86 are not
        ((1, 8_192, 1, 128), 2),  # two groups of 64 blocks can't make four parts
        ((1, 4_096, 1, 128), 1),  # one group
        ((2, 16_384, 1, 128), 1),
        ((1, 12_288, 1, 128), 2),  # three groups
    ],
)
def test_splits(monkeypatch, shape, splits):
    monkeypatch.setattr(sm90_rules, "multiprocessors", lambda device: 132)
    assert choose_splits(shape, torch.device("cuda")) == splits


def test_variants_fit_shared_memory_and_have_names_of_their_own():
    names = set()
    for precision in ("bf16", "fp8"):
        for source in ("words", "all"):
            for flags in range(8):
                variant = Variant(precision, source, *(bool(flags >> i & 1) for i in range(3)))
                names.add(variant.name)
                assert variant.name.replace("_", "").isalnum()
                element = 1 if variant.fp8 else 2
                tile = 64 * 128 * element
                held = variant.stages * 2 * tile + 3 * tile * variant.q_buffers + 3 * 64 * 128 * 2
                assert held + 1024 <= SHARED_BYTES
    assert len(names) == 32


# --- As registered


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(requirements, "_importable", lambda module: True)


def test_sm90_comes_first_on_hopper_only(everything_installed):
    assert registry.list_backends("sol_attention")[0] == "sm90"
    assert registry.choose("sol_attention", call()) == ("sm90", {})
    for device in (B200, L40):
        name, declined = registry.choose("sol_attention", call(device))
        assert name == "triton"
        assert declined["sm90"] == f"needs SM9x, this GPU is {device.describe()}"


def test_what_it_declines_goes_to_triton(everything_installed):
    name, declined = registry.choose("sol_attention", call(precision="fp8", k_smoothing="block"))
    assert name == "triton" and list(declined) == ["sm90"]


def test_dense_bf16_is_left_to_dense_kernels(everything_installed):
    dense = call(precision="bf16", tau=-1000.0)
    assert "sm90: BF16 with every block exact is slower than dense" in why_not(dense)
    assert why_not(dense, "sm90") is None
    assert why_not(call(precision="fp8", tau=-1000.0)) is None
