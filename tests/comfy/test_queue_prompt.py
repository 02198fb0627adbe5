"""workflows/queue_prompt.py on a real server, in a Python without packages, as an operator runs it."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
DEMO = WORKFLOWS / "api" / "wan_t2v_demo.json"
# Small and short: 3 x 12 x 12 tokens, two steps.
SMALL = {
    "1.file": "tiny.safetensors",
    "3.min_tokens": 256,
    "6.width": 192,
    "6.height": 192,
    "6.length": 9,
    "7.steps": 2,
}


class Script:
    """Runs the script against one server, with one file of records."""

    def __init__(self, comfy, folder):
        self.comfy = comfy
        self.log = folder / "runs.jsonl"
        self.out = folder / "out"

    def command(self, *arguments):
        common = ["--server", self.comfy.server.url, "--jsonl", self.log]
        command = [sys.executable, "-I", "-S", WORKFLOWS / "queue_prompt.py", *arguments, *common]
        return [str(part) for part in command]

    def arguments(self, *more, file=DEMO, **changes):
        settings = {**SMALL, **{k.replace("_", ".", 1): v for k, v in changes.items()}}
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return [file, *sets, *more]

    def run(self, *arguments):
        """(exit code, new records, what was shown)."""
        before = len(self.records())
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=120)
        assert done.stdout == ""
        return done.returncode, self.records()[before:], done.stderr

    @contextmanager
    def running(self, *arguments):
        """The script's process, once the server runs its prompt."""
        command = self.command(*arguments)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                deadline = time.monotonic() + 60
                while not self.comfy.server.get("/queue")["queue_running"]:
                    assert process.poll() is None, process.stderr.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield process
            finally:
                process.kill()

    def records(self):
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def script(comfy, tmp_path):
    return Script(comfy, tmp_path)


def test_sweep_and_resume(script):
    files = script.arguments("--sweep", "KSampler.seed=1,2", "--output", script.out)
    code, records, shown = script.run(*files)
    assert code == 0, shown
    assert [r["status"] for r in records] == ["ok", "ok"]
    assert [r["set"]["7.seed"] for r in records] == [1, 2]
    for record in records:
        report = record["report"]
        assert report["schema_version"] == 1
        (run,) = report["runs"]
        assert run["prompt_id"] == record["prompt_id"] and run["sparse_calls"] > 0
        # The report's picture as a preview and as a file, and the video.
        endings = sorted(Path(o["file"]).suffix for o in record["outputs"])
        assert endings == [".mp4", ".png", ".png"]
        for output in record["outputs"]:
            assert (script.out / output["file"]).stat().st_size > 0
        timings = record["timings"]
        assert timings["nodes_complete"] and timings["nodes"]["7"] > 0
        assert 0 < timings["running_s"] <= timings["total_s"]
        assert "finished" in record["texts"]["8"]["text"][0]
    assert "1" in records[1]["cached"] and "7" not in records[1]["cached"]
    saved = {o["file"] for r in records for o in r["outputs"]}
    assert len(saved) == 6
    # What was fetched is what the server has.
    for name in saved:
        if not name.startswith("temp/"):
            there = script.comfy.base / "output" / name
            assert there.read_bytes() == (script.out / name).read_bytes()

    code, records, shown = script.run(*files, "--resume")
    assert code == 0 and records == [] and "2 of 2 runs are done already" in shown


def test_refused_by_the_server(script):
    code, (record,), shown = script.run(*script.arguments(**{"3_tau": 99}))
    assert code == 2 and record["status"] == "refused"
    assert "node 3 (HopperSolAttention): Value 99.0 bigger than max" in shown


def test_missing_class_and_file_under_other_slashes(script, tmp_path):
    graph = json.loads(DEMO.read_text())
    graph["1"]["class_type"] = "HopperSolNoSuchLoader"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(graph))
    code, (record,), shown = script.run(*script.arguments(file=other))
    assert code == 2 and "no node class 'HopperSolNoSuchLoader'" in shown
    code, (record,), shown = script.run(
        *script.arguments(**{"1_file": "sub\\prefixed.safetensors"})
    )
    assert code == 0, shown
    assert "is 'sub/prefixed.safetensors' on this server" in record["notes"][0]


def test_failing_node(script, tmp_path):
    graph = json.loads(DEMO.read_text())
    probe = {"model": ["3", 0], "after": 1, "how": "error"}
    graph["20"] = {"class_type": "ProbeInterrupt", "inputs": probe}
    graph["7"]["inputs"]["model"] = ["20", 0]
    failing = tmp_path / "failing.json"
    failing.write_text(json.dumps(graph))
    code, (record,), shown = script.run(*script.arguments(file=failing))
    assert code == 1 and record["status"] == "error"
    error = record["error"]
    assert (error["node_id"], error["node_type"]) == ("7", "KSampler")
    assert "probe error in the model" in error["message"]
    assert "error in node KSampler (7)" in shown


def test_interrupt_from_another_client(script):
    with script.running(*script.arguments(**{"7_steps": 500})) as process:
        script.comfy.server.interrupt()
        assert process.wait(60) == 1
    (record,) = script.records()
    assert record["status"] == "interrupted" and record["resubmitted"] == 0


def test_ctrl_c_stops_the_server_too(script):
    with script.running(*script.arguments(**{"7_steps": 500})) as process:
        process.send_signal(2)
        assert process.wait(60) == 130
    (record,) = script.records()
    assert record["status"] == "interrupted"
    deadline = time.monotonic() + 30
    while script.comfy.server.get("/queue")["queue_running"]:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)
    status = script.comfy.server.get(f"/history/{record['prompt_id']}")[record["prompt_id"]]
    assert "execution_interrupted" in [kind for kind, _ in status["status"]["messages"]]


def test_server_killed_and_started_again(script):
    with script.running(*script.arguments("--output", script.out, **{"7_steps": 40})) as process:
        script.comfy.server.restart()
        shown = process.communicate(timeout=90)[1]
        assert process.returncode == 0, shown
    (record,) = script.records()
    assert record["status"] == "ok" and record["resubmitted"] == 1
    assert record["report"]["runs"][0]["steps"] == 40
    assert len(record["outputs"]) == 3 and all(o["file"] for o in record["outputs"])
    assert "queued again" in shown


def test_warmup(script):
    demo = ["warmup", "--workflow", DEMO, "--size", "192x192x9,128x192x9", "--steps", "2"]
    sets = [part for key in ("1.file", "3.min_tokens") for part in ("--set", f"{key}={SMALL[key]}")]
    code, records, shown = script.run(*demo, *sets)
    assert code == 0, shown
    assert [r["warmup"]["size"] for r in records] == ["192x192x9"] * 2 + ["128x192x9"] * 2
    tokens = [r["report"]["runs"][0]["tokens"] for r in records]
    assert tokens == [3 * 12 * 12] * 2 + [3 * 8 * 12] * 2
    # None of them came from the cache, and each had a sparse step.
    assert all(r["report"]["source"] == "this_prompt" for r in records)
    assert all(r["report"]["runs"][0]["sparse_calls"] > 0 for r in records)
    assert "192x192x9: first " in shown and "128x192x9: first " in shown
