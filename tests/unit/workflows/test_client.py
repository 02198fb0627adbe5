"""workflows/comfy_client: HTTP to a server, and how a prompt's end is told."""

import socket
import time

import pytest

PROMPT = {"1": {"class_type": "X", "inputs": {}}}


@pytest.fixture
def client(comfy_client, fake, monkeypatch):
    # A proxy that would swallow every request, were it asked.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    return comfy_client.Client(fake.url)


def _entry(status_str, messages=(), outputs=None):
    messages = [["execution_start", {"prompt_id": "p"}], *messages]
    status = {"status_str": status_str, "completed": status_str == "success", "messages": messages}
    return {"prompt": [0, "p", {}, {}, []], "outputs": outputs or {}, "status": status}


def _queue(running=(), pending=()):
    def items(ids):
        return [[0, i, {}, {}, []] for i in ids]

    return 200, {"queue_running": items(running), "queue_pending": items(pending)}


def _history(entry=None):
    return 200, {} if entry is None else {"p": entry}


def test_client_get_post(client, fake, comfy_client):
    fake.answers = {
        "GET /json": [(200, {"a": 1})],
        "POST /json": [(200, [2])],
        "POST /empty": [(200, None)],
        "GET /bad": [(500, {"error": "broken"})],
    }
    assert client.get("/json") == {"a": 1}
    assert client.post("/json", {"x": 1}) == [2]
    assert fake.requests[-1] == ("POST /json", {"x": 1})
    assert client.post("/empty", {}) is None
    with pytest.raises(comfy_client.HttpError, match=r'^GET /bad: HTTP 500 {"error": "broken"}'):
        client.get("/bad")
    with pytest.raises(comfy_client.HttpError, match=r"^GET /none: HTTP 404$") as error_info:
        client.get("/none")
    assert error_info.value.status == 404 and error_info.value.body is None


def test_client_no_server(comfy_client):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = comfy_client.Client(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(comfy_client.ServerError, match=r"GET .*/queue: no answer .*refused"):
            client.get("/queue")


def test_client_object_info_and_interrupt(client, fake):
    fake.answers = {
        "GET /object_info": [(200, {"A": {}, "B": {}})],
        "GET /object_info/A": [(200, {"A": {}})],
        "POST /interrupt": [(200, None)],
    }
    assert client.object_info() == {"A": {}, "B": {}}
    assert client.object_info("A") == {"A": {}}
    client.interrupt()
    client.interrupt("p")
    assert fake.requests[-2:] == [("POST /interrupt", {}), ("POST /interrupt", {"prompt_id": "p"})]


def test_queue(client, fake):
    fake.answers["POST /prompt"] = [(200, {"prompt_id": "p", "number": 1, "node_errors": {}})]
    assert client.queue(PROMPT, "me") == "p"
    assert fake.requests == [("POST /prompt", {"prompt": PROMPT, "client_id": "me"})]


def test_queue_rejected(client, fake, comfy_client):
    item = {"type": "value_smaller_than_min", "message": "Value -4 too small", "details": "tau"}
    node_errors = {"3": {"class_type": "HopperSolAttention", "errors": [item]}}
    error = {"type": "prompt_outputs_failed_validation", "message": "No", "details": ""}
    fake.answers["POST /prompt"] = [(400, {"error": error, "node_errors": node_errors})]
    with pytest.raises(comfy_client.PromptRejected) as error_info:
        client.queue(PROMPT)
    assert str(error_info.value) == (
        "prompt rejected: No; node 3 (HopperSolAttention): Value -4 too small: tau"
    )
    assert error_info.value.error == error
    assert error_info.value.node_errors == node_errors


def test_queue_rejected_without_node_errors(client, fake, comfy_client):
    error = {"type": "invalid_prompt", "message": "No node X", "details": "Node ID '#1'"}
    fake.answers["POST /prompt"] = [(400, {"error": error, "node_errors": []})]
    with pytest.raises(comfy_client.PromptRejected, match="No node X: Node ID '#1'") as error_info:
        client.queue(PROMPT)
    assert error_info.value.node_errors == {}


def test_queue_rejected_in_part(client, fake, comfy_client):
    item = {"type": "x", "message": "Bad", "details": ""}
    errors = {"9": {"class_type": "SaveImage", "errors": [item]}}
    fake.answers = {
        "POST /prompt": [(200, {"prompt_id": "p", "number": 1, "node_errors": errors})],
        "POST /queue": [(200, None)],
        "GET /queue": [_queue(running=["p"])],
        "POST /interrupt": [(200, None)],
    }
    with pytest.raises(comfy_client.PromptRejected, match=r"node 9 \(SaveImage\): Bad"):
        client.queue(PROMPT)
    assert fake.requests[1:] == [
        ("POST /queue", {"delete": ["p"]}),
        ("GET /queue", None),
        ("POST /interrupt", {"prompt_id": "p"}),
    ]


def test_queue_other_http_error(client, fake, comfy_client):
    fake.answers["POST /prompt"] = [(413, None)]
    with pytest.raises(comfy_client.HttpError, match="POST /prompt: HTTP 413"):
        client.queue(PROMPT)


def test_wait_success(client, fake):
    entry = _entry("success", outputs={"8": {"text": ["done"]}})
    fake.answers = {
        "GET /history/p": [_history(), _history(), _history(entry)],
        "GET /queue": [_queue(pending=["x", "p"]), _queue(running=["p"])],
    }
    polled = []
    assert client.wait("p", 10, lambda state, s: polled.append(state), interval=0.01) == entry
    assert polled == ["pending", "running"]


def test_wait_success_without_outputs(client, fake):
    # Everything was cached: a good end, with nothing in it.
    fake.answers["GET /history/p"] = [_history(_entry("success"))]
    assert client.wait("p", 10)["outputs"] == {}


def test_wait_ends_between_the_two_questions(client, fake):
    entry = _entry("success")
    fake.answers = {
        "GET /history/p": [_history(), _history(entry)],
        "GET /queue": [_queue()],
    }
    assert client.wait("p", 10) == entry


def test_wait_execution_error(client, fake, comfy_client):
    details = {
        "node_id": "3",
        "node_type": "HopperSolAttention",
        "exception_type": "ValueError",
        "exception_message": "tau: got 9, need -1000 .. 8\n",
        "traceback": ["a", "b"],
    }
    entry = _entry("error", [["execution_error", details]])
    fake.answers["GET /history/p"] = [_history(entry)]
    with pytest.raises(comfy_client.PromptFailed) as error_info:
        client.wait("p", 10)
    assert type(error_info.value) is comfy_client.PromptFailed
    assert str(error_info.value) == (
        "prompt p: node 3 (HopperSolAttention) failed: ValueError: tau: got 9, need -1000 .. 8"
    )
    assert error_info.value.details == details
    assert error_info.value.entry == entry


def test_wait_interrupted(client, fake, comfy_client):
    message = ["execution_interrupted", {"node_id": "7", "node_type": "KSampler"}]
    fake.answers["GET /history/p"] = [_history(_entry("error", [message]))]
    with pytest.raises(comfy_client.PromptInterrupted, match=r"interrupted in node 7 \(KSampler\)"):
        client.wait("p", 10)


@pytest.mark.parametrize("status", [None, {}, {"status_str": "error", "messages": []}])
def test_wait_ended_without_success(client, fake, comfy_client, status):
    fake.answers["GET /history/p"] = [_history({"outputs": {}, "status": status})]
    with pytest.raises(comfy_client.PromptFailed, match=r"ended with status .*, need 'success'"):
        client.wait("p", 10)


def test_wait_unknown_id(client, fake, comfy_client):
    fake.answers = {
        "GET /history/p": [_history()],
        "GET /queue": [_queue(running=["other"])],
    }
    with pytest.raises(comfy_client.PromptLost, match="neither queued, running nor in the history"):
        client.wait("p", 10)


def test_wait_server_restarted(client, fake, comfy_client):
    # The new server knows nothing of what the old one was running.
    fake.answers = {
        "GET /history/p": [_history()],
        "GET /queue": [_queue(running=["p"]), _queue()],
    }
    with pytest.raises(comfy_client.PromptLost, match="the server was restarted"):
        client.wait("p", 10, interval=0.01)


def test_wait_server_stops_answering(comfy_client, fake, monkeypatch):
    monkeypatch.setattr(comfy_client.client, "REFUSED_GRACE_S", 0.05)
    fake.answers = {"GET /history/p": [_history()], "GET /queue": [_queue(running=["p"])]}
    client = comfy_client.Client(fake.url)

    def close_at_second_poll(state, seconds):
        if len(fake.requests) == 4:
            fake.close()

    with pytest.raises(comfy_client.ServerError, match=r"has stopped answering .*prompt p is lost"):
        client.wait("p", 30, close_at_second_poll, interval=0.01)


def test_wait_server_comes_back(comfy_client, fake, monkeypatch):
    client = comfy_client.Client(fake.url)
    fake.answers["GET /history/p"] = [_history(_entry("success"))]
    real, url = comfy_client.Client._open, fake.url
    refusals = iter(["http://127.0.0.1:9", "http://127.0.0.1:9"])

    def sometimes_refused(self, *args):
        self.url = next(refusals, url)
        return real(self, *args)

    monkeypatch.setattr(comfy_client.Client, "_open", sometimes_refused)
    assert client.wait("p", 10, interval=0.01)["status"]["status_str"] == "success"


def test_wait_dead_server_is_told_at_once(comfy_client):
    def dead():
        raise comfy_client.ServerError("ended with exit code -9")

    client = comfy_client.Client("http://127.0.0.1:9", dead)
    start = time.monotonic()
    with pytest.raises(comfy_client.ServerError, match="ended with exit code -9"):
        client.wait("p", 60)
    assert time.monotonic() - start < 5


def test_wait_timeout(client, fake, comfy_client):
    fake.answers = {"GET /history/p": [_history()], "GET /queue": [_queue(running=["p"])]}
    with pytest.raises(comfy_client.PromptTimeout, match=r"p: still running after 0\.2 s"):
        client.wait("p", 0.2, interval=0.01)


def test_wait_slow_answers_count_against_the_deadline(client, fake, comfy_client):
    # A server that is too busy to answer is not dead, but it is not for ever either.
    def slow():
        time.sleep(1.5)
        return _history()

    fake.answers["GET /history/p"] = [slow]
    with pytest.raises(comfy_client.PromptTimeout, match=r"after 0\.5 s"):
        client.wait("p", 0.5, interval=0.01)


def test_run(client, fake):
    fake.answers = {
        "POST /prompt": [(200, {"prompt_id": "p", "number": 1, "node_errors": {}})],
        "GET /history/p": [_history(_entry("success"))],
    }
    assert client.run(PROMPT, 10)["status"]["completed"]
