"""A proxy before a real S3 server that misbehaves on demand."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from jobs.benchmarks.s3server import SECRET, S3Server

__all__ = ["SECRET", "FaultProxy", "S3Server"]
LATE_S = 20.0  # below the 30 s that a call has
LINGER_RESET = b"\1\0\0\0\0\0\0\0"  # struct linger {1, 0}: close() sends a reset


class FaultProxy:
    """Passes bytes on unchanged, so that signatures stay valid, until told to misbehave.

    `plan(request_line)` is asked for each request and returns what becomes of it: "" to pass it on; "503" or "500" to
    answer so; "drop-before" to reset without the server hearing of it; "drop-after" to let the server act and reset
    instead of answering; "hang" to swallow it; "late" to pass it on after `LATE_S`; "truncate" to cut the answer short.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.plan: Callable[[str], str] = lambda line: ""
        self.requests: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> FaultProxy:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        try:
            while (head := _read_head(client)) is not None:
                line = head.split(b"\r\n", 1)[0].decode("latin-1")
                with self._lock:
                    self.requests.append(line)
                    fault = self.plan(line)
                if fault == "hang":
                    time.sleep(600)
                if fault == "late":
                    time.sleep(LATE_S)
                if fault == "drop-before":
                    return _reset(client)
                if b"expect: 100-continue" in head.lower():
                    head = b"\r\n".join(p for p in head.split(b"\r\n") if not p.lower().startswith(b"expect:"))
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = _read_exactly(client, _length(head))
                if fault in ("500", "503"):
                    client.sendall(_refusal(fault))
                    return None
                if server is None:
                    server = socket.create_connection(("127.0.0.1", self._target), 30)
                server.sendall(head + body)
                answer = _read_answer(server, line.startswith("HEAD"))
                if fault == "drop-after":
                    return _reset(client)
                if fault == "truncate":
                    client.sendall(answer[: max(1, len(answer) * 2 // 3)])
                    return _reset(client)
                client.sendall(answer)
        except OSError:
            return None
        finally:
            client.close()
            if server is not None:
                server.close()
        return None


def _read_head(source: socket.socket) -> bytes | None:
    head = b""
    while b"\r\n\r\n" not in head:
        byte = source.recv(1)
        if not byte:
            return None
        head += byte
    return head


def _read_exactly(source: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = source.recv(min(left, 1 << 20))
        if not part:
            raise OSError("closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def _read_answer(server: socket.socket, is_head: bool) -> bytes:
    head = _read_head(server)
    if head is None:
        raise OSError("closed")
    status = int(head.split(b" ", 2)[1])
    if status == 100:
        return _read_answer(server, is_head)
    if is_head or status in (204, 304):
        return head
    if b"transfer-encoding: chunked" in head.lower():
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += _read_exactly(server, 1)
        return head + body
    return head + _read_exactly(server, _length(head))


def _refusal(fault: str) -> bytes:
    body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
    if fault == "500":
        body = body.replace(b"SlowDown", b"InternalError")
    head = f"HTTP/1.1 {fault} No\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
    client.close()
