"""Backends and peers that misbehave, and a short way to run the bench."""

import json
from types import SimpleNamespace

import pytest

from hopper_sol.kernels import registry
from hopper_sol.kernels.bench import cli
from hopper_sol.kernels.bench.peers import PEERS, Peer
from hopper_sol.kernels.registry import Backend
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference
from hopper_sol.kernels.sol_attn.reference_backend import sol_attention_fwd_reference
from hopper_sol.kernels.sol_attn.token_order import inverse


@pytest.fixture
def add_backend(monkeypatch):
    """Registers a backend of ``sol_attention`` until the test ends."""
    backends = {op: dict(known) for op, known in registry._BACKENDS.items()}
    monkeypatch.setattr(registry, "_BACKENDS", backends)

    def add(name, implementation, **options):
        registry.register("sol_attention", Backend(name, lambda: implementation, **options))

    return add


@pytest.fixture
def add_peer(monkeypatch):
    """Adds a peer to an op until the test ends; ``load`` returns its callable."""

    def add(name, load, *, op="sol_attention", bound=1e-2, precision="bf16", sparse=False):
        peer = Peer(name, precision, bound, load, sparse)
        monkeypatch.setitem(PEERS[op], name, peer)

    return add


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the bench on a CPU with few rounds; returns status, rows, file and both streams."""

    def run(*arguments, rounds=True):
        out = tmp_path / "out.json"
        short = ["--iterations", "3", "--warmup", "0"] if rounds else []
        status = cli.main([*arguments, "--device", "cpu", "--json", str(out), *short])
        streams = capsys.readouterr()
        content = json.loads(out.read_text("utf-8")) if out.is_file() else None
        rows = content["rows"] if content else []
        return SimpleNamespace(
            status=status, rows=rows, file=content, out=streams.out, err=streams.err, path=out
        )

    return run


@pytest.fixture
def with_mask():
    """Factory of implementations that take ``exact_mask``: the reference, then ``spoil``.

    ``spoil(out, counts, exact_mask)`` returns what the backend returns instead.
    """

    def make(spoil=lambda out, counts, exact_mask: (out, counts)):
        def implementation(
            q, k, v, *, config, layout, scale, with_lse=True, order=None, exact_mask=None
        ):
            if exact_mask is None:
                out, lse, counts = sol_attention_fwd_reference(
                    q, k, v, config=config, layout=layout, scale=scale, order=order
                )
            else:
                if order is not None:
                    q, k, v = (x[:, order] for x in (q, k, v))
                result = sol_attention_reference(q, k, v, scale=scale, exact_mask=exact_mask)
                out, lse = result.out, result.lse
                if order is not None:
                    out = out[:, inverse(order)]
                counts = result.exact_mask.sum(-1).int()
            out, counts = spoil(out, counts, exact_mask)
            return out, lse, counts

        return implementation

    return make


@pytest.fixture
def speeds():
    """Names of a row's fields that speak of speed and are filled."""

    def filled(row):
        return [n for n, v in row.items() if n.endswith(("_ms", "tflops")) and v is not None]

    return filled
