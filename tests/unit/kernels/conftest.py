"""Inputs and error measures shared by the kernel tests."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These tensors are small: a second thread that has to wait for a busy core costs 10 times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_qkv():
    """Factory of seeded (B, T, H, D) q, k, v.

    ``spread`` adds a vector per 64-token block to q and k, so that block scores differ by much
    more than the noise of a mean over 64 tokens and routing has something to find.
    """

    def make(tokens, *, batch=1, heads=1, dim=128, dtype=torch.float32, seed=0, spread=0.0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        blocks = -(-tokens // 64)
        q, k, v = (normal(batch, tokens, heads, dim) for _ in range(3))
        for x in (q, k):
            offset = spread * normal(batch, blocks, heads, dim)
            x += offset.repeat_interleave(64, 1)[:, :tokens]
        return tuple(x.to(dtype) for x in (q, k, v))

    return make


@pytest.fixture(scope="session")
def rel_l2():
    """Relative L2 distance of ``got`` from ``want``, computed in FP64."""

    def distance(got, want):
        got, want = got.double(), want.double()
        return ((got - want).norm() / want.norm()).item()

    return distance


@pytest.fixture(scope="session")
def rounding_bound():
    """Bounds on what rounding alone may do to (an output element, a log-sum-exp).

    With relative error ``unit`` per operation, a sum of n terms of either sign errs by
    ~ sqrt(n) * unit of its absolute sum (random-walk growth); 8 standard deviations are allowed.
    A logit (D terms, of size scale * |q| |k|) errs by ``logit``, every weight by that factor, and
    both sums over the keys by sqrt(T) * unit each; LSE sees one of the two sums.
    """

    def bound(q, k, v, scale, unit):
        size = (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * abs(scale)).item()
        logit = 8 * unit * (q.shape[-1] ** 0.5 + 2) * size
        total = 8 * unit * (q.shape[1] ** 0.5 + 2)
        return 2 * (logit + total) * v.double().abs().max().item(), logit + total + unit * size

    return bound
