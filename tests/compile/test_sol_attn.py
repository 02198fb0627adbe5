"""Every Triton kernel of Sol-Attn compiles, into the instructions it is meant to use."""

import re

import pytest
import torch

from hopper_sol.kernels.sol_attn import SolAttnConfig, TokenLayout, triton_fwd, triton_route
from hopper_sol.kernels.sol_attn.triton_backend import sol_attention_fwd_triton
from hopper_sol.kernels.sol_attn.triton_thresholds import route_thresholds
from hopper_sol.kernels.sol_attn.triton_words import route_words
from hopper_sol.kernels.testing import fused_qkv_views

BF16 = torch.bfloat16
# Shared memory that one program may have, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What ptxas puts aside in _attend to keep to three programs a multiprocessor: addresses, outside
# the main loop. More than now means that something new lives through the loop.
SPILLED_BYTES = {"bf16-ordered": 64, "fp8-v-mean": 40}
SPILLED_BYTES_OF_OTHERS = 16
# Reads of them inside the main loop, one address each. The default path has none.
RELOADS_IN_LOOP = {"bf16-ordered": 1}
READERS = {"_summarise_bf16", "_summarise_fp8", "_round_residual_keys", "_round_values"}
LOCAL_MEMORY = r"\b(LDL|STL)\b"
OPTIONS = {
    "bf16": {"precision": "bf16"},
    "bf16-exact": {"precision": "bf16", "estimator": "exact"},
    "bf16-dense": {"precision": "bf16", "routing": False},
    "bf16-splits": {"precision": "bf16", "kv_splits": 2},
    "bf16-ordered": {"precision": "bf16", "ordered": True},
    "fp8": {"precision": "fp8"},
    "fp8-ordered": {"precision": "fp8", "ordered": True},
    "fp8-k-mean": {"precision": "fp8", "k_smoothing": "mean"},
    "fp8-k-block": {"precision": "fp8", "k_smoothing": "block"},
    "fp8-v-mean": {"precision": "fp8", "v_smoothing": "mean", "v_bias_correction": False},
    "fp8-all-splits": {
        "precision": "fp8",
        "k_smoothing": "mean",
        "v_smoothing": "mean",
        "kv_splits": 4,
    },
}


def zeros(tokens=130, heads=2, batch=1, dtype=BF16):
    return tuple(torch.zeros(batch, tokens, heads, 128, dtype=dtype) for _ in range(3))


def run(inputs=None, *, layout=None, scale=0.1, with_lse=False, ordered=False, **options):
    """Compiles what the call would launch; the values mean nothing."""
    inputs = inputs or zeros()
    sol_attention_fwd_triton(
        *inputs,
        config=SolAttnConfig(**options),
        layout=layout or TokenLayout(),
        scale=scale,
        with_lse=with_lse,
        order=torch.arange(inputs[0].shape[1]) if ordered else None,
    )


def named(launches, name):
    (kernel,) = {kernel.key: kernel for kernel in launches if kernel.name == name}.values()
    return kernel


def main_loop(kernel):
    """The loop over exact blocks: the one that copies ahead."""
    (body,) = [body for body in kernel.loops() if any("LDGSTS" in text for text in body)]
    return body


def opcodes(body, pattern):
    return [text for text in body if re.search(pattern, text)]


# --- sm_90


@pytest.mark.parametrize("name", OPTIONS)
def test_compiles(launches, name):
    options = OPTIONS[name]
    run(**options)
    names = [kernel.name for kernel in launches]
    prepares = {
        "bf16": ["_summarise_bf16"],
        "fp8": ["_summarise_fp8", "_value_scales", "_round_mean_keys", "_round_values"],
    }[options["precision"]]
    if "mean" in (options.get("k_smoothing"), options.get("v_smoothing")):
        prepares = ["_sampled_means", *prepares]
    if options.get("k_smoothing") == "block":
        prepares = [*prepares[:-1], "_round_residual_keys", prepares[-1]]
    if options.get("v_smoothing") and options.get("v_bias_correction", True):
        prepares.append("_corrected_offset")
    routes = ["_route"] if options.get("routing") is False else ["_moments", "_route"]
    merges = ["_merge"] if "kv_splits" in options else []
    assert names == [*prepares, *routes, "_attend", *merges]
    for kernel in launches:
        assert kernel.shared_bytes <= SHARED_LIMIT[90]
    attend = named(launches, "_attend")
    assert attend.shared_bytes <= triton_fwd.SHARED_BYTES[options["precision"]]
    if options.get("k_smoothing") != "block":
        assert attend.registers <= triton_fwd.MAX_REGISTERS
    assert attend.spilled_bytes <= SPILLED_BYTES.get(name, SPILLED_BYTES_OF_OTHERS)
    assert len(opcodes(main_loop(attend), LOCAL_MEMORY)) <= RELOADS_IN_LOOP.get(name, 0)
    for kernel in launches:
        if kernel.name not in ("_attend", "_route"):
            assert kernel.spilled_bytes == 0, kernel.name
        if kernel.name in READERS:  # whole vectors, no value by itself
            assert kernel.count(r"LDG\.E\.128") > 0, kernel.name
            assert kernel.count(r"LDG\.E\.U16") == 0, kernel.name


def test_diagonal_estimator_does_not_spill(launches):
    run(precision="bf16")
    assert named(launches, "_route").spilled_bytes == 0


@pytest.mark.parametrize(
    ("precision", "opcode", "other"), [("bf16", "HGMMA", "QGMMA"), ("fp8", "QGMMA", "HGMMA")]
)
def test_main_loop(launches, precision, opcode, other):
    """Warp-group products on operands in shared memory, copies ahead, no local memory."""
    run(precision=precision)
    attend = named(launches, "_attend")
    loop = main_loop(attend)
    assert attend.count(opcode) > 0 and attend.count(other) == 0
    # 64x64x128 and 64x128x64 in steps of 32 bytes of the inner dimension.
    inner = {"bf16": 16, "fp8": 32}[precision]
    assert len(opcodes(loop, rf"{opcode}\.64x64x{inner}\.F32")) == 128 // inner
    assert len(opcodes(loop, rf"{opcode}\.64x128x{inner}\.F32")) == 64 // inner
    assert opcodes(loop, LOCAL_MEMORY) == []
    # Each of 128 threads copies 16 bytes at a time, and nothing else of K and V is loaded.
    tile = 64 * 128 * {"bf16": 2, "fp8": 1}[precision]
    copies = opcodes(loop, r"LDGSTS\S*\.128")
    assert len(copies) == 2 * tile // (128 * 16)
    # One copy in the loop and STAGES - 1 of the same ahead of it.
    assert attend.count(r"LDGSTS\S*\.128") == triton_fwd.STAGES * len(copies)
    # ldmatrix would mean that V is turned in registers.
    assert opcodes(loop, r"\bLDSM\b") == []


def test_fp8_products_start_from_zero(launches):
    """No chain of FP8 products runs over more than one block.

    A tensor core adds FP8 products with some 13 bits; from block to block the sums are kept in FP32
    (README.md, "FP8"). Each chain begins with an instruction that takes RZ for its accumulator:
    one in four of 64x64x32 (inner dimension 128), one in two of 64x128x32 (64).
    """
    run(precision="fp8")
    attend = named(launches, "_attend")
    texts = [text for _, text in attend.instructions()]
    for shape, chain in (("64x64x32", 4), ("64x128x32", 2)):
        found = opcodes(texts, rf"QGMMA\.{shape}")
        fresh = opcodes(found, r"\bRZ\b")
        assert len(found) == chain * len(fresh) > 0
        accumulates = [re.search(r"\bRZ\b", text) is None for text in found]
        assert accumulates == [place % chain != 0 for place in range(len(found))]
    # ... and FP32 instructions rescale and add 64 x 128 sums, 64 a thread.
    assert len(opcodes(main_loop(attend), r"\b(FFMA|FFMA2)\b")) >= 64


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_probabilities_are_cast_in_pairs(launches, precision):
    run(precision=precision)
    cast = {"bf16": r"F2FP\.BF16", "fp8": r"F2FP\.SATFINITE\.E4M3"}[precision]
    # 64 x 64 probabilities over 128 threads, two an instruction.
    assert len(opcodes(main_loop(named(launches, "_attend")), cast)) == 16


# --- One binary for every length, tau, layout and view


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_recompilation(launches, options):
    """Only what is in ``SolAttnConfig.variant`` and the number of heads makes another kernel."""
    calls = [
        {"inputs": zeros(130)},
        {"inputs": zeros(4160), "tau": 1.5},
        {"inputs": zeros(5000), "tau": -1000.0, "layout": TokenLayout(sink_kv=((0, 64),))},
        {"inputs": zeros(1), "scale": 1.0},
        {"inputs": zeros(64 * 16), "layout": TokenLayout(dense_q=((0, 1), (100, 200)))},
        {"inputs": fused_qkv_views(*zeros(200))},
        {"inputs": fused_qkv_views(*zeros(130), per_head=True)},
        {"inputs": zeros(130, batch=3)},
        {"inputs": zeros(130, dtype=torch.float32)},
    ]
    seen = []
    for call in calls:
        before = len(launches)
        run(**{**options, **call})
        seen.append([(kernel.name, kernel.key) for kernel in launches[before:]])
    assert all(keys == seen[0] for keys in seen)


def test_heads_make_few_binaries(launches):
    """1, multiples of 16, and all others: what Triton knows of an integer argument."""
    for heads in (1, 2, 12, 24, 40, 16, 48):
        run(zeros(65, heads), precision="bf16")
    assert len({kernel.key for kernel in launches if kernel.name == "_attend"}) <= 3


# --- Other targets

TARGETS = [(80, "bf16"), (89, "bf16"), (89, "fp8"), (100, "bf16"), (100, "fp8")]
PRODUCT = {
    (80, "bf16"): r"HMMA\.16816\.F32\.BF16",
    (89, "bf16"): r"HMMA\.16816\.F32\.BF16",
    (89, "fp8"): r"QMMA\.16832\.F32\.E4M3\.E4M3",
    (100, "bf16"): "UTCHMMA",
    (100, "fp8"): "UTCQMMA",
}


@pytest.fixture
def stages_of(monkeypatch, capability):
    """``_stages``, and routing's ``_launch_shape``, as they decide on such a GPU."""
    properties = type("Properties", (), {"shared_memory_per_block_optin": SHARED_LIMIT[capability]})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    decide = triton_fwd._stages.__wrapped__
    monkeypatch.setattr(
        triton_fwd, "_stages", lambda precision, device: decide(precision, torch.device("cuda"))
    )
    shape = triton_route._launch_shape.__wrapped__
    monkeypatch.setattr(triton_route, "_launch_shape", lambda device: shape(torch.device("cuda")))
    return triton_fwd._stages


@pytest.mark.parametrize(("capability", "precision"), TARGETS)
def test_other_targets(launches, stages_of, capability, precision):
    run(precision=precision)
    attend = named(launches, "_attend")
    assert attend.count(PRODUCT[capability, precision]) > 0
    assert attend.count("LDGSTS") > 0
    for kernel in launches:
        # Routing has a test of its own.
        if kernel.name != "_route":
            assert kernel.shared_bytes <= SHARED_LIMIT[capability], kernel.name


@pytest.mark.parametrize("estimator", ["diag", "exact"])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_routing_fits_every_target(launches, stages_of, capability, estimator):
    run(precision="bf16", estimator=estimator)
    assert named(launches, "_route").shared_bytes <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("estimator", ["diag", "exact"])
def test_routing_of_the_sm90_backend(launches, estimator):
    """Words and thresholds; the kernels that both need are the same."""
    means = [torch.zeros(1, 2, 130, 128) for _ in range(2)]
    options = {"tau": 1.0, "estimator": estimator, "scale_log2": 0.1, "layout": TokenLayout()}
    route_words(*means, **options)
    route_thresholds(*means, **options)
    before = ["_moments"] if estimator == "diag" else ["_moments", "_score_variance"]
    names = [kernel.name for kernel in launches]
    assert names == [*before, "_route_words", *before, "_route_thresholds"]
    for kernel in launches:
        assert kernel.spilled_bytes == 0, kernel.name
        assert kernel.shared_bytes <= SHARED_LIMIT[90], kernel.name


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_stages_fit_shared_memory(stages_of, capability):
    """What is compiled with all stages is no larger than what ``_stages`` believes (above, sm_90)."""
    for precision, needed in triton_fwd.SHARED_BYTES.items():
        want = triton_fwd.STAGES - (needed > SHARED_LIMIT[capability])
        assert stages_of(precision, None) == want
    assert stages_of("bf16", None) == {80: 3, 89: 2, 90: 3}[capability]
