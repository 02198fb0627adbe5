"""What a model takes on the device, from a header; sizes are the released models'."""

import pytest

from hopper_sol.nodes.models.memory_plan import GIB, SAMPLING_BYTES, MemoryEstimate, estimate
from hopper_sol.nodes.models.stored_formats import FP8Layers, wan_layers


class Header:
    """A header of (dtype, shape) by key."""

    def __init__(self, tensors):
        self._tensors = tensors
        self.keys = frozenset(tensors)

    def dtype(self, key):
        return self._tensors[key][0]

    def shape(self, key):
        return self._tensors[key][1]


def wan_header(dim, ffn, blocks, dtype="BF16"):
    """Names and sizes of a Wan 2.1 text-to-video model."""
    shapes = {
        "patch_embedding.weight": (dim, 16, 1, 2, 2),
        "text_embedding.0.weight": (dim, 4096),
        "text_embedding.2.weight": (dim, dim),
        "time_embedding.0.weight": (dim, 256),
        "time_embedding.2.weight": (dim, dim),
        "time_projection.1.weight": (6 * dim, dim),
        "head.head.weight": (64, dim),
        "head.modulation": (1, 2, dim),
    }
    for block in range(blocks):
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                shapes[f"blocks.{block}.{attention}.{part}.weight"] = (dim, dim)
                shapes[f"blocks.{block}.{attention}.{part}.bias"] = (dim,)
            for norm in ("norm_q", "norm_k"):
                shapes[f"blocks.{block}.{attention}.{norm}.weight"] = (dim,)
        shapes[f"blocks.{block}.ffn.0.weight"] = (ffn, dim)
        shapes[f"blocks.{block}.ffn.0.bias"] = (ffn,)
        shapes[f"blocks.{block}.ffn.2.weight"] = (dim, ffn)
        shapes[f"blocks.{block}.ffn.2.bias"] = (dim,)
        shapes[f"blocks.{block}.norm3.weight"] = (dim,)
        shapes[f"blocks.{block}.norm3.bias"] = (dim,)
        shapes[f"blocks.{block}.modulation"] = (1, 6, dim)
    return Header({key: (dtype, shape) for key, shape in shapes.items()})


def test_wan_14b():
    """14.3 G weights, 98 % of them in the Linears of the blocks."""
    header = wan_header(5120, 13824, 40)
    found = estimate(header, "", wan_layers(header.keys, ""))
    linears = 40 * (8 * 5120**2 + 2 * 5120 * 13824)
    rows = 40 * (8 * 5120 + 13824 + 5120)
    assert found.fp8_bytes == found.default_bytes - linears + 4 * rows
    assert found.default_bytes == pytest.approx(28.58e9, rel=1e-3)
    assert found.fp8_bytes / found.default_bytes == pytest.approx(0.509, abs=2e-3)
    # Nothing is only stored, so there is no third size.
    assert found.of("fp8_keep_adaln") == found.of("fp8") == found.fp8_bytes
    assert found.of("default") == found.default_bytes


@pytest.mark.parametrize(
    ("dtype", "default", "fp8"), [("F32", 2, 1), ("BF16", 2, 1), ("F8_E4M3", 1, 1)]
)
def test_types(dtype, default, fp8):
    """ComfyUI computes in 16 bits; FP8 in the file stays FP8 where it may be."""
    header = Header({"p.a.weight": (dtype, (32, 16)), "p.b.weight": (dtype, (8, 16))})
    found = estimate(header, "p.", FP8Layers(frozenset({"a"})))
    assert found.default_bytes == default * (32 + 8) * 16
    assert found.fp8_bytes == 32 * 16 + 4 * 32 + 2 * 8 * 16


def test_what_is_only_stored_counts_too():
    header = Header({"a.weight": ("BF16", (32, 16)), "s.weight": ("BF16", (64, 16))})
    found = estimate(header, "", FP8Layers(frozenset({"a"}), frozenset({"s"})))
    assert found.fp8_bytes == (32 + 64) * (16 + 4)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3"])
def test_what_would_be_stored_in_16_bits(dtype):
    """fp8_keep_adaln widens it, whatever the file has; the Linears are FP8 as ever."""
    header = Header({"p.a.weight": (dtype, (32, 16)), "p.s.weight": (dtype, (64, 16))})
    found = estimate(header, "p.", FP8Layers(frozenset({"a"}), frozenset({"s"})))
    assert found.of("fp8") == (32 + 64) * (16 + 4)
    assert found.of("fp8_keep_adaln") == 32 * (16 + 4) + 64 * 16 * 2


def test_other_models_and_descriptions_do_not_count():
    tensors = {"net.a.weight": ("F8_E4M3", (16, 16)), "net.a.weight_scale": ("F32", (16, 1))}
    header = Header({**tensors, "vae.x": ("BF16", (999,))})
    found = estimate(header, "net.", FP8Layers(), frozenset({"net.a.weight_scale"}))
    assert found == MemoryEstimate(256, 512)


def test_describe():
    text = MemoryEstimate(28 * GIB, 14 * GIB).describe()
    assert text == "weights take 28.00 GiB, with FP8 Linears 14.00 GiB (50%)"
    text = MemoryEstimate(60 * GIB, 30 * GIB, 12 * GIB).describe()
    assert text == (
        "weights take 60.00 GiB, with FP8 Linears 30.00 GiB (50%), with adaLN kept in 16 bits "
        "42.00 GiB (70%)"
    )


def warning(default, fp8, precision, device, adaln=0):
    found = MemoryEstimate(int(default * GIB), int(fp8 * GIB), int(adaln * GIB))
    return found.warning(precision, int(device * GIB), "the GPU")


def test_nothing_to_warn_about():
    assert warning(28, 14, "default", 32) is None
    assert warning(28, 14, "fp8", 18) is None


def test_does_not_fit_and_fp8_would():
    said = warning(28, 14, "default", 24)
    assert said.startswith(
        "will not fit: 28.0 GiB of weights and about 4 GiB for sampling, the GPU"
    )
    assert "has 24.0 GiB; ComfyUI keeps the rest in system memory" in said
    assert said.endswith("linear_precision 'fp8' takes 14.0 GiB and fits")


def test_fp8_would_not_fit_either():
    assert warning(28, 14, "default", 12).endswith("'fp8' would take 14.0 GiB")
    said = warning(28, 14, "fp8", 12)
    assert said.startswith("will not fit: 14.0 GiB") and "linear_precision" not in said


def test_adaln_is_what_does_not_fit():
    assert warning(60, 30, "fp8_keep_adaln", 46, adaln=12) is None
    said = warning(60, 30, "fp8_keep_adaln", 45, adaln=12)
    assert said.startswith("will not fit: 42.0 GiB")
    assert said.endswith("linear_precision 'fp8' takes 30.0 GiB and fits")
    said = warning(60, 30, "fp8_keep_adaln", 24, adaln=12)
    assert said.endswith("'fp8' would take 30.0 GiB")


def test_fp8_is_no_advice_where_it_is_the_same():
    said = warning(28, 14, "fp8_keep_adaln", 12)
    assert said.startswith("will not fit: 14.0 GiB") and "linear_precision" not in said


def test_room_for_sampling_is_part_of_it():
    edge = MemoryEstimate(GIB, GIB)
    assert edge.warning("default", GIB + SAMPLING_BYTES, "x") is None
    assert edge.warning("default", GIB + SAMPLING_BYTES - 1, "x") is not None
