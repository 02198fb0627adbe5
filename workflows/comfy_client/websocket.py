"""The client's half of the WebSocket protocol, RFC 6455, on a blocking socket.

No extensions and no subprotocols. One thread: receive() returns after its timeout with whatever
part of a frame has come kept for the next call.
"""

import base64
import contextlib
import hashlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from urllib.parse import quote

from .address import Address

_ACCEPT_KEY = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_MAX_HANDSHAKE_BYTES = 64 * 1024
# Previews of a whole video are some MB; what is larger is no message of ComfyUI's.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A connection that a router has forgotten looks like a silent one: ask after this long.
PING_AFTER_S = 30.0


class WebSocketError(Exception):
    """The connection can't be opened, or is over. The text says why."""


class WebSocket:
    """An open connection; make one with connect().

    Not for several threads.
    """

    def __init__(self, sock: socket.socket, received: bytes = b""):
        self._socket = sock
        self._buffer = bytearray(received)  # what has come and is not taken
        self._parts = bytearray()  # the fragments of an unfinished message
        self._kind: int | None = None  # what that message is
        self._heard = time.monotonic()
        self._asked = False

    def receive(self, timeout: float) -> str | bytes | None:
        """The next message, or None if none has come within `timeout` seconds.

        Raises:
            WebSocketError: the connection is over, or the peer breaks the protocol.
        """
        deadline = time.monotonic() + timeout
        while True:
            frame = self._take_frame()
            if frame is None:
                if not self._fill(deadline - time.monotonic()):
                    self._check_silence()
                    return None
                continue
            message = self._take_message(*frame)
            if message is not None:
                return message

    def close(self) -> None:
        """Say goodbye and close, without waiting for an answer."""
        with contextlib.suppress(OSError, WebSocketError):
            self._send(_CLOSE, struct.pack(">H", 1000))
        self._socket.close()

    def _take_frame(self) -> tuple[bool, int, bytes] | None:
        """(final, opcode, payload) of the next whole frame in the buffer, or None."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1] & 0x7F
        if buffer[0] & 0x70:
            self._fail(1002, "reserved bits are set, but no extension was agreed on")
        if buffer[1] & 0x80:
            self._fail(1002, "a frame of the server is masked")
        if opcode >= _CLOSE and (size > 125 or not final):
            self._fail(1002, "a control frame is long or fragmented")
        start = 2
        if size >= 126:
            length = struct.Struct(">H" if size == 126 else ">Q")
            start += length.size
            if len(buffer) < start:
                return None
            (size,) = length.unpack_from(buffer, 2)
        if size + len(self._parts) > MAX_MESSAGE_BYTES:
            self._fail(1009, f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
        if len(buffer) < start + size:
            return None
        payload = bytes(memoryview(buffer)[start : start + size])
        del buffer[: start + size]
        return final, opcode, payload

    def _take_message(self, final: bool, opcode: int, payload: bytes) -> str | bytes | None:
        """The message that this frame completes, or None. Control frames are answered."""
        if opcode == _PING:
            self._send(_PONG, payload)
            return None
        if opcode == _PONG:
            return None
        if opcode == _CLOSE:
            code = struct.unpack(">H", payload[:2])[0] if len(payload) >= 2 else 1005
            with contextlib.suppress(WebSocketError):
                self._send(_CLOSE, payload[:2])
            self._socket.close()
            reason = payload[2:].decode("utf-8", "replace")
            raise WebSocketError(f"closed by the server (code {code}{reason and ', '}{reason})")
        if opcode not in (_CONTINUATION, _TEXT, _BINARY):
            self._fail(1002, f"unknown opcode {opcode}")
        if (opcode == _CONTINUATION) != (self._kind is not None):
            self._fail(1002, "fragments are out of order")
        if opcode != _CONTINUATION:
            self._kind = opcode
        self._parts += payload
        if not final:
            return None
        kind, data = self._kind, bytes(self._parts)
        self._kind, self._parts = None, bytearray()
        if kind == _BINARY:
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(1007, "a text message is not UTF-8")

    def _fill(self, timeout: float) -> bool:
        """Read what has come, waiting up to `timeout`; False if nothing has."""
        try:
            # 0 would make the socket non-blocking, and TLS then fails in another way.
            self._socket.settimeout(max(timeout, 0.001))
            data = self._socket.recv(256 * 1024)
        except TimeoutError:
            return False
        except OSError as error:
            raise WebSocketError(f"connection lost ({error})") from error
        if not data:
            raise WebSocketError("connection closed without a goodbye")
        self._buffer += data
        self._heard, self._asked = time.monotonic(), False
        return True

    def _check_silence(self) -> None:
        silence = time.monotonic() - self._heard
        if silence > 2 * PING_AFTER_S:
            raise WebSocketError(f"no sign of life for {silence:.0f} s")
        if silence > PING_AFTER_S and not self._asked:
            self._asked = True
            self._send(_PING, b"")

    def _send(self, opcode: int, payload: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        head = struct.pack("BB", 0x80 | opcode, 0x80 | len(payload))  # control frames: <= 125
        try:
            self._socket.settimeout(10.0)
            self._socket.sendall(head + mask + masked)
        except OSError as error:
            raise WebSocketError(f"connection lost ({error})") from error

    def _fail(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketError):
            self._send(_CLOSE, struct.pack(">H", code))
        self._socket.close()
        raise WebSocketError(f"protocol error: {reason}")


def connect(address: Address, client_id: str, timeout: float = 10.0) -> WebSocket:
    """Open <base path>/ws of a server. Goes to the server itself, through no proxy.

    Args:
        client_id: the id under which prompts are queued whose messages are wanted.
        timeout: seconds for all of it.

    Raises:
        WebSocketError: it can't be opened.
    """
    deadline = time.monotonic() + timeout
    sock = None
    try:
        sock = socket.create_connection((address.host, address.port), timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        context = address.tls()
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=address.host)
        key = base64.b64encode(os.urandom(16)).decode()
        target = f"{address.path}/ws?clientId={quote(client_id)}"
        sock.sendall(_request(address.host_header, target, key, address.headers))
        head, rest = _read_head(sock, deadline)
        _check_answer(head, key)
        return WebSocket(sock, rest)
    except (OSError, ssl.SSLError, WebSocketError) as error:
        if sock is not None:
            sock.close()
        if isinstance(error, WebSocketError):
            raise
        raise WebSocketError(f"{type(error).__name__}: {error}") from error


def _request(host: str, target: str, key: str, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _read_head(sock: socket.socket, deadline: float) -> tuple[str, bytes]:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer to the handshake")
        sock.settimeout(left)
        chunk = sock.recv(4096)
        if not chunk:
            raise WebSocketError("closed during the handshake")
        data += chunk
        if len(data) > _MAX_HANDSHAKE_BYTES:
            raise WebSocketError("the answer to the handshake does not end")
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _check_answer(head: str, key: str) -> None:
    first, *lines = head.split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/") or parts[1] != "101":
        raise WebSocketError(f"the server does not open a websocket: {first[:100]}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    wanted = base64.b64encode(hashlib.sha1((key + _ACCEPT_KEY).encode()).digest()).decode()
    if headers.get("sec-websocket-accept") != wanted:
        raise WebSocketError("the answer to the handshake has a wrong Sec-WebSocket-Accept")
    if headers.get("upgrade", "").lower() != "websocket":
        raise WebSocketError("the answer to the handshake does not upgrade to websocket")
