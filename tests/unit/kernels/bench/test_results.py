"""The result file says what was measured, on what, and not where."""

import getpass
import json
import socket

import pytest
import torch

from hopper_sol.kernels.bench import results
from hopper_sol.kernels.bench.results import Results, head, shown, table

CPU = torch.device("cpu")


def test_head():
    facts = head(CPU, "bench x", [{"op": "x"}], "abc")
    assert (
        facts["schema_version"] == 1 and facts["commit"] == "abc" and facts["plan"] == [{"op": "x"}]
    )
    assert facts["versions"]["torch"] == torch.__version__ and facts["machine"]["gpu"] is None
    text = json.dumps(facts)
    assert socket.gethostname() not in text and f"/{getpass.getuser()}" not in text


def test_commit_without_git(monkeypatch):
    monkeypatch.setattr(results.shutil, "which", lambda program: None)
    assert results.commit_of_checkout() is None


def test_commit_of_changed_files(monkeypatch):
    answers = {"rev-parse": "1234567", "status": " M file"}
    monkeypatch.setattr(results, "_output", lambda program, *a: answers[a[2]])
    assert results.commit_of_checkout() == "1234567+"
    answers["status"] = ""
    assert results.commit_of_checkout() == "1234567"


def test_machine_with_a_gpu(monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    answer = "580.159.03, 1980 MHz, 700.00 W\n580.1, 1 MHz, 1 W"
    monkeypatch.setattr(results, "_output", lambda *a: answer)
    facts = {"gpu": "NVIDIA H200", "memory_gib": 140.0, "sms": 132}
    limits = {"driver": "580.159.03", "max_sm_clock": "1980 MHz", "power_limit": "700.00 W"}
    assert results.machine(torch.device("cuda", 0)) == {**facts, **limits}
    monkeypatch.setattr(results, "_output", lambda *a: None)
    assert results.machine(torch.device("cuda", 0)) == facts


def test_write_refuses_speed_without_parity(tmp_path):
    path = tmp_path / "out.json"
    out = Results(path, {"schema_version": 1})
    out.rows = [{"backend": "b", "case": "c", "parity_ok": True, "total_ms": 1.0}]
    out.write()
    out.rows[0]["parity_ok"] = False
    with pytest.raises(RuntimeError, match="without parity"):
        out.write()
    assert json.loads(path.read_text())["rows"][0]["parity_ok"] is True
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_without_a_file():
    Results(None, {}).write()


def test_table():
    rows = [
        {"backend": "triton", "total_ms": 12.3456, "parity_ok": True, "error": None},
        {"backend": "peer:x", "total_ms": None, "parity_ok": False, "error": "parity failed: y"},
    ]
    assert table(rows, ["backend", "total_ms", "parity_ok"]).splitlines() == [
        "backend     total_ms  parity_ok",
        "triton      12.35     yes",
        "peer:x [1]  -         NO",
        "[1] peer:x: parity failed: y",
    ]
    assert table([], ["backend"]) == "backend\n"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (True, "yes"), (False, "NO"), (0.0, "0"), (3, "3"), ("a", "a")]
)
def test_shown(value, text):
    assert shown(value) == text
