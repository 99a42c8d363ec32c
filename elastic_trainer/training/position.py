"""Where a worker's main thread is, for the thread beside it to tell: in which phase, and how long such stays last."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from elastic_trainer.control.events import TaskPhase, Whereabouts

PACE_OVER = 7  # stays in forward and backward: four slow ones tell, and three are chance
KEPT = 64  # stays of each phase: some ten steps, so that what was slow once does not count for good


class Position:
    """Written by the main thread, read by others; every stay is counted, so standing still can be told from work.

    Attributes:
        has_pace: Whether the time of forward and backward is that of their computation: not where a device does it.
    """

    def __init__(self) -> None:
        self.has_pace = True
        self._phase = TaskPhase.BUILD
        self._steps = 0
        self._mark = 0
        self._since = time.monotonic()
        self._stays: dict[TaskPhase, deque[float]] = {}

    @property
    def phase(self) -> TaskPhase:
        """The present one."""
        return self._phase

    def enter(self, phase: TaskPhase, steps: int | None = None) -> None:
        """Begin a stay; `steps` when another step begins."""
        now = time.monotonic()
        self._stays.setdefault(self._phase, deque(maxlen=KEPT)).append(now - self._since)
        self._since = now
        if steps is not None:
            self._steps = steps
        self._phase = phase
        self._mark += 1

    def look(self) -> Whereabouts:
        """Where it is now."""
        phase = self._phase
        ended = list(self._stays.get(phase, ()))
        losses = list(self._stays.get(TaskPhase.LOSS, ()))[-PACE_OVER:]
        pace_s = median(losses) if self.has_pace and len(losses) == PACE_OVER else 0.0
        return Whereabouts(phase, self._steps, self._mark, len(ended), max(ended, default=0.0), pace_s)
