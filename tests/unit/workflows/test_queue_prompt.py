"""workflows/queue_prompt.py against a stand-in for a server that fails in every way it can."""

import ast
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "workflows" / "queue_prompt.py"
IMAGE = {"filename": "a.png", "subfolder": "x", "type": "output"}
GRAPH = {
    "1": {"class_type": "Cached", "inputs": {}},
    "2": {"class_type": "Sample", "inputs": {"seed": 5}, "_meta": {"title": "The sampler"}},
    "3": {"class_type": "Save", "inputs": {"files": [IMAGE]}},
}
REPORT = {"schema_version": 1, "runs": [{"sparse_calls": 12}]}


def graph_of(*classes, **inputs):
    return {str(i): {"class_type": c, "inputs": dict(inputs)} for i, c in enumerate(classes, 1)}


@pytest.fixture
def fake(fake_comfy):
    with contextlib.closing(fake_comfy.FakeComfy()) as server:
        server.files["a.png", "x", "output"] = b"picture"
        yield server


@pytest.fixture
def fast(queue_prompt, monkeypatch):
    """Waits that suit a server in the same process."""
    for name, value in (("BACKOFF_S", (0.01, 0.05)), ("POLL_S", 0.02), ("POLL_AT_END_S", 0.01)):
        monkeypatch.setattr(queue_prompt.runner, name, value)
    return queue_prompt.runner


@pytest.fixture
def run(queue_prompt, fake, fast, tmp_path, capsys, monkeypatch):
    """Queue graphs; the exit code, the records, and what was shown."""
    monkeypatch.delenv("HOPPER_SOL_AUTH", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked

    def run(*arguments, graph=GRAPH, server=None, **more_graphs):
        folder = tmp_path / "prompts"
        folder.mkdir(exist_ok=True)
        for name, data in {"p": graph, **more_graphs}.items():
            (folder / f"{name}.json").write_text(json.dumps(data))
        log = tmp_path / "runs.jsonl"
        before = len(log.read_text().splitlines()) if log.exists() else 0
        common = ["--server", server or fake.url, "--jsonl", str(log), "--patience", "5"]
        code = queue_prompt.main([str(folder), *common, *arguments])
        lines = log.read_text().splitlines()[before:] if log.exists() else []
        text = capsys.readouterr()
        return SimpleNamespace(
            code=code, records=[json.loads(line) for line in lines], err=text.err, out=text.out
        )

    return run


@contextlib.contextmanager
def meanwhile(work):
    """Do something while the block runs; what fails there fails here."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    yield
    thread.join(10)
    assert not errors, errors


# ---- what is asked for is done


def test_a_run_and_its_record(run, fake, tmp_path):
    graph = {**GRAPH, "4": graph_of("HopperSolRunReport", report=REPORT)["1"]}
    graph["5"] = graph_of("Text", text="hello")["1"]
    done = run("--output", str(tmp_path / "out"), "--set", "The sampler.seed=7", graph=graph)
    assert done.code == 0
    assert (tmp_path / "out" / "x" / "a.png").read_bytes() == b"picture"
    (record,) = done.records
    assert record["schema_version"] == 1 and record["status"] == "ok" and record["error"] is None
    assert record["file"].endswith("p.json") and record["set"] == {"2.seed": 7}
    assert record["outputs"] == [
        {"node": "3", "kind": "images", "name": "x/a.png", "file": "x/a.png"}
    ]
    assert record["report"] == REPORT and "more_reports" not in record
    assert record["texts"] == {"4": {"text": ["finished"]}, "5": {"text": ["hello"]}}
    assert record["cached"] == ["1"] and record["comfyui"] == "0.33.0"
    assert record["prompt_id"] in fake.history and record["server"] == fake.url
    timings = record["timings"]
    assert set(timings["nodes"]) == set(graph) and timings["nodes_complete"] is True
    assert timings["total_s"] >= timings["running_s"] >= 0 and timings["queued_s"] >= 0
    assert fake.received[0]["prompt"]["2"]["inputs"] == {"seed": 7}
    assert "[1/1] p.json 2.seed=7: ok" in done.err and "-> x/a.png" in done.err


def test_progress_names_the_node_and_the_step(run, fake, comfy_client, monkeypatch):
    shown = []
    monkeypatch.setattr(
        comfy_client.progress.Display, "live", lambda self, *texts: shown.append(texts)
    )
    steps = []

    def hold(kind):
        # The third step comes once the second is shown.
        steps.extend([kind] * (kind == "progress"))
        if len(steps) == 3:
            steps.append("held")
            fake.wait_for(lambda: any("2/3" in text for texts in shown for text in texts))

    fake.on_message = hold
    assert run().code == 0 and "held" in steps
    what, detail = next(texts for texts in shown if "2/3" in texts[-1])
    assert what == "[1/1] p.json: The sampler (2)"
    assert detail.startswith("[#############.......] 2/3 ")


def test_without_output_files_stay_on_the_server(run, fake):
    done = run()
    assert done.code == 0 and fake.called("GET /view") == 0
    assert done.records[0]["outputs"][0]["file"] is None


def test_previews_can_be_left_out(run, fake, tmp_path):
    fake.files["t.png", "", "temp"] = b"preview"
    graph = graph_of("Save", files=[{"filename": "t.png", "type": "temp"}, IMAGE])
    folder = str(tmp_path / "out")
    assert [o["file"] for o in run("--output", folder, graph=graph).records[0]["outputs"]] == [
        "temp/t.png",
        "x/a.png",
    ]
    done = run("--output", folder, "--no-previews", graph=graph)
    assert [o["file"] for o in done.records[0]["outputs"]] == ["x/a.png"]


def test_sweeps_over_a_folder_and_resume(run, fake):
    arguments = ["--sweep", "2.seed=1,2", "--repeat", "2"]
    done = run(*arguments, q=graph_of("Cached", "Sample", seed=9))
    assert done.code == 0
    made = [(Path(r["file"]).name, r["set"]["2.seed"], r["repeat"]) for r in done.records]
    assert made == [(f, s, r) for f in ("p.json", "q.json") for s in (1, 2) for r in (0, 1)]

    again = run(*arguments, "--resume")
    assert again.code == 0 and again.records == [] and "8 of 8 runs are done already" in again.err
    assert len(fake.received) == 8
    more = run("--sweep", "2.seed=1,3", "--repeat", "2", "--resume")
    assert [r["set"]["2.seed"] for r in more.records] == [3, 3] * 2


def test_resume_runs_again_what_was_not_ok(run, fake):
    graph = graph_of("Sample", "Fail")
    assert run(graph=graph).code == 1
    assert [r["status"] for r in run("--resume", graph=graph).records] == ["error"]


def test_dry_run_asks_nothing(run, fake, tmp_path):
    done = run("--sweep", "2.seed=1,2", "--dry-run")
    assert done.code == 0 and fake.requests == [] and not list(tmp_path.glob("*.jsonl"))
    assert "p.json 2.seed=1\n" in done.err and "p.json 2.seed=2\n" in done.err


def test_quiet_and_records_on_stdout(queue_prompt, run, fake, tmp_path, capsys):
    run()
    path = str(tmp_path / "prompts" / "p.json")
    assert queue_prompt.main([path, "--server", fake.url, "--quiet", "--jsonl", "-"]) == 0
    text = capsys.readouterr()
    assert text.err == "" and json.loads(text.out)["status"] == "ok"


def test_several_reports(run):
    graph = graph_of("HopperSolRunReport", "HopperSolRunReport", report=REPORT)
    graph["2"]["inputs"]["report"] = {**REPORT, "runs": []}
    (record,) = run(graph=graph).records
    assert record["report"] == REPORT
    assert record["more_reports"] == {"2": {"schema_version": 1, "runs": []}}


def test_base_path_and_authorization(fake_comfy, run, monkeypatch):
    with contextlib.closing(fake_comfy.FakeComfy("/comfy", "Bearer t0p-s3cr3t")) as fake:
        url = fake.url + "/"
        assert run("--header", "Authorization: Bearer t0p-s3cr3t", server=url).code == 0
        monkeypatch.setenv("HOPPER_SOL_AUTH", "Bearer t0p-s3cr3t")
        done = run(server=url)
        assert done.code == 0 and len(fake.received) == 2 and fake.called("GET /ws") == 2
        assert "no websocket" not in done.err

        # The server repeats what it got.
        monkeypatch.setenv("HOPPER_SOL_AUTH", "Bearer wr0ng-s3cr3t")
        done = run(server=url)
        assert done.code == 2 and "HTTP 401" in done.err and "HOPPER_SOL_AUTH" in done.err
        assert "not ***" in done.err and "s3cr3t" not in done.err
        monkeypatch.delenv("HOPPER_SOL_AUTH")
        done = run(server=fake.url.removesuffix("/comfy") + "/other")
        assert done.code == 2 and "check the base path" in done.err


def test_wrong_options_show_no_authorization(queue_prompt, capsys):
    with pytest.raises(SystemExit) as error:
        queue_prompt.main(["p.json", "--headers", "Authorization: Bearer t0p-s3cr3t"])
    text = capsys.readouterr().err
    assert error.value.code == 2 and "unrecognized" in text and "s3cr3t" not in text


# ---- what can't be done is refused


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--set", "9.x=1"], "no node '9'"),
        (["--sweep", "2.sed=1"], "has the inputs seed"),
        (["--resume", "--jsonl", "-"], "--resume needs --jsonl"),
        (["--server", "ftp://x"], "need http or https"),
        (["--header", "x"], "need 'Name: value'"),
        (["--jsonl", "/dev/null/x"], "/dev/null"),
    ],
)
def test_bad_arguments_queue_nothing(run, fake, arguments, why):
    done = run(*arguments)
    assert done.code == 2 and why in done.err and fake.requests == []


def test_one_bad_file_queues_nothing(run, fake):
    done = run(q={"nodes": [], "links": []})
    assert done.code == 2 and "q.json: " in done.err and "Export (API)" in done.err
    assert fake.requests == [] and done.records == []


def test_a_refused_graph(run, fake):
    done = run(graph=graph_of("Sample", "Bad"), q=GRAPH)
    assert done.code == 2
    assert [r["status"] for r in done.records] == ["refused", "ok"]
    assert "[1/2] p.json: refused: No valid outputs\n" in done.err
    assert "    node 2 (Bad): Value 99 too big: tau\n" in done.err
    assert "Value 99 too big" in done.records[0]["error"]["message"]


def test_missing_classes_are_all_named_before_queueing(run, fake):
    fake.missing = {"Sample", "Save"}
    done = run()
    assert done.code == 2 and fake.received == []
    assert "no node class 'Sample'" in done.err and "no node class 'Save'" in done.err


def test_a_file_under_other_slashes(run, fake):
    fake.choices["Load"] = {"file": ["wan/x.sft"]}
    done = run(graph=graph_of("Load", file="wan\\x.sft"))
    assert done.code == 0 and fake.received[0]["prompt"]["1"]["inputs"]["file"] == "wan/x.sft"
    assert "is 'wan/x.sft' on this server" in done.records[0]["notes"][0]
    # What identifies the run is the file, not the server.
    assert "done already" in run("--resume", graph=graph_of("Load", file="wan\\x.sft")).err


def test_a_redirect_is_not_followed(run, fake, fake_comfy):
    with contextlib.closing(fake_comfy.FakeComfy()) as other:
        fake.failures["GET /system_stats"] = [(302, {"Location": other.url + "/system_stats"})]
        done = run("--header", "Authorization: Bearer x")
        assert done.code == 2 and other.requests == []
        assert f"redirects to {other.url}/system_stats" in done.err


def test_something_that_is_no_comfyui(run, fake, monkeypatch):
    handler = fake.server.RequestHandlerClass
    monkeypatch.setattr(handler, "serve", lambda self, *a: self.answer(200, b"<html>Log in"))
    done = run()
    assert done.code == 3 and "no JSON ('<html>Log in')" in done.err


# ---- what fails is told


def test_a_failing_node(run, fake):
    done = run(graph=graph_of("Sample", "Fail"), q=GRAPH)
    assert done.code == 1
    assert [r["status"] for r in done.records] == ["error", "ok"]
    assert done.records[0]["error"] == {
        "type": "ValueError",
        "message": "tau: got 9, need -1000 .. 8",
        "node_id": "2",
        "node_type": "Fail",
        "traceback": ["a", "b"],
    }
    assert "error in node Fail (2): ValueError: tau: got 9" in done.err


def test_fail_fast(run, fake):
    done = run("--fail-fast", "--max-pending", "2", graph=graph_of("Fail"), q=graph_of("Wait"))
    assert done.code == 1
    assert [r["status"] for r in done.records] == ["error", "interrupted"]
    fake.wait_for(lambda: not fake.running and not fake.pending)
    done = run("--fail-fast", graph=graph_of("Fail"), q=GRAPH)
    assert len(done.records) == 1 and "1 of 2 runs were not made" in done.err


def test_an_output_that_is_gone(run, fake, tmp_path):
    fake.files.clear()
    done = run("--output", str(tmp_path / "out"))
    (record,) = done.records
    assert done.code == 1 and record["status"] == "error" and record["error"]["type"] == "output"
    assert "x/a.png: not saved" in record["error"]["message"]
    assert record["outputs"][0]["file"] is None


def test_names_that_leave_the_folder(run, fake, tmp_path):
    names = ["../evil", "/tmp/evil", "C:\\evil", "x\0evil", "fine.png"]
    for name in names:
        fake.files[name, "", "output"] = b"x"
    graph = graph_of("Save", files=[{"filename": name, "type": "output"} for name in names])
    done = run("--output", str(tmp_path / "out"), graph=graph)
    (record,) = done.records
    assert done.code == 1
    assert [o["file"] for o in record["outputs"]] == [None] * 4 + ["fine.png"]
    assert record["error"]["message"].count("not saved") == 4
    assert "leaves the folder" in record["error"]["message"]
    assert fake.called("GET /view") == 1
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["fine.png"]


def test_an_interrupt_by_somebody_else(run, fake):
    def interrupt():
        fake.wait_for(lambda: fake.node == "2")
        fake.interrupt()

    with meanwhile(interrupt):
        done = run(graph=graph_of("Sample", "Wait"))
    (record,) = done.records
    assert done.code == 1 and record["status"] == "interrupted" and record["resubmitted"] == 0
    assert record["error"]["node_id"] == "2" and record["error"]["node_type"] == "Wait"


def test_removed_from_the_queue_by_somebody_else(run, fake):
    """Not lost: queueing it again would be rude."""
    fake.queue_others("theirs")

    def remove():
        fake.wait_for(lambda: fake.received and fake.pending)
        fake.pending.clear()

    with meanwhile(remove):
        done = run()
    assert done.code == 1 and done.records[0]["status"] == "interrupted"
    assert done.records[0]["error"]["type"] == "removed" and len(fake.received) == 1


def test_a_prompt_that_runs_too_long(run, fake):
    done = run("--prompt-timeout", "0.1", graph=graph_of("Wait"), q=GRAPH)
    assert done.code == 1
    assert [r["status"] for r in done.records] == ["error", "ok"]
    assert done.records[0]["error"]["type"] == "timeout"
    assert fake.stopped == {done.records[0]["prompt_id"]}


def test_a_disk_that_is_full(run, fake, queue_prompt, monkeypatch):
    def write(self, data):
        raise OSError("no space left")

    monkeypatch.setattr(queue_prompt.records.Log, "write", write)
    done = run(q=GRAPH)
    assert done.code == 1 and "no space left" in done.err and "1 of 2 runs" in done.err


# ---- what breaks on the way does not matter


def test_busy_and_broken_answers(run, fake):
    fake.failures = {
        "GET /system_stats": [503],
        "GET /object_info/Save": [500],
        "POST /prompt": [503, (429, {"Retry-After": "0"}), 502, "drop", 500, 500],
        "GET /queue": [500, 502, "drop"],
    }
    done = run("--wait-for-server", "5")
    assert done.code == 0 and len(fake.received) == 1


def test_a_full_queue_is_waited_for(run, fake):
    fake.failures["POST /prompt"] = [(429, {"Retry-After": "0.1"})] * 5
    done = run("--patience", "0.2")
    assert done.code == 0 and "can't be queued yet: POST /prompt: HTTP 429" in done.err


def test_retry_after_is_kept(run, fake):
    fake.failures["POST /prompt"] = [(429, {"Retry-After": "0.3"})]
    start = time.monotonic()
    assert run().code == 0
    assert time.monotonic() - start >= 0.3


def test_a_lost_answer_does_not_queue_twice(run, fake):
    fake.failures["POST /prompt"] = ["drop after"]
    done = run()
    assert done.code == 0 and len(fake.received) == 1 and len(fake.history) == 1


def test_a_server_that_fails_on_a_graph(run, fake):
    fake.failures["POST /prompt"] = [500, 500, 500]
    done = run(q=GRAPH)
    assert done.code == 2 and [r["status"] for r in done.records] == ["refused", "ok"]
    assert "HTTP 500" in done.records[0]["error"]["message"]


def test_large_messages_in_pieces(run, fake):
    fake.fragment = 9
    text = "x" * 300_000
    (record,) = run(graph=graph_of("Sample", "Text", text=text)).records
    assert record["texts"] == {"2": {"text": [text]}} and record["timings"]["nodes_complete"]


@pytest.mark.parametrize("half", [False, True])
def test_a_dropped_socket(run, fake, half):
    def drop():
        fake.wait_for(lambda: fake.running and fake.sockets)
        fake.drop_sockets(half)
        fake.wait_for(lambda: fake.sockets)
        fake.gate.set()

    with meanwhile(drop):
        done = run(graph={**graph_of("Wait"), **{"2": GRAPH["2"]}})
    (record,) = done.records
    assert done.code == 0 and record["resubmitted"] == 0 and len(fake.received) == 1
    assert fake.called("GET /ws") == 2 and record["timings"]["nodes_complete"] is False
    assert "2" in record["timings"]["nodes"]  # the new socket was listened to


def test_a_drop_at_the_very_end(run, fake):
    """The end is in the history, though nobody told."""
    fake.on_message = lambda kind: kind == "execution_success" and fake.drop_sockets(True)
    assert run().code == 0


def test_no_websocket_at_all(run, fake):
    fake.deaf = True
    done = run(q=GRAPH)
    assert done.code == 0 and done.err.count("no websocket") == 1
    timings = done.records[0]["timings"]
    assert timings["nodes"] == {} and timings["running_s"] is not None


def test_a_socket_that_says_nothing_true(run, fake, fake_comfy):
    """Messages are hints: nonsense in them changes nothing."""

    def nonsense(kind):
        if kind != "progress":
            return
        for client in list(fake.sockets):
            for text in ("{", "[]", '"x"', "{}", '{"type": [], "data": 5}',
                         '{"type": "progress", "data": {"prompt_id": []}}',
                         '{"type": "executing", "data": {"node": "2"}}',
                         '{"type": "executing", "data": {}}',
                         '{"type": "execution_success", "data": {"prompt_id": "other"}}'):  # fmt: skip
                fake.send_raw(client, fake_comfy.frame(fake_comfy.TEXT, text.encode()))
            fake.send_raw(client, fake_comfy.frame(fake_comfy.BINARY, b"\0\0\0\1preview"))

    fake.on_message = nonsense
    done = run()
    assert done.code == 0 and done.records[0]["timings"]["nodes_complete"]


def test_a_cleared_history(run, fake, fast, monkeypatch, tmp_path):
    monkeypatch.setattr(fast, "HISTORY_GRACE_S", 0.05)
    fake.forgetful = True
    done = run("--output", str(tmp_path / "out"))
    (record,) = done.records
    assert done.code == 0 and record["outputs"][0]["file"] == "x/a.png"
    assert "the history has no entry" in record["notes"][0]
    assert run(graph=graph_of("Fail")).records[0]["error"]["node_id"] == "1"


@pytest.mark.parametrize("deaf", [False, True])
def test_a_restarted_server_gets_it_again(run, fake, deaf):
    fake.deaf = deaf

    def restart():
        fake.wait_for(lambda: fake.running)
        fake.restart()
        fake.gate.set()

    with meanwhile(restart):
        done = run(graph=graph_of("Wait", "Sample"))
    (record,) = done.records
    assert done.code == 0 and record["resubmitted"] == 1 and len(fake.received) == 2
    first, second = (data["prompt_id"] for data in fake.received)
    assert record["prompt_id"] == second != first and first in record["notes"][0]
    assert "forgotten it; queued again" in done.err


def test_on_lost_fail(run, fake):
    def restart():
        fake.wait_for(lambda: fake.running)
        fake.restart()

    with meanwhile(restart):
        done = run("--on-lost", "fail", graph=graph_of("Wait"), q=GRAPH)
    assert done.code == 3 and [r["status"] for r in done.records] == ["lost", "ok"]
    assert len(fake.received) == 2


def test_it_is_queued_again_only_once(run, fake):
    def restart():
        for count in (1, 2):
            fake.wait_for(lambda count=count: len(fake.received) == count and fake.running)
            fake.restart()

    with meanwhile(restart):
        done = run(graph=graph_of("Wait"))
    assert done.code == 3 and done.records[0]["status"] == "lost"
    assert len(fake.received) == 2


def test_a_server_that_stays_away(run, fake):
    def leave():
        fake.wait_for(lambda: fake.running)
        fake.close()

    with meanwhile(leave):
        done = run("--patience", "0.2", graph=graph_of("Wait"), q=GRAPH, r=GRAPH)
    assert done.code == 3 and [r["status"] for r in done.records] == ["lost"]
    assert "gave up after 0.2 s" in done.err and "2 of 3 runs were not made" in done.err


def test_a_server_that_is_not_there(run, fake):
    fake.close()
    done = run()
    assert done.code == 3 and "refused" in done.err and "--wait-for-server" in done.err


# ---- a queue that is shared


def test_our_place_in_the_queue(run, fake):
    fake.queue_others("a", "b", "c")

    def watch():
        fake.wait_for(lambda: fake.called("GET /queue"))
        # As the server tells everybody when its queue changes; our place is asked for then.
        for client in list(fake.sockets):
            fake.send(client, "status", {})
        fake.wait_for(lambda: fake.called("GET /queue") >= 2, 2)
        fake.gate.set()

    with meanwhile(watch):
        done = run()
    assert done.code == 0 and "[1/1] p.json: waiting, 3 before it" in done.err


@pytest.mark.parametrize("limit", [1, 3])
def test_max_pending(run, fake, limit):
    seen = []
    fake.on_message = lambda kind: (
        kind == "execution_start" and time.sleep(0.03),
        seen.append(len(fake.received) - len(fake.history)),
    )
    done = run("--max-pending", str(limit), "--sweep", "2.seed=1,2,3,4,5")
    assert done.code == 0 and len(done.records) == 5
    assert max(seen) == limit
    assert [r["set"]["2.seed"] for r in done.records] == [1, 2, 3, 4, 5]


# ---- being stopped


@pytest.fixture
def started(fake, tmp_path):
    """The script in a process of its own."""
    processes = []

    def start(*arguments, graph):
        path = tmp_path / "p.json"
        path.write_text(json.dumps(graph))
        log = tmp_path / "runs.jsonl"
        command = [sys.executable, "-S", SCRIPT, path, "--server", fake.url, "--jsonl", log]
        process = subprocess.Popen(
            [*map(str, command), *arguments], stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process, log

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stop_cancels_what_is_ours(started, fake, name):
    graph = {**graph_of("Wait"), **{"2": GRAPH["2"]}}
    process, log = started("--sweep", "2.seed=1,2,3", "--max-pending", "2", graph=graph)
    fake.wait_for(lambda: fake.running and len(fake.pending) == 1)
    ours = fake.running[1]
    fake.queue_others("theirs")
    process.send_signal(getattr(signal, name))
    assert process.wait(10) == 130
    assert fake.stopped == {ours}
    fake.wait_for(lambda: fake.running and fake.running[1] == "theirs")
    assert fake.pending == []
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["status"] for r in records] == ["interrupted", "interrupted"]
    assert "1 of 3 runs were not made" in process.stderr.read()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_stop_leaves_alone_what_others_run(started, fake):
    fake.queue_others("theirs")
    process, _ = started(graph=GRAPH)
    fake.wait_for(lambda: fake.running and fake.pending)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert fake.stopped == set() and fake.pending == [] and fake.running[1] == "theirs"


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_second_stop_leaves_at_once(started, fake):
    process, _ = started(graph=graph_of("Wait"))
    fake.wait_for(lambda: fake.running)
    stuck = threading.Event()
    fake.failures["POST /queue"] = [lambda: (stuck.set(), time.sleep(3))]
    process.send_signal(signal.SIGINT)
    assert stuck.wait(10)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert process.wait(10) == 130
    assert time.monotonic() - start < 2.5  # the server would have answered after 3 s


# ---- https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("https is not tested: there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", paths[0], "-keyout", paths[1]],
        capture_output=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"https is not tested: openssl makes no certificate ({done.stderr[-200:]})")
    return paths


@pytest.fixture
def secure(fake_comfy, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with contextlib.closing(fake_comfy.FakeComfy("/comfy", tls=context)) as server:
        yield server


def test_https_with_a_certificate_that_is_trusted(run, secure, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    done = run(server=secure.url)
    assert done.code == 0 and "no websocket" not in done.err
    assert done.records[0]["timings"]["nodes_complete"] is True


def test_https_with_a_certificate_that_is_not(run, secure):
    done = run(server=secure.url)
    assert done.code == 3 and "--insecure switches the check off" in done.err
    assert secure.received == []
    done = run("--insecure", server=secure.url)
    assert done.code == 0 and done.records[0]["timings"]["nodes_complete"] is True


# ---- warmup


@pytest.fixture
def warm(queue_prompt, run, fake, tmp_path, capsys):
    def warm(graph, *arguments):
        path = tmp_path / "w.json"
        path.write_text(json.dumps(graph))
        common = ["--workflow", str(path), "--server", fake.url, "--jsonl", str(tmp_path / "w")]
        code = queue_prompt.main(["warmup", *common, *arguments])
        text = (tmp_path / "w").read_text() if (tmp_path / "w").exists() else ""
        return code, [json.loads(line) for line in text.splitlines()], capsys.readouterr().err

    return warm


def latent_graph(*classes, **inputs):
    size = {"width": 832, "height": 480, "length": 81}
    return {
        "9": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
        **graph_of(*classes, **inputs),
    }


def test_warmup(warm, fake):
    graph = latent_graph("Sample", "HopperSolRunReport", seed=1, steps=20, report=REPORT)
    code, records, shown = warm(graph, "--size", "64x64x9,128x64", "--set", "1.steps=3")
    assert code == 0
    assert [r["warmup"] for r in records] == [
        {"size": size, "run": n} for size in ("64x64x9", "128x64") for n in (1, 2)
    ]
    sent = [data["prompt"] for data in fake.received]
    assert [g["9"]["inputs"]["width"] for g in sent] == [64, 64, 128, 128]
    assert {g["1"]["inputs"]["steps"] for g in sent} == {3}
    assert len({g["1"]["inputs"]["seed"] for g in sent}) == 4
    seconds = [f"{r['timings']['running_s']:.1f} s" for r in records]
    assert f"64x64x9: first {seconds[0]}, second {seconds[1]}\n" in shown
    assert f"128x64: first {seconds[2]}, second {seconds[3]}\n" in shown
    assert "no sparse call" not in shown


def test_warmup_of_nothing_says_so(warm):
    runs = [{"sparse_calls": 0, "dense_calls": {"432 tokens < min_tokens 1024": 8}}]
    graph = latent_graph("HopperSolRunReport", report={"runs": runs})
    code, _, shown = warm(graph, "--size", "64x64")
    assert code == 0 and shown.count("no sparse call") == 1
    assert "64x64: no sparse call, so nothing was warmed up: 432 tokens < min_tokens" in shown


def test_warmup_that_fails(warm):
    code, records, shown = warm(latent_graph("Fail"), "--size", "64x64")
    assert code == 1 and [r["status"] for r in records] == ["error", "error"]
    assert "64x64: first error, second error\n" in shown


@pytest.mark.parametrize(
    ("graph", "size", "why"),
    [(GRAPH, "64x64", "--size-node"), (latent_graph("Sample"), "64", "need WIDTHxHEIGHTxFRAMES")],
)
def test_warmup_bad_arguments(warm, fake, graph, size, why):
    code, records, shown = warm(graph, "--size", size)
    assert code == 2 and why in shown and records == [] and fake.requests == []


# ---- where it runs


def sources():
    return [SCRIPT, *sorted((ROOT / "workflows" / "comfy_client").glob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.name)
def test_only_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, name


@pytest.mark.parametrize("arguments", [["--help"], ["warmup", "--help"]])
def test_help_tells_the_exit_codes(tmp_path, arguments):
    """From another folder, in a Python with nothing installed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for code in ("\n  0  ", "\n  1  ", "\n  2  ", "\n  3  ", "\n  130  "):
        assert code in done.stdout
    assert "HOPPER_SOL_AUTH" in done.stdout
