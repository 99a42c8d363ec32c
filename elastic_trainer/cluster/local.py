"""A Ray cluster on this machine that belongs to the process that started it and ends with it.

Its raylets live in `cluster_process.py`; here is the owner's handle, which also connects the calling process to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

import ray
from ray._private import worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, without types
from ray.exceptions import RayError

from elastic_trainer.errors import ClusterError
from elastic_trainer.vocabulary import NAMESPACE

START_S = 120.0  # a cold disk and a busy machine were seen to take 20 s for three raylets
END_S = 15.0  # to kill some dozens of processes takes a tenth of a second, and longer where others have the cores


class LocalCluster:
    """A local Ray cluster of one or more raylets ("nodes"), with a token of its own.

    Args:
        nodes: Raylets to start; more than one only to try out what happens between machines.
        cpus_per_node: Logical CPUs of each node; by default what this process may use, shared out evenly, at least 1.
        object_store_bytes: Shared memory of each node.

    Use it as a context manager, or call `start()` and then `stop()`.
    """

    def __init__(
        self, nodes: int = 1, cpus_per_node: float | None = None, object_store_bytes: int = 150 * 1024 * 1024
    ) -> None:
        if nodes < 1:
            raise ValueError(f"LocalCluster(nodes={nodes}): a cluster has at least one node.")
        self.nodes = nodes
        self.cpus_per_node = cpus_per_node or max(1, len(os.sched_getaffinity(0)) // nodes)
        self.object_store_bytes = object_store_bytes
        self.address: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._folder: str | None = None
        self._environment: dict[str, str | None] = {}

    @property
    def is_running(self) -> bool:
        """Whether the cluster was started and its process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def temp_folder(self) -> str:
        """Where Ray keeps its logs while the cluster runs."""
        assert self._folder is not None, "the cluster is not running"
        return self._folder

    def start(self) -> LocalCluster:
        """Start the raylets and connect this process to them.

        Raises:
            ClusterError: This process is connected to a Ray cluster already, or the raylets did not come up.
        """
        if ray.is_initialized():
            raise ClusterError(
                "this process is connected to a Ray cluster already, and a run starts a cluster of its own. "
                "Call ray.shutdown() first."
            )
        # a Unix socket's path may have 107 characters, so the folder's own path has to be short
        self._folder = tempfile.mkdtemp(prefix="et-", dir="/tmp" if os.path.isdir("/tmp") else None)
        token = secrets.token_hex(32)
        try:
            self._enter_environment(
                {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": self._folder} | QUIET_RAY
            )
            _reread_authentication()
            self._process = self._spawn()
            self.address = self._await_address()
            _hush_raylets()
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                configure_logging=True,
                logging_level=logging.ERROR,
                log_to_driver=True,
            )
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the cluster with everything in it; returns when nothing of it is left."""
        try:
            if self._process is not None:
                if ray.is_initialized() and self.is_running:
                    with contextlib.suppress(Exception):
                        ray.shutdown()
                self._end_process(self._process)
                if ray.is_initialized():
                    with contextlib.suppress(Exception):
                        ray.shutdown()
        finally:
            self._process = None
            self.address = None
            self._leave_environment()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> subprocess.Popen[str]:
        # a session of its own: Ctrl-C in the owner's terminal must not reach the raylets before the owner has decided
        with open(os.path.join(self.temp_folder, "cluster_process.err"), "w") as errors:
            return self._popen(errors)

    def _popen(self, errors: TextIO) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic_trainer.cluster.cluster_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )

    def _await_address(self) -> str:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps({"node_args": self._node_args(), "folder": self._folder}) + "\n")
        process.stdin.flush()
        line = _readline_within(process, START_S)
        answer = json.loads(line) if line else {"error": self._why_silent(process)}
        if "error" in answer:
            raise ClusterError(f"the local Ray cluster of {self.nodes} node(s) did not start: {answer['error']}")
        return str(answer["address"])

    def _why_silent(self, process: subprocess.Popen[str]) -> str:
        if process.poll() is None:
            return f"no answer within {START_S:.0f} s"
        with open(os.path.join(self.temp_folder, "cluster_process.err")) as errors:
            return f"its process ended: {errors.read()[-2000:]}"

    def _node_args(self) -> list[dict[str, object]]:
        node: dict[str, object] = {
            "num_cpus": self.cpus_per_node,
            "object_store_memory": self.object_store_bytes,
            "include_dashboard": False,
        }
        return [dict(node) for _ in range(self.nodes)]

    def _end_process(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # end of file is the order to end
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _enter_environment(self, values: dict[str, str]) -> None:
        self._environment = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def _leave_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}
        _reread_authentication()


@contextlib.contextmanager
def join_cluster(address: str | None, *, sends_code: bool = False) -> Iterator[None]:
    """Be connected to a cluster that others have started; the connection that was there before stays.

    Args:
        address: `host:port`, `auto`, or None for the one that this process is connected to or `RAY_ADDRESS` names.
        sends_code: Send the working directory to the nodes, as `ray job submit --working-dir` does.

    Raises:
        ClusterError: There is none, or it refuses; says what to do.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    _check_reachable(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=True,
            runtime_env=_code_of_this_folder() if sends_code and IN_RAY_JOB not in os.environ else None,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise ClusterError(_why_not_joined(address, error)) from None
    _hush_raylets()
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray asks an address at which nobody answers for minutes, without a word."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        return  # auto, or another scheme
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"nobody answers at the cluster's address {address} ({error}). Check the address (`ray status` on its head "
            "tells it), the network, and that the cluster is up; `ray start --head` starts one."
        ) from None


REACH_S = 10.0  # a connection to another machine takes milliseconds
IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the driver of a submitted job, whose files it has sent
NOT_SENT = [".git", ".venv", "/runs", "/data", "*.arrow", "*.npz", "*.pt", "*.bin", "__pycache__"]


def _code_of_this_folder() -> dict[str, Any]:
    return {"working_dir": os.getcwd(), "excludes": NOT_SENT}


def _why_not_joined(address: str | None, error: Exception) -> str:
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "token" in text.lower() or "authenticat" in text.lower():
        return (
            f"the Ray cluster at {where} asks for a token: {first} Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH as they are on the cluster (by default ~/.ray/auth_token on its head)."
        )
    if "exceeds" in text and "size" in text.lower():
        return (
            f"the folder {os.getcwd()} is too large to be sent to the cluster's nodes: {first} Start from a folder "
            "that holds the task's code and not its data."
        )
    return (
        f"no Ray cluster can be joined at {where}: {first} Start one with `ray start --head`, or leave the address "
        "out. A cluster with token authentication (Ray's default) also needs RAY_AUTH_MODE=token and its "
        "RAY_AUTH_TOKEN here."
    )


QUIET_RAY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behaviour Ray is moving to; unset, it warns in every process
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
}


def _hush_raylets() -> None:
    # what workers print is the user's; the raylets' own paragraph about each killed worker says less than our news
    if not hasattr(ray_worker.print_to_stdstream, "is_hushed"):
        show = ray_worker.print_to_stdstream

        def show_workers(data: dict[str, Any], ignore_prefix: bool) -> None:
            if data.get("pid") != "raylet":
                show(data, ignore_prefix)

        show_workers.is_hushed = True  # type: ignore[attr-defined]
        ray_worker.print_to_stdstream = show_workers


def _reread_authentication() -> None:
    # Ray reads the mode and the token once, when it is imported; it has no public way to read them again
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _readline_within(process: subprocess.Popen[str], seconds: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""
