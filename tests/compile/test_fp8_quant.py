"""Row quantisation compiles for sm_90, into one pass over memory."""

import pytest
import torch

from hopper_sol.kernels.fp8_linear.triton_quant import launch_shape, quantize_rowwise_triton

BF16 = torch.bfloat16
# Input features of Wan 1.3B, 14B and MiniMax-H3, the widest row, and an odd one.
WIDTHS = [1536, 5120, 5376, 7168, 8960, 13824, 14336, 32768, 1000]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("grid", [None, 0.01])
def test_one_kernel_without_spills(launches, columns, grid):
    quantize_rowwise_triton(torch.zeros(3, columns, dtype=BF16), grid)
    (kernel,) = launches
    assert kernel.spilled_bytes == 0
    # The hardware's own conversion, two values an instruction, saturating.
    assert kernel.count(r"F2FP\.SATFINITE\.E4M3") > 0
    if columns % 16 == 0:
        _, parts, _ = launch_shape(columns, 2)
        # Each piece of a row is read once, 16 bytes a thread, and stays in registers.
        assert kernel.count(r"LDG\.E\.128") == kernel.count(r"LDG\S*") == parts
        # Half of a thread's 64 kB / 2048: at least half of the threads that fit run at a time.
        assert kernel.registers <= 64


@pytest.mark.parametrize("capability", [89, 100])
@pytest.mark.parametrize("columns", [1536, 5120, 13824])
def test_other_gpus(launches, columns):
    quantize_rowwise_triton(torch.zeros(3, columns, dtype=BF16))
    (kernel,) = launches
    # For SM89 ptxas puts one register aside, once, of a kernel that could have twice as many.
    assert kernel.spilled_bytes <= 8 and kernel.registers <= 64
    assert kernel.count(r"LDG\.E\.128\S*") > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(launches, dtype):
    quantize_rowwise_triton(torch.zeros(3, 5120, dtype=dtype))
    (kernel,) = launches
    assert kernel.spilled_bytes == 0 and kernel.count(r"LDG\.E\.128") > 0


def test_one_binary_for_every_number_of_rows(launches):
    for rows in (1, 2, 15, 16, 17, 255, 4171):
        quantize_rowwise_triton(torch.zeros(rows, 1536, dtype=BF16))
    for grid in (0.25, 0.01, 3.7e-5):
        quantize_rowwise_triton(torch.zeros(5, 1536, dtype=BF16), grid)
    assert len(launches) == 10
    assert len({kernel.key for kernel in launches[:7]}) == 1
    assert len({kernel.key for kernel in launches[7:]}) == 1


def test_rows_of_a_view_share_a_binary(launches):
    fused = torch.zeros(9, 3 * 1536, dtype=BF16)
    for part in fused.split(1536, 1):
        quantize_rowwise_triton(part)
    assert len({kernel.key for kernel in launches}) == 1


def test_row_offsets_are_64_bit(launches):
    """75,600 tokens of 32,768 values are more than 2^31: a product in 32 bits would wrap."""
    quantize_rowwise_triton(torch.zeros(3, 32768, dtype=BF16))
    (kernel,) = launches
    assert kernel.count(r"U?IMAD\.WIDE") > 0
