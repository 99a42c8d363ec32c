"""A real S3 server on loopback (SeaweedFS), and a proxy before it that misbehaves on demand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import s3fs

KEY, SECRET, BUCKET = "test-key", "test-secret-0123456789", "runs"
START_S = 60.0  # half a second on an idle machine
LINGER_RESET = b"\1\0\0\0\0\0\0\0"  # struct linger {1, 0}: close() sends a reset


class S3Server:
    """SeaweedFS in a process of its own; use as a context manager."""

    def __init__(self) -> None:
        self.port = 0

    def __enter__(self) -> S3Server:
        self._folder = tempfile.mkdtemp(prefix="et-s3-")
        identities = [
            {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]},
            {"name": "r", "credentials": [{"accessKey": "reader", "secretKey": SECRET}], "actions": ["Read", "List"]},
        ]
        Path(self._folder, "s3.json").write_text(json.dumps({"identities": identities}))
        ports = _free_ports(5)
        self.port = ports[0]
        command = [str(Path(sys.executable).parent / "weed"), "mini", f"-dir={self._folder}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", f"-s3.config={self._folder}/s3.json", "-admin.ui=false", "-webdav=false"]
        command += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={BUCKET}"]
        roles = ("s3", "master", "filer", "volume", "admin")
        for role, port in zip(roles, ports, strict=True):
            command += [f"-{role}.port={port}", f"-{role}.port.grpc={port + 10_000}"]
        with open(Path(self._folder, "log"), "w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self._folder, env=_bare_environment()
            )
        deadline = time.monotonic() + START_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no S3 server: {Path(self._folder, 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def options(self, port: int | None = None, **others: Any) -> dict[str, Any]:
        """fsspec's options to reach it, directly or by way of a proxy's port."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, **others}

    def url(self) -> str:
        """A prefix that nobody else uses."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"

    def _is_up(self) -> bool:
        try:
            fs = s3fs.S3FileSystem(**self.options(), skip_instance_cache=True)
            fs.pipe_file(f"{BUCKET}/up", b"x")
            return bool(fs.cat_file(f"{BUCKET}/up") == b"x")
        except Exception:
            return False


class FaultProxy:
    """Passes bytes on unchanged, so that signatures stay valid, until told to misbehave.

    `plan(request_line)` is asked for each request and returns what becomes of it: "" to pass it on; "503" or "500" to
    answer so; "drop-before" to reset without the server hearing of it; "drop-after" to let the server act and reset
    instead of answering; "hang" to swallow it; "truncate" to cut the answer short.
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


def _free_ports(count: int) -> list[int]:
    """Ports whose neighbours 10,000 above are free too: SeaweedFS takes them for its own talk."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            try:
                if port + 10_000 < 65_536 and port not in found:
                    high.bind(("127.0.0.1", port + 10_000))
                    found.append(port)
            except OSError:
                continue
    return found


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_"))}


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
