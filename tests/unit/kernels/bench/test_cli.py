"""Arguments, exit status, several ops in one process, and both ways to start."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hopper_sol.kernels.bench import cli

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "op: none given, need one of sol_attention, fp8_linear, or --plan FILE"),
        (["sol"], "op: got 'sol'"),
        (["sol_attention", "--case", "x"], "case: got 'x', need one of"),
        (["fp8_linear", "--tau", "1"], "fp8_linear: no option tau"),
        (["fp8_linear", "--config", "a=1"], "config: got a, fp8_linear has no further settings"),
        (["sol_attention", "--config", "a"], "config: got 'a', need NAME=VALUE"),
        (["sol_attention", "--device", "xpu"], "device: got 'xpu', need auto, cpu, cuda"),
        (["sol_attention", "--device", "what"], "device: got 'what'"),
        (["sol_attention", "--device", "cuda:99"], "device: got 'cuda:99', this machine has"),
        (["sol_attention", "--json", "/no/such/folder/x.json"], "json: the folder of"),
        (["--plan", "/no/such/plan.json"], "plan plan.json"),
        (["sol_attention", "--plan", "p.json"], "plan: got sol_attention beside it"),
        (["--plan", "p.json", "--tau", "1"], "plan: got tau beside it"),
    ],
)
def test_bad_arguments(capsys, arguments, what):
    assert cli.main(arguments) == 2
    streams = capsys.readouterr()
    assert what in streams.err and streams.out == ""


@pytest.mark.parametrize("option", [["--iterations", "0"], ["--warmup", "-1"]])
def test_numbers_of_rounds(capsys, option):
    with pytest.raises(SystemExit) as ended:
        cli.main(["sol_attention", *option])
    assert ended.value.code == 2 and "or more" in capsys.readouterr().err


def test_list_names_everything(capsys):
    assert cli.main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in ("sol_attention", "fp8_linear", "peer:kitchen", "wan14b-720p", "--token-order"):
        assert name in out


def test_a_plan_of_two_ops(bench, tmp_path):
    plan = tmp_path / "plan.json"
    entries = [
        {"op": "fp8_linear", "case": ["tiny"], "backend": "reference"},
        {"op": "sol_attention", "case": "tiny", "tau": [0.5, 1.0], "backend": ["reference"]},
    ]
    plan.write_text(json.dumps(entries))
    run = bench("--plan", str(plan), "--commit", "abc123")
    assert run.status == 0 and [row["op"] for row in run.rows] == [
        "fp8_linear",
        "sol_attention",
        "sol_attention",
    ]
    assert all(row["error"] is None for row in run.rows)
    assert run.file["plan"] == entries and run.file["commit"] == "abc123"
    # Paths are left out: they would say where it ran.
    assert "--plan plan.json" in run.file["command"] and str(tmp_path) not in run.path.read_text()
    assert run.out.count("case") == 2 and "total_ms" in run.out


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["a", "--json", "/x/y.json", "--tau", "1"], ["a", "--json", "y.json", "--tau", "1"]),
        (["--plan=/x/p.json", "--json=o.json"], ["--plan=p.json", "--json=o.json"]),
    ],
)
def test_paths_are_left_out_of_the_command(argv, kept):
    assert cli._without_paths(argv) == kept


def test_starts_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--list"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hopper_sol.kernels.bench", run_name="__main__")
    assert ended.value.code == 0 and "sol_attention" in capsys.readouterr().out


def test_starts_from_a_checkout(tmp_path):
    """By path, from elsewhere, with nothing installed that is called hopper_sol."""
    script = ROOT / "kernels" / "bench" / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "sol_attention", "--case", "nowhere"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "case: got 'nowhere'" in done.stderr, done.stderr
