"""Distances between outputs, in pieces: outputs are as large as a model's activations."""

import torch

PIECE_ELEMENTS = 1 << 26


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements, FP64 sums of FP32 differences; equal shapes."""
    if got.shape != want.shape:
        raise ValueError(f"output: got shape {tuple(got.shape)}, need {tuple(want.shape)}")
    difference = norm = 0.0
    for a, b in zip(_pieces(got), _pieces(want), strict=True):
        a, b = a.float(), b.float()
        difference += (a - b).square_().sum(dtype=torch.float64).item()
        norm += b.square().sum(dtype=torch.float64).item()
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return (difference / norm) ** 0.5


def all_finite(x: torch.Tensor) -> bool:
    """No NaN and no infinity anywhere."""
    return all(bool(piece.isfinite().all()) for piece in _pieces(x))


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts of about PIECE_ELEMENTS: of the rows of a matrix, else of dimension 1, the tokens."""
    dim = 0 if x.dim() <= 2 else 1
    return x.split(max(1, PIECE_ELEMENTS * x.shape[dim] // max(x.numel(), 1)), dim)
