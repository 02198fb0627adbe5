"""Which layers share a quantised activation, and when they do."""

import gc
import threading
import weakref

import pytest
import torch

from hopper_sol.kernels import QuantizedRows, fp8_linear, quantize_rowwise
from hopper_sol.nodes.patching import linear_run
from hopper_sol.nodes.patching.linear_run import LinearRun, compute, compute_rows, counting
from hopper_sol.nodes.patching.linear_share import SharedRows, share_keys

Q, K, V = (f"blocks.0.self_attn.{n}" for n in "qkv")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(*names):
    return share_keys(names)


def test_share_keys():
    found = keys(Q, K, V, "blocks.0.self_attn.o", "blocks.10.self_attn.k", "blocks.10.self_attn.v")
    assert found == {
        Q: "blocks.0/0/3/q",
        K: "blocks.0/0/3/k",
        V: "blocks.0/0/3/v",
        "blocks.10.self_attn.k": "blocks.10/0/2/k",
        "blocks.10.self_attn.v": "blocks.10/0/2/v",
    }


def test_cross_attention_shares_by_what_it_looks_at():
    parts = ("q", "k", "v", "k_img", "v_img", "o")
    found = keys(*(f"blocks.0.cross_attn.{part}" for part in parts))
    ends = {name.rpartition(".")[2]: key for name, key in found.items()}
    assert ends == {
        "k": "blocks.0/1/2/k",
        "v": "blocks.0/1/2/v",
        "k_img": "blocks.0/2/2/k_img",
        "v_img": "blocks.0/2/2/v_img",
    }


def test_nothing_to_share():
    assert keys("blocks.0.ffn.0", "blocks.0.ffn.2", Q, "blocks.1.self_attn.k") == {}
    assert keys("blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1") == {}


class Quantize:
    """Counts what it makes."""

    def __init__(self):
        self.made = []

    def __call__(self):
        rows = QuantizedRows(torch.zeros(2, 16), torch.ones(2, 1))
        self.made.append(weakref.ref(rows.codes))
        return rows


@pytest.fixture
def quantize():
    return Quantize()


X = normal(20, 48)
KEYS = keys(Q, K, V)


def test_three_of_one_tensor(quantize):
    shared = SharedRows()
    rows = [shared.rows(X, KEYS[name], "torch", quantize) for name in (Q, K, V)]
    assert len(quantize.made) == 1 and rows[0] is rows[1] is rows[2]
    del rows
    gc.collect()
    assert quantize.made[0]() is None  # after the third nothing is kept


def test_another_tensor_even_with_the_same_numbers(quantize):
    shared = SharedRows()
    shared.rows(X, KEYS[Q], "torch", quantize)
    shared.rows(X.clone(), KEYS[K], "torch", quantize)
    shared.rows(X.view(20, 48), KEYS[V], "torch", quantize)
    assert len(quantize.made) == 3


def test_the_same_layer_again_is_another_forward(quantize):
    shared = SharedRows()
    for name in (Q, K, Q, K, V):
        shared.rows(X, KEYS[name], "torch", quantize)
    assert len(quantize.made) == 2


@pytest.mark.parametrize(
    ("second", "backend"),
    [("blocks.1/0/3/k", "torch"), ("blocks.0/1/3/k", "torch"), (KEYS[K], "triton")],
)
def test_another_block_attention_or_backend(quantize, second, backend):
    shared = SharedRows()
    shared.rows(X, KEYS[Q], "torch", quantize)
    shared.rows(X, second, backend, quantize)
    assert len(quantize.made) == 2


def test_written_in_place_in_between(quantize):
    shared, x = SharedRows(), normal(20, 48)
    shared.rows(x, KEYS[Q], "torch", quantize)
    x.mul_(2.0)
    shared.rows(x, KEYS[K], "torch", quantize)
    assert len(quantize.made) == 2


def test_a_tensor_that_is_gone(quantize):
    """Another one may have its memory, and even its id."""
    shared, x = SharedRows(), normal(20, 48)
    shared.rows(x, KEYS[Q], "torch", quantize)
    del x
    gc.collect()
    shared.rows(normal(20, 48), KEYS[K], "torch", quantize)
    assert len(quantize.made) == 2


def test_clear(quantize):
    shared = SharedRows()
    shared.rows(X, KEYS[Q], "torch", quantize)
    shared.clear(X.device)
    gc.collect()
    assert quantize.made[0]() is None
    shared.rows(X, KEYS[K], "torch", quantize)
    assert len(quantize.made) == 2


def test_inference_mode(quantize):
    """Where PyTorch counts no writes."""
    shared = SharedRows()
    with torch.inference_mode():
        x = normal(20, 48)
        for name in (Q, K, V):
            shared.rows(x, KEYS[name], "torch", quantize)
    assert len(quantize.made) == 1


# --- in the run

WEIGHTS = [normal(32, 48, seed=n) for n in range(3)]


@pytest.fixture
def quantised(monkeypatch):
    """What the run quantises, by the run's own calls: (rows, columns)."""
    seen = []
    original = linear_run.quantize_rowwise
    monkeypatch.setattr(
        linear_run,
        "quantize_rowwise",
        lambda x, **kw: seen.append(tuple(x.shape)) or original(x, **kw),
    )
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
def test_sharing_changes_no_bit(quantised, dtype, stored):
    x, run = X.to(dtype), LinearRun()
    with counting(run):
        for name, weight in zip((Q, K, V), WEIGHTS, strict=True):
            if stored:
                got = compute_rows(x, quantize_rowwise(weight), None, KEYS[name])
            else:
                got = compute(x, weight.to(dtype), None, None, KEYS[name])
            want = fp8_linear(x, *quantize_rowwise(weight.to(torch.float32 if stored else dtype)))
            assert got.dtype == dtype and torch.equal(got, want)
    assert quantised.count((20, 48)) == 1
    assert run.fp8_calls == 3


def test_a_layer_that_does_not_share_lets_go(quantised):
    with counting(LinearRun()):
        compute(X, WEIGHTS[0], None, None, KEYS[Q])
        compute(X, WEIGHTS[1], None, None)
        compute(X, WEIGHTS[2], None, None, KEYS[V])
    assert quantised.count((20, 48)) == 2


def test_runs_do_not_share(quantised):
    for name in (Q, K):
        with counting(LinearRun()):
            compute(X, WEIGHTS[0], None, None, KEYS[name])
    assert quantised.count((20, 48)) == 2


def test_outside_a_run_nothing_is_shared(quantised):
    for name in (Q, K, V):
        compute(X, WEIGHTS[0], None, None, KEYS[name])
    assert quantised.count((20, 48)) == 3


def test_few_rows_quantise_nothing(quantised):
    with counting(LinearRun()):
        for name in (Q, K, V):
            compute(X[:4], WEIGHTS[0], None, None, KEYS[name])
    assert quantised == []


def test_threads(quantised):
    """Two threads take turns on one run: nobody gets the rows of another tensor."""
    run, wrong = LinearRun(), []
    tensors = [normal(20, 48, seed=n) for n in (5, 6)]
    wants = [[fp8_linear(x, *quantize_rowwise(w)) for w in WEIGHTS] for x in tensors]

    def work(x, want):
        for _ in range(30):
            for name, weight, right in zip((Q, K, V), WEIGHTS, want, strict=True):
                if not torch.equal(compute(x, weight, None, None, KEYS[name]), right):
                    wrong.append(name)

    with counting(run):
        threads = [threading.Thread(target=work, args=a) for a in zip(tensors, wants, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
