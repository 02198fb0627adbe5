"""Z-orders: permutations, their inverse, cells of whole blocks, and no effect on attention."""

import pytest
import torch

from hopper_sol.kernels.sol_attn.reference import sol_attention_reference
from hopper_sol.kernels.sol_attn.token_order import inverse, morton_order, span_order

GRIDS = [(1, 1, 1), (1, 1, 9), (5, 1, 1), (2, 2, 2), (3, 4, 5), (1, 7, 5), (5, 6, 7), (4, 9, 16)]


def interleaved(*coordinates):
    """Bits of the coordinates in turn, the first coordinate's lowest, via their binary digits."""
    digits = [f"{c:020b}" for c in reversed(coordinates)]
    return int("".join("".join(column) for column in zip(*digits, strict=True)), 2)


def coordinates(index, grid):
    _, h, w = grid
    return index // (h * w), index // w % h, index % w


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_morton_order_is_the_z_curve(grid):
    tokens = range(grid[0] * grid[1] * grid[2])
    want = sorted(tokens, key=lambda i: interleaved(*coordinates(i, grid)))
    got = morton_order(grid)
    assert got.dtype == torch.int64 and got.device.type == "cpu"
    assert got.tolist() == want


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_morton_order_per_frame_keeps_frames_apart(grid):
    tokens = range(grid[0] * grid[1] * grid[2])

    def key(i):
        frame, row, column = coordinates(i, grid)
        return frame, interleaved(row, column)

    assert morton_order(grid, per_frame=True).tolist() == sorted(tokens, key=key)


@pytest.mark.parametrize("per_frame", [False, True], ids=["3d", "per-frame"])
@pytest.mark.parametrize("grid", [*GRIDS, (21, 30, 52)], ids=str)
def test_inverse_undoes_an_order(grid, per_frame):
    order = morton_order(grid, per_frame)
    tokens = torch.arange(order.numel())
    assert torch.equal(order.sort().values, tokens)
    back = inverse(order)
    assert torch.equal(order[back], tokens) and torch.equal(back[order], tokens)
    x = torch.randn(order.numel(), 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x[order][back], x)


def test_inverse_of_an_order_that_is_not_its_own_inverse():
    order = torch.tensor([2, 0, 3, 1])
    assert inverse(order).tolist() == [1, 3, 0, 2]
    assert not torch.equal(inverse(order), order)


def cells(blocks, grid):
    """The 4 x 4 x 4 cells that each row of 64 tokens has tokens of."""
    return [
        {tuple(c // 4 for c in coordinates(int(i), grid)) for i in block}
        for block in blocks.view(-1, 64)
    ]


@pytest.mark.parametrize("grid", [(4, 4, 4), (8, 8, 8), (4, 8, 12), (12, 20, 8)], ids=str)
def test_morton_order_blocks_are_4x4x4_cells(grid):
    found = cells(morton_order(grid), grid)
    assert all(len(cell) == 1 for cell in found)
    assert len({next(iter(cell)) for cell in found}) == len(found)


def test_morton_order_per_frame_blocks_are_8x8_squares():
    grid = (3, 16, 24)
    for block in morton_order(grid, per_frame=True).view(-1, 64):
        squares = {(t, h // 8, w // 8) for t, h, w in (coordinates(int(i), grid) for i in block)}
        assert len(squares) == 1


@pytest.mark.parametrize("start", [0, 64, 128, 1, 63, 65, 100, 127])
@pytest.mark.parametrize("behind", [0, 1, 77])
def test_span_order_keeps_cells_in_whole_blocks(start, behind):
    grid, count = (8, 8, 8), 512
    tokens = start + count + behind
    order = span_order(morton_order(grid), start, tokens)
    assert torch.equal(order.sort().values, torch.arange(tokens))
    assert torch.equal(order[:start], torch.arange(start))
    assert torch.equal(order[start + count :], torch.arange(start + count, tokens))
    first = -(-start // 64) * 64  # the first block that lies in the span
    inside = order[first : first + (start + count - first) // 64 * 64] - start
    found = cells(inside, grid)
    assert len(found) == (8 if start % 64 == 0 else 7)
    assert all(len(cell) == 1 for cell in found)
    assert torch.equal(order[inverse(order)], torch.arange(tokens))


def test_span_order_rotates_the_end_of_the_curve_to_the_front():
    order = torch.arange(100).flip(0)  # any order will do: 99, 98, ..., 0
    got = span_order(order, 60, 160)
    # 4 rows are left in the ragged block: the last four of the order.
    assert got[60:64].tolist() == [63, 62, 61, 60]
    assert got[64:].tolist() == list(range(159, 63, -1))


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_span_order_of_a_span_inside_one_block(count):
    order = torch.arange(count).flip(0)
    got = span_order(order, 60, 70)
    assert torch.equal(got.sort().values, torch.arange(70))
    assert torch.equal(got[60 + count :], torch.arange(60 + count, 70))


def test_span_order_rejects_a_span_past_the_end():
    with pytest.raises(ValueError, match=r"^order: a span of 64 tokens at 10 ends past 73"):
        span_order(morton_order((4, 4, 4)), 10, 73)


@pytest.mark.parametrize("per_frame", [False, True], ids=["3d", "per-frame"])
def test_dense_attention_does_not_see_the_order(make_qkv, rounding_bound, per_frame):
    grid, start, tokens = (3, 6, 10), 37, 250
    q, k, v = make_qkv(tokens, heads=2, dim=16, dtype=torch.float64)
    order = span_order(morton_order(grid, per_frame), start, tokens)
    plain = sol_attention_reference(q, k, v, routing=False)
    moved = sol_attention_reference(*(x[:, order] for x in (q, k, v)), routing=False)
    out_bound, lse_bound = rounding_bound(q, k, v, 0.25, 2.0**-53)
    back = inverse(order)
    assert (moved.out[:, back] - plain.out).abs().max() <= 2 * out_bound
    assert (moved.lse[..., back] - plain.lse).abs().max() <= 2 * lse_bound
