"""Operating-system processes seen through /proc: who descends from whom, who carries a mark, who is still the same.

A process is named by pid and start time, so that nothing here can hit a pid that was used again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessId(NamedTuple):
    """A process, for life: `start_ticks` is the kernel's start time in clock ticks since boot."""

    pid: int
    start_ticks: int


def this_process() -> ProcessId:
    """The calling process."""
    found = process_of(os.getpid())
    assert found is not None
    return found


def process_of(pid: int) -> ProcessId | None:
    """The process that has `pid` now, or None; a zombie counts as gone."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else ProcessId(pid, int(fields[19]))


def descendants(pid: int) -> list[ProcessId]:
    """Every process below `pid`, zombies left out."""
    children: dict[int, list[int]] = {}
    alive: dict[int, ProcessId] = {}
    for each in _all_pids():
        fields = _stat(each)
        if fields is None:
            continue
        children.setdefault(int(fields[1]), []).append(each)
        if fields[0] != "Z":
            alive[each] = ProcessId(each, int(fields[19]))
    found, todo = [], list(children.get(pid, ()))
    while todo:
        each = todo.pop()
        todo.extend(children.get(each, ()))
        if each in alive:
            found.append(alive[each])
    return found


def with_mark(name: str, value: str) -> list[ProcessId]:
    """Every process whose environment held `name=value` when it was started or forked.

    An environment mark survives what a process group or a session does not: `setsid`, double forks, re-parenting.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = wanted in file.read().split(b"\0")
        except OSError:
            continue
        process = process_of(pid) if marked else None
        if process is not None:
            found.append(process)
    return found


def command_of(pid: int) -> str:
    """Its command line, or the title that it gave itself; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_all(processes: Iterable[ProcessId], signum: signal.Signals = signal.SIGKILL) -> None:
    """Signal every one of `processes` that is still itself."""
    for process in processes:
        if process_of(process.pid) == process:
            try:
                os.kill(process.pid, signum)
            except ProcessLookupError:
                continue


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot, on this machine."""
    with open("/proc/vmstat") as file:
        counters = dict(line.split() for line in file)
    return int(counters.get("oom_kill", 0))


class Look(NamedTuple):
    """A process at one moment: the kernel's letter for its main thread's state, and its CPU time in seconds."""

    state: str
    cpu_s: float


def look_at(processes: Iterable[ProcessId]) -> Look | None:
    """The state of the first of `processes`, and the CPU time of all that live; None when the first does not."""
    state, ticks = "", 0
    for process in processes:
        fields = _stat(process.pid)
        is_itself = fields is not None and int(fields[19]) == process.start_ticks
        if fields is None or not is_itself:
            if not state:
                return None
            continue
        state = state or fields[0]
        ticks += int(fields[11]) + int(fields[12])
    return Look(state, ticks / _TICKS_PER_S)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the command's name may hold spaces and parentheses; the state follows the last one
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None
