"""A real S3 server on loopback (SeaweedFS, from the extra `dev`), for benchmarks and tests."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import s3fs

KEY, SECRET, BUCKET = "test-key", "test-secret-0123456789", "runs"
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
START_S = 60.0  # half a second on an idle machine


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
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
                env=_bare_environment(),
                preexec_fn=_end_with_owner,
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
        """Options of fsspec to reach it, directly or by way of a proxy's port."""
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


def _end_with_owner() -> None:
    # a test run that is killed outright must leave no server behind
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
