"""Fused quantisation compiles without spills, reads everything once and rounds where it should."""

import pytest
import torch

from hopper_sol.kernels.fp8_linear.config import NormSettings
from hopper_sol.kernels.fp8_linear.triton_norm import norm_launch_shape, quantize_norm_triton
from hopper_sol.kernels.fp8_linear.triton_quant import launch_shape, quantize_activation_triton

BF16 = torch.bfloat16
WAN = NormSettings("layer", 1e-6, round_product=False)
FACTOR = NormSettings("layer", 1e-6, round_product=False, scale_has_one=True)
H3 = NormSettings("rms", 1e-5, round_product=True)
EVERY_GPU = [89, 90, 100]


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def assert_well_compiled(kernel):
    assert kernel.spilled_bytes == 0
    # Roundings to BF16 take two values an instruction; one at a time is four times as slow, and fit
    # for a single number: the largest of the row.
    assert kernel.count(r"F2FP\.BF16\S*") > 0 and kernel.count(r"F2F\.BF16\S*") <= 1
    # A maximum that passes over NaN would take such a row for a finite one.
    assert kernel.count(r"FMNMX\d?\.NAN") > 0
    # Arithmetic in BF16 would merge a product and a sum, and lose the rounding between them.
    assert kernel.count(r"H(FMA2|ADD2|MUL2)\S*BF16\S*") == 0


@pytest.mark.parametrize("capability", EVERY_GPU)
@pytest.mark.parametrize(
    ("activation", "columns"),
    [("gelu_tanh", 8960), ("gelu_tanh", 13824), ("swiglu", 14336), ("swiglu", 1000)],
)
def test_activations(launches, activation, columns):
    halves = 2 if activation == "swiglu" else 1
    quantize_activation_triton(zeros(3, halves * columns), activation)
    (kernel,) = launches
    assert_well_compiled(kernel)
    if columns % 16 == 0:
        _, parts, _ = launch_shape(columns, 2, activation)
        assert kernel.count(r"LDG\.E\.128\S*") == halves * parts


@pytest.mark.parametrize("capability", EVERY_GPU)
@pytest.mark.parametrize("columns", [1536, 5120, 5376, 1000])
@pytest.mark.parametrize("which", ["wan", "factor", "affine", "h3"])
def test_norms(launches, which, columns):
    x, table, vector = zeros(4, columns), zeros(2, columns), zeros(columns)
    if which == "wan":
        quantize_norm_triton(x, WAN, None, None, table, table, None)
    elif which == "factor":
        quantize_norm_triton(x, FACTOR, None, None, table, table, None)
    elif which == "affine":
        quantize_norm_triton(x, WAN, vector, vector, None, None, None)
    else:
        mod_row = zeros(4, dtype=torch.int32)
        quantize_norm_triton(x, H3, vector, None, table, table, mod_row)
    (kernel,) = launches
    assert_well_compiled(kernel)
    if columns % 16 == 0:
        _, parts, _ = norm_launch_shape(columns, 2)
        operands = {"wan": 3, "factor": 3, "affine": 3, "h3": 4}[which]
        assert kernel.count(r"LDG\.E\.128\S*") == operands * parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(launches, dtype):
    for columns in (5120, 32768):
        x, table = zeros(4, columns, dtype=dtype), zeros(1, columns, dtype=dtype)
        quantize_norm_triton(x, H3, table[0], table[0], table, table, None)
        quantize_activation_triton(x, "gelu_tanh")
        quantize_activation_triton(zeros(4, 2 * columns, dtype=dtype), "swiglu")
    assert len(launches) == 6
    for kernel in launches:
        assert kernel.spilled_bytes == 0


def test_widest_rows(launches):
    quantize_norm_triton(zeros(4, 32768), H3, None, None, zeros(1, 32768), zeros(1, 32768), None)
    quantize_activation_triton(zeros(4, 65536), "swiglu")
    for kernel in launches:
        assert_well_compiled(kernel)


def test_one_binary_for_every_number_of_rows(launches):
    for rows in (1, 2, 15, 16, 17, 255, 4171):
        table = zeros(1, 1536)
        quantize_norm_triton(zeros(rows, 1536), WAN, None, None, table, table, None)
    assert len(launches) == 7 and len({kernel.key for kernel in launches}) == 1
    launches.clear()
    for rows in (1, 16, 17, 4171):
        quantize_activation_triton(zeros(rows, 8960), "gelu_tanh")
    assert len(launches) == 4 and len({kernel.key for kernel in launches}) == 1


def test_row_offsets_are_64_bit(launches):
    """75,600 tokens of 32,768 values are more than 2^31: a product in 32 bits would wrap."""
    quantize_norm_triton(zeros(3, 32768), WAN, None, None, None, None, None)
    quantize_activation_triton(zeros(3, 32768), "gelu_tanh")
    for kernel in launches:
        assert kernel.count(r"U?IMAD\.WIDE\S*") > 0
