"""What a benchmark's workers leave behind for each done step, and what a pause is."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

NEAR = 6  # marks: a step that was nearly done may still be done after a fault, by some workers


@dataclass(frozen=True)
class Mark:
    """A step that a process has done."""

    at: float
    steps: int
    rank: int
    world: int
    total: float | None
    host: str
    pid: int


class Marks:
    """Appends a line for each done step of this process to `<folder>/<host>-<pid>.marks`."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / f"{socket.gethostname()}-{os.getpid()}.marks"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def done(self, steps: int, rank: int, world: int, model: nn.Module) -> None:
        """`steps` are done; each tenth time with a sum over the parameters, which must be alike on all ranks."""
        total = None
        if steps % 10 == 0:
            with torch.no_grad():
                total = float(sum(p.sum(dtype=torch.float64) for p in model.parameters()))
        line = {"at": time.monotonic(), "steps": steps, "rank": rank, "world": world, "sum": total}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read_marks(folder: str | Path) -> list[Mark]:
    """All done steps so far, by time; the clock is one for all hosts of a rig."""
    found = []
    for path in Path(folder).glob("*.marks"):
        host, _, pid = path.stem.rpartition("-")
        for line in path.read_text().split("\n")[:-1]:
            each = json.loads(line)
            found.append(
                Mark(each["at"], each["steps"], each["rank"], each["world"], each["sum"], host, int(pid)),
            )
    return sorted(found, key=lambda mark: mark.at)


def pause_after(marks: Sequence[Mark], at: float) -> tuple[float, int]:
    """The longest time without a done step around a moment, and how many done steps were done again after it."""
    times = [mark.at for mark in marks]
    first = next(i for i, moment in enumerate(times) if moment > at)
    last = min(len(times) - 1, first + NEAR)
    return _pause(marks, max(range(first, last + 1), key=lambda i: times[i] - times[i - 1]))


def pause_of_growth(marks: Sequence[Mark], world: int) -> tuple[float, int]:
    """The same, where the first step of so many workers was done."""
    return _pause(marks, next(i for i, mark in enumerate(marks) if mark.world == world))


def _pause(marks: Sequence[Mark], place: int) -> tuple[float, int]:
    before = max(mark.steps for mark in marks[:place])
    return marks[place].at - marks[place - 1].at, max(0, before - (marks[place].steps - 1))
