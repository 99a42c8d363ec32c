"""Raylets instead of hosts, for where namespaces are refused: what needs a network of its own cannot be tried there."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from elastic_trainer.cluster.processes import command_of, kill_all, with_mark
from jobs.rig import END_S, Host, Rig

MARK = "ELASTIC_TRAINER_RAYLET"


class Raylet(Host):
    """One raylet with its workers; all of them share this machine's address and name."""

    def __init__(self, rig: Raylets, index: int) -> None:
        super().__init__(rig, index)
        self._refused = rig.refused
        self._mark = f"{rig.name}.{index}"
        self.name = socket.gethostname()
        self.address = "127.0.0.1"
        # the system's choice of ports: the defaults of several raylets are the same
        self.flags += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={_free_port()}"]
        self.flags += [f"--ray-client-server-port={_free_port()}"] if index == 0 else []

    def switch_on(self) -> None:
        self.had_fault = False

    def inside(self, command: list[str]) -> list[str]:
        return ["env", f"{MARK}={self._mark}", "RAY_AUTH_MODE=disabled", *command]

    def pids(self, role: str = "") -> list[int]:
        pids = [process.pid for process in with_mark(MARK, self._mark)]
        return sorted(pid for pid in pids if (command := command_of(pid)) and role in command)

    def power_off(self) -> None:
        self.had_fault = True
        if self.ray is not None:
            self.ray.kill()
            self.ray.wait()
            self.ray = None
        deadline = time.monotonic() + END_S
        while left := with_mark(MARK, self._mark):
            assert time.monotonic() < deadline, left
            kill_all(left, signal.SIGKILL)
            time.sleep(0.01)

    def announce_preemption(self) -> None:
        self.had_fault = True
        assert self.ray is not None
        os.kill(self.ray.pid, signal.SIGTERM)

    def heal(self) -> None:
        self.signal_all(signal.SIGCONT)

    def cut(self) -> None:
        self._cannot("cut off")

    def blip(self, seconds: float) -> None:
        self._cannot("cut off for a moment")

    def isolate(self) -> None:
        self._cannot("cut off from others")

    def cut_to(self, other: Host) -> None:
        self._cannot("cut off from one other")

    def slow(self, rate: str) -> None:
        self._cannot("slowed down")

    def _cannot(self, what: str) -> None:
        pytest.skip(f"a raylet on this machine's own network cannot be {what}: {self._refused}")


class Raylets(Rig):
    """A head without CPUs and `workers` raylets with one CPU each.

    Args:
        workers: Raylets beside the head.
        refused: Why there are no hosts, in words.
    """

    def __init__(self, workers: int, refused: str) -> None:
        self.refused = refused
        super().__init__(workers)
        self.address = f"127.0.0.1:{_free_port()}"

    def _make_host(self, index: int) -> Host:
        return Raylet(self, index)

    def _wire(self) -> None:
        pass

    def _clean_up(self) -> str:
        return f"grep -lszE '^{MARK}={self.name}[.]' /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -9"

    def _left(self) -> str:
        return "".join(f"{self.name}: {host.pids()}" for host in self.hosts if host.pids())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
