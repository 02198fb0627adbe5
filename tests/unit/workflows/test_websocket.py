"""workflows/comfy_client/websocket.py against the bytes of a server."""

import io
import socket
import threading
import time

import pytest


@pytest.fixture
def websocket(comfy_client):
    return comfy_client.websocket


@pytest.fixture
def pair(websocket):
    """(our end, the server's bare socket)."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    connection = websocket.WebSocket(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def frames_from(theirs, fake_comfy, count):
    file = theirs.makefile("rb")
    return [fake_comfy.read_frame(file) for _ in range(count)]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 1_000_003])
def test_message_of_every_length_form(pair, fake_comfy, size):
    connection, theirs = pair
    payload = b"ab" * (size // 2) + b"c" * (size % 2)
    data = fake_comfy.frame(fake_comfy.TEXT, payload) + fake_comfy.frame(fake_comfy.BINARY, payload)
    thread = threading.Thread(target=theirs.sendall, args=(data,))
    thread.start()
    assert connection.receive(5) == payload.decode()
    assert connection.receive(5) == payload
    thread.join()


def test_fragments_with_pings_between(pair, fake_comfy):
    connection, theirs = pair
    payload = ("a\u00e9\u4e2d" * 50_000).encode()  # pieces end within characters
    data = fake_comfy.fragments(fake_comfy.TEXT, payload, 7)
    thread = threading.Thread(target=theirs.sendall, args=(data,))
    thread.start()
    assert connection.receive(5) == payload.decode()
    thread.join()
    assert frames_from(theirs, fake_comfy, 6) == [(fake_comfy.PONG, b"between")] * 6


def test_a_frame_may_come_in_any_pieces(pair, fake_comfy):
    connection, theirs = pair
    data = fake_comfy.frame(fake_comfy.TEXT, b"x" * 130)
    for index in range(len(data)):
        assert connection.receive(0) is None
        theirs.sendall(data[index : index + 1])
    assert connection.receive(5) == "x" * 130


def test_receive_waits_no_longer_than_asked(pair):
    connection, _ = pair
    start = time.monotonic()
    assert connection.receive(0.05) is None
    assert 0.04 < time.monotonic() - start < 2


def test_close_of_the_server(pair, websocket, fake_comfy):
    connection, theirs = pair
    theirs.sendall(fake_comfy.frame(fake_comfy.CLOSE, b"\x03\xe9going away"))
    with pytest.raises(websocket.WebSocketError, match=r"closed by the server \(code 1001, going"):
        connection.receive(5)
    assert frames_from(theirs, fake_comfy, 1) == [(fake_comfy.CLOSE, b"\x03\xe9")]


def test_close_of_ours(pair, fake_comfy):
    connection, theirs = pair
    connection.close()
    assert frames_from(theirs, fake_comfy, 1) == [(fake_comfy.CLOSE, b"\x03\xe8")]
    connection.close()


def test_end_within_a_frame(pair, websocket, fake_comfy):
    connection, theirs = pair
    theirs.sendall(fake_comfy.frame(fake_comfy.TEXT, b"x" * 300)[:100])
    theirs.close()
    with pytest.raises(websocket.WebSocketError, match="closed without a goodbye"):
        connection.receive(5)


def frame_start(*numbers):
    return bytes(numbers)


@pytest.mark.parametrize(
    ("data", "why", "code"),
    [
        (frame_start(0xC1, 1, 65), "reserved bits", 1002),
        (frame_start(0x81, 0x81, 0, 0, 0, 0, 65), "is masked", 1002),
        (frame_start(0x09, 0), "control frame", 1002),
        (frame_start(0x89, 126, 0, 126), "control frame", 1002),
        (frame_start(0x80, 1, 65), "out of order", 1002),
        (frame_start(0x01, 1, 65, 0x81, 1, 65), "out of order", 1002),
        (frame_start(0x83, 1, 65), "unknown opcode 3", 1002),
        (frame_start(0x81, 1, 0xFF), "not UTF-8", 1007),
        (frame_start(0x82, 127, 0, 0, 0, 1, 0, 0, 0, 0), "longer than", 1009),
    ],
)
def test_breaches_of_the_protocol_end_it(pair, websocket, fake_comfy, data, why, code):
    connection, theirs = pair
    theirs.sendall(data)
    with pytest.raises(websocket.WebSocketError, match=f"protocol error: .*{why}"):
        connection.receive(5)
    assert frames_from(theirs, fake_comfy, 1) == [(fake_comfy.CLOSE, code.to_bytes(2, "big"))]


def test_fragments_add_up_to_the_limit(pair, websocket, fake_comfy, monkeypatch):
    monkeypatch.setattr(websocket, "MAX_MESSAGE_BYTES", 100)
    connection, theirs = pair
    theirs.sendall(fake_comfy.frame(fake_comfy.TEXT, b"x" * 100))
    assert connection.receive(5) == "x" * 100
    theirs.sendall(fake_comfy.frame(fake_comfy.TEXT, b"x" * 60, final=False))
    theirs.sendall(fake_comfy.frame(0, b"x" * 41))
    with pytest.raises(websocket.WebSocketError, match="longer than 100 bytes"):
        connection.receive(5)


def test_silence_is_asked_about_once_and_then_the_end(pair, websocket, fake_comfy, monkeypatch):
    connection, theirs = pair
    monkeypatch.setattr(websocket, "PING_AFTER_S", 0.05)
    with pytest.raises(websocket.WebSocketError, match="no sign of life"):
        for _ in range(200):
            connection.receive(0.01)
    connection.close()
    assert [opcode for opcode, _ in frames_from(theirs, fake_comfy, 2)] == [
        fake_comfy.PING,
        fake_comfy.CLOSE,
    ]


def test_an_answer_ends_the_silence(pair, websocket, fake_comfy, monkeypatch):
    connection, theirs = pair
    monkeypatch.setattr(websocket, "PING_AFTER_S", 0.2)
    for _ in range(3):
        time.sleep(0.25)
        theirs.sendall(fake_comfy.frame(fake_comfy.PONG, b""))
        assert connection.receive(0.01) is None


# ---- the handshake


@pytest.fixture
def answering(comfy_client, websocket):
    """Connect to a server that answers the handshake with make(key); the request is kept."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests, open_ends = [], []

    def connect(make, timeout=5):
        def serve():
            end, _ = listener.accept()
            open_ends.append(end)
            data = b""
            while b"\r\n\r\n" not in data:
                data += end.recv(4096)
            head = data.decode()
            requests.append(head)
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            end.sendall(make(fields["Sec-WebSocket-Key"]))

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/comfy/"
        place = comfy_client.address.parse(url, ["X-Token: abc"], environ={})
        return websocket.connect(place, "me & you", timeout)

    yield connect, requests
    listener.close()
    for end in open_ends:
        end.close()


def good_answer(key):
    import base64
    import hashlib

    digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    accept = base64.b64encode(digest).decode()
    lines = ["HTTP/1.1 101 Switching", "upgrade: WebSocket", f"Sec-WebSocket-Accept: {accept}"]
    return "\r\n".join([*lines, "", ""]).encode()


def test_handshake_and_a_message_in_the_same_packet(answering, fake_comfy):
    connect, requests = answering
    connection = connect(lambda key: good_answer(key) + fake_comfy.frame(fake_comfy.TEXT, b"hi"))
    assert connection.receive(5) == "hi"
    connection.close()
    lines = requests[0].split("\r\n")
    assert lines[0] == "GET /comfy/ws?clientId=me%20%26%20you HTTP/1.1"
    assert {"Upgrade: websocket", "Sec-WebSocket-Version: 13", "X-Token: abc"} <= set(lines)


def test_handshake_key_is_the_one_of_the_rfc(websocket):
    """RFC 6455, 1.3: the example."""
    accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    head = f"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}"
    websocket._check_answer(head, "dGhlIHNhbXBsZSBub25jZQ==")
    with pytest.raises(websocket.WebSocketError, match="wrong Sec-WebSocket-Accept"):
        websocket._check_answer(head, "dGhlIHNhbXBsZSBub25jZR==")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda key: b"HTTP/1.1 401 Unauthorized\r\n\r\n", "does not open a websocket: .*401"),
        (lambda key: b"SSH-2.0-OpenSSH\r\n\r\n", "does not open a websocket: SSH"),
        (lambda key: good_answer(key + "x"), "wrong Sec-WebSocket-Accept"),
        (lambda key: good_answer(key).replace(b"WebSocket\r", b"h2c\r"), "does not upgrade"),
        (lambda key: b"HTTP/1.1 101 X\r\nA: " + b"x" * 70_000, "does not end"),
    ],
)
def test_handshake_refused(answering, websocket, answer, why):
    connect, _ = answering
    with pytest.raises(websocket.WebSocketError, match=why):
        connect(answer)


def test_handshake_without_an_answer(answering, websocket):
    connect, _ = answering
    with pytest.raises(websocket.WebSocketError, match="Timeout"):
        connect(lambda key: b"HTTP/1.1 101", timeout=0.1)


def test_nobody_listens(comfy_client, websocket):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    place = comfy_client.address.parse(f"127.0.0.1:{port}", environ={})
    with pytest.raises(websocket.WebSocketError, match="refused"):
        websocket.connect(place, "me")


def test_read_frame_of_the_tests_wants_a_mask(fake_comfy):
    with pytest.raises(AssertionError, match="mask"):
        fake_comfy.read_frame(io.BytesIO(fake_comfy.frame(fake_comfy.PING, b"x")))
