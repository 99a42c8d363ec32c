"""What happens to hosts, to our rivals: Ray Train 2.60, elastic from two to three workers, and torchft 0.2.0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.benchmarks.marks import Mark, pause_after, pause_of_growth, read_marks
from jobs.rig import Host, Rig

HOSTS = 3
BEFORE, AFTER = 30, 20  # steps
START_S, WITHIN_S = 120.0, 150.0  # Ray Train takes 72 s for a host that loses power
LIGHTHOUSE_PORT = 29510

Start = Callable[[Rig, Path], list[subprocess.Popen[bytes]]]


def ray_train(rig: Rig, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Its driver is on the head."""
    command = [sys.executable, "-m", "jobs.benchmarks.recovery_raytrain", str(folder), rig.address]
    return [_started(rig.hosts[0], folder, command)]


def torchft(python: str, settings: dict[str, Any]) -> Start:
    """A lighthouse on the head, and a replica group on each other host that is on."""

    def start(rig: Rig, folder: Path) -> list[subprocess.Popen[bytes]]:
        flags = [str(part) for name, value in settings["lighthouse"].items() for part in (f"--{name}", value)]
        address = f"{rig.hosts[0].address}:{LIGHTHOUSE_PORT}"
        lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", address, *flags]
        started = [_started(rig.hosts[0], folder, lighthouse)]
        return started + [torchft_group(host, folder, python, settings) for host in rig.hosts[1:] if host.pids()]

    return start


def torchft_group(host: Host, folder: Path, python: str, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """One replica group."""
    script = str(Path(__file__).parent / "recovery_torchft.py")
    own = json.dumps({name: settings[name] for name in ("manager", "group")})
    lighthouse = f"http://{host.head.address}:{LIGHTHOUSE_PORT}"
    return _started(host, folder, [python, script, str(folder), str(host.index), lighthouse, own, host.address])


def _started(host: Host, folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        settings = ["OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"]
        return host.start(["env", *settings, *command], stdout=log, stderr=log)


def pause_of_fault(rig: Rig, folder: Path, start: Start, fault: Callable[[Host], None]) -> tuple[float, int] | None:
    """Three train, one has the fault: the pause of the others and their steps done again; None: they never went on."""
    processes = start(rig, folder)
    try:
        _await(folder, lambda marks: _have_trained(marks, HOSTS), START_S)
        victim = rig.hosts[2]
        at = time.monotonic()
        fault(victim)
        others = lambda marks: [mark for mark in marks if mark.host != victim.name]  # noqa: E731
        went_on = lambda marks: len({m.steps for m in others(marks) if m.at > at + 0.05}) >= AFTER  # noqa: E731
        if not _await(folder, went_on, WITHIN_S):
            return None
        return pause_after(others(read_marks(folder)), at)
    finally:
        _end(rig, processes)


def pause_of_new_host(
    rig: Rig, folder: Path, start: Start, join: Callable[[Host], subprocess.Popen[bytes]] | None
) -> tuple[float, int] | None:
    """Two train, a host comes, and `join` starts what has to be started there."""
    new = rig.hosts[-1]
    new.power_off()
    rig.await_nodes(len(rig.hosts) - 1)
    processes = start(rig, folder)
    try:
        _await(folder, lambda marks: _have_trained(marks, HOSTS - 1), START_S)
        new.boot()
        if join is not None:
            rig.await_nodes(len(rig.hosts))
            processes.append(join(new))
        if not _await(folder, lambda marks: any(mark.world == HOSTS for mark in marks), WITHIN_S):
            return None
        return pause_of_growth(read_marks(folder), HOSTS)
    finally:
        _end(rig, processes)


def stop_trainer(host: Host) -> None:
    """SIGSTOP to what trains there."""
    for role in ("ray::TrainWorker", "ray::RayTrainWorker", "recovery_torchft"):
        for pid in host.pids(role):
            os.kill(pid, signal.SIGSTOP)


def _have_trained(marks: list[Mark], world: int) -> bool:
    full = [mark for mark in marks if mark.world == world]
    return len({mark.host for mark in full}) >= world and max(mark.steps for mark in full) >= BEFORE


def _await(folder: Path, holds: Callable[[list[Mark]], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds(read_marks(folder)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _end(rig: Rig, processes: list[subprocess.Popen[bytes]]) -> None:
    for role in ("recovery_raytrain", "recovery_torchft", "torchft_lighthouse"):
        for host in rig.hosts:
            for pid in host.pids(role):
                os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
