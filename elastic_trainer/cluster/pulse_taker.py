"""How the workers of a node are, looked at again and again through /proc: stopped, busy, or asleep."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from elastic_trainer.cluster.processes import ProcessId, descendants, look_at
from elastic_trainer.control.events import Pulse, TaskPhase, Whereabouts
from elastic_trainer.vocabulary import Worker

OVER_S = 1.0  # looks of the last second say whether a process is busy
BUSY_SHARE = 0.2  # of one core: what watches a process that sleeps uses a few percent
STANDS_S = 1.0  # from when on its children are looked at too: a compiler works in processes of its own


@dataclass
class _Watched:
    where: Whereabouts | None = None
    told_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)
    looks: deque[tuple[float, str, float]] = field(default_factory=deque)  # when, state, CPU seconds
    with_children: bool = False
    children: list[ProcessId] = field(default_factory=list)
    children_at: float = 0.0


class PulseTaker:
    """Looks at processes and remembers a second of it."""

    def __init__(self) -> None:
        self._watched: dict[Worker, _Watched] = {}

    def told(self, worker: Worker, where: Whereabouts) -> None:
        """Where a worker says that its main thread is."""
        watched = self._watched.setdefault(worker, _Watched())
        watched.told_at = time.monotonic()
        if watched.where is None or watched.where.mark != where.mark:
            watched.moved_at = time.monotonic()
        watched.where = where

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        self._watched.pop(worker, None)

    def take(self, processes: dict[Worker, ProcessId]) -> tuple[Pulse, ...]:
        """Of every worker whose process lives."""
        now = time.monotonic()
        return tuple(
            pulse for worker, process in processes.items() if (pulse := self._of(worker, process, now)) is not None
        )

    def _of(self, worker: Worker, process: ProcessId, now: float) -> Pulse | None:
        watched = self._watched.setdefault(worker, _Watched())
        is_idle = watched.where is not None and watched.where.phase is TaskPhase.WAIT
        with_children = now - watched.moved_at > STANDS_S and not is_idle
        if with_children and now - watched.children_at > STANDS_S:  # a look at every process of the machine
            children, watched.children_at = descendants(process.pid), now
            if children != watched.children:
                watched.children = children
                watched.looks.clear()  # sums over other processes cannot be compared
        look = look_at([process, *watched.children] if with_children else [process])
        if look is None:
            return None
        if with_children != watched.with_children:
            watched.with_children = with_children
            watched.looks.clear()
        watched.looks.append((now, look.state, look.cpu_s))
        while now - watched.looks[0][0] > OVER_S:
            watched.looks.popleft()
        return Pulse(worker, watched.where, now - watched.told_at, look.state == "T", _is_busy(watched.looks))


def _is_busy(looks: deque[tuple[float, str, float]]) -> bool:
    """Whether it used the CPU, wanted it, or waited for a disk; as long as too little is known, it did."""
    (first, _, before), (last, _, after) = looks[0], looks[-1]
    if last - first < OVER_S / 2:
        return True
    wants = sum(state in "RD" for _, state, _ in looks)
    return 2 * wants >= len(looks) or after - before >= BUSY_SHARE * (last - first)
