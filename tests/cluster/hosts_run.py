"""A run whose workers are on hosts that a test strikes, watched from outside."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.object_store import ObjectStore
from jobs.rig import Host, Rig
from tests.raylets import Raylets
from tests.rayrun import CommandRun, await_value

HOSTS = 3
STEP_S = 0.01  # of each micro-batch; some 50 ms a step
FAULTS = ("power_off", "cut", "freeze", "cut_to_head", "isolate", "slow", "stop_worker", "announce_preemption")


class HostsRun:
    """A run whose workers are on the rig's hosts."""

    def __init__(self, rig: Rig, command: CommandRun, folder: Path) -> None:
        self.rig = rig
        self.command = command
        self.folder = folder

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of done steps, by the time at which they were done."""
        store = ObjectStore(str(self.folder))
        lines = [line for line in read_stream(store.names("metrics"), store.read) if "step" in line]
        return sorted(lines, key=lambda line: line["done_at"])

    def await_step(self, step: int, within_s: float = 60.0) -> None:
        """Until that many done steps stand in the run's files, which get new lines every few seconds."""

        def look() -> bool | None:
            assert self.command.process.poll() is None, self.command.output
            return True if self.steps_done() >= step else None

        await_value(look, within_s, lambda: f"no step {step}:\n{self.command.output}\n{self.rig.logs()}")

    def steps_done(self) -> int:
        """By the run's files."""
        if not (self.folder / "metrics").exists():
            return 0
        return max((line["step"] + 1 for line in self.metrics()), default=0)

    def worker_on(self, host: Host) -> int:
        """The process of the worker there."""
        (pid,) = host.pids("ray::WorkerActor")
        return pid

    def hosts(self) -> list[Host]:
        """Those that have a worker."""
        return [host for host in self.rig.hosts if host.pids("ray::WorkerActor")]

    def await_loss_of(self, host: Host) -> None:
        """Until it is told that the host is gone: without power it is silent, while a raylet's sockets end with it."""
        is_raylet = isinstance(self.rig, Raylets)
        said = self.command.await_line("lost while" if is_raylet else "has said nothing", 10)
        assert is_raylet or host.name in said

    def strike(self, host: Host, fault: str) -> None:
        """One of `FAULTS`."""
        if fault == "cut_to_head":
            host.cut_to(self.rig.hosts[0])
        elif fault == "slow":
            host.slow("100mbit")
        elif fault == "isolate":
            for each in self.hosts()[:2]:
                each.isolate()
        elif fault == "stop_worker":
            for pid in host.pids("ray::WorkerActor"):
                os.kill(pid, signal.SIGSTOP)
        else:
            getattr(host, fault)()

    def finish(self, within_s: float = 120.0) -> dict[str, Any]:
        """The summary of the run that has done all its steps, with nothing lost, repeated or done again."""
        status = self.command.end(within_s)
        assert status == 0, self.command.output
        summary = self.command.summary()
        assert summary["status"] == "finished", summary
        redone = (summary["steps_redone"], summary["samples_missing"], summary["samples_repeated"])
        assert redone == (0, 0, 0), self.command.output
        return summary

    def longest_pause(self) -> float:
        """Seconds between two done steps that follow each other."""
        times = [line["done_at"] for line in self.metrics()]
        return max(later - earlier for earlier, later in pairwise(times))
