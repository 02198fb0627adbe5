"""From options and plan files to jobs; wrong ones are named."""

import json

import pytest
import torch

from hopper_sol.kernels.bench.ops import OPS
from hopper_sol.kernels.bench.peers import PEERS
from hopper_sol.kernels.bench.plan import expand, find_op, read_plan

CPU = torch.device("cpu")


def jobs(entry, op="sol_attention", device=CPU):
    return expand(entry, OPS[op](), device)


def test_defaults():
    (job,) = jobs({})
    assert job.settings["case"] == "wan14b-480p" and job.settings["generator"] == "structured"
    assert job.settings["tau"] == 1.0 and job.settings["density"] is None
    peers = [(name, peer.precision) for name, peer in PEERS["sol_attention"].items()]
    assert job.contenders[-len(peers) :] == tuple(peers) and len(peers) == 8
    assert ("reference", "bf16") in job.contenders


def test_the_reference_is_not_among_all_on_a_gpu():
    device = torch.device("cuda")
    assert ("reference", "bf16") not in jobs({}, device=device)[0].contenders
    named = jobs({"backend": ["all", "reference"]}, device=device)[0].contenders
    assert named[-1] == ("reference", "bf16")


def test_combinations_keep_inputs_together():
    entry = {"case": "tiny,wan1.3b-480p", "generator": ["iid"], "tau": [0.5, "1,2"]}
    combined = [(job.settings["case"], job.settings["tau"]) for job in jobs(entry)]
    cases = ["tiny"] * 3 + ["wan1.3b-480p"] * 3
    assert combined == list(zip(cases, [0.5, 1.0, 2.0] * 2, strict=True))


def test_density_replaces_tau():
    found = [(j.settings["tau"], j.settings["density"]) for j in jobs({"density": [0.1, 0.2]})]
    assert found == [(None, 0.1), (None, 0.2)]


def test_all_cases_are_all_but_the_one_for_tests():
    assert [job.settings["case"] for job in jobs({"case": "all"})] == [
        "wan1.3b-480p",
        "wan14b-480p",
        "wan14b-720p",
        "h3-768p",
        "short-2k",
        "short-4k",
        "short-8k",
        "short-16k",
    ]


def test_precisions_are_for_own_backends():
    entry = {"backend": "reference,peer:fa4,reference,peer:kitchen", "precision": "bf16,fp8"}
    assert jobs(entry)[0].contenders == (
        ("reference", "bf16"),
        ("reference", "fp8"),
        ("peer:fa4", "bf16"),
        ("peer:kitchen", "int8"),
    )


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (
            {"cases": "tiny"},
            "sol_attention: no option cases; it has backend, precision, config, case",
        ),
        ({"case": "big"}, "case: got 'big', need one of wan1.3b-480p"),
        ({"tau": "x"}, "tau: got 'x', need a number in -1000 .. 8"),
        ({"tau": 8.5}, "tau: got 8.5"),
        ({"tau": float("nan")}, "tau: got nan"),
        ({"tau": True}, "tau: got True"),
        ({"seed": 1.5}, "seed: got 1.5, need an integer"),
        ({"density": 0}, "density: got 0.0, need a number in 0.001 .. 1"),
        ({"tau": 1, "density": 0.1}, "tau and density: got both"),
        (
            {"backend": "sm70"},
            "backend: got 'sm70', sol_attention has .*reference.*peer:fa4.*'all'",
        ),
        ({"backend": "peer:nobody"}, "backend: got 'peer:nobody'"),
        ({"precision": "int8"}, "precision: got 'int8', need one of bf16, fp8"),
        ({"config": {"tau": 1}}, "config: got 'tau'"),
        ({"config": [1]}, r"config: got \[1\], need an object"),
    ],
)
def test_wrong_entries(entry, what):
    with pytest.raises(ValueError, match=what):
        jobs(entry)


@pytest.mark.parametrize("name", ["nope", None, ["sol_attention"]])
def test_unknown_op(name):
    with pytest.raises(ValueError, match=r"op: got .*, need one of sol_attention, fp8_linear"):
        find_op(name)


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "[", "\x80"])
def test_wrong_plan_files(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"plan plan\.json: "):
        read_plan(path)


def test_plan_file(tmp_path):
    path = tmp_path / "plan.json"
    entries = [{"op": "sol_attention", "case": "tiny"}, {"op": "fp8_linear"}]
    path.write_text(json.dumps(entries))
    assert read_plan(path) == entries
    with pytest.raises(ValueError, match=r"plan other\.json"):
        read_plan(tmp_path / "other.json")
