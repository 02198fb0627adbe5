"""Distances, in pieces and at once."""

import math

import pytest
import torch

from hopper_sol.kernels.bench import measures
from hopper_sol.kernels.bench.measures import all_finite, rel_l2


@pytest.fixture(params=[1 << 26, 100])
def pieces(request, monkeypatch):
    monkeypatch.setattr(measures, "PIECE_ELEMENTS", request.param)


@pytest.mark.parametrize("shape", [(7,), (30, 10), (2, 30, 3, 8)])
def test_rel_l2(pieces, shape):
    want = torch.randn(shape, dtype=torch.float64)
    got = want + 0.1 * torch.randn(shape, dtype=torch.float64)
    expected = ((got - want).norm() / want.norm()).item()
    # FP32 differences of values about 1: 1e-7 of 0.1.
    assert rel_l2(got, want) == pytest.approx(expected, rel=1e-5)


def test_rel_l2_edges():
    zero = torch.zeros(4, 4)
    assert rel_l2(zero, zero) == 0.0 and rel_l2(zero + 1, zero) == math.inf
    assert math.isnan(rel_l2(torch.full((4, 4), math.nan), zero + 1))
    with pytest.raises(ValueError, match=r"got shape \(4, 3\), need \(4, 4\)"):
        rel_l2(torch.zeros(4, 3), zero)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite(pieces, bad):
    x = torch.zeros(2, 30, 3, 8)
    assert all_finite(x) and all_finite(x.transpose(1, 2))
    x[1, 29, 2, 7] = bad
    assert not all_finite(x) and not all_finite(x[:, :, 2:])
    assert all_finite(x[:, :29])
