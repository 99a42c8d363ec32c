"""A worker's lines on their way to the controller: kept by every rank, sent by rank 0, dropped when acknowledged.

If rank 0 dies, the next rank 0 still has what was not acknowledged, so no done step is missing from the ledger.
"""

from __future__ import annotations

import threading
import time

from elastic_trainer.cluster.messages import Acknowledged
from elastic_trainer.observability.lines import Line, NoteLine, StepLine


class Outbox:
    """Thread-safe: the main thread records, main and control thread take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Line] = []
        self._sent = 0  # of `_kept`, from the front
        self.is_sender = False
        self.last_step_at = time.monotonic()

    def record(self, line: Line) -> None:
        """Keep a line."""
        with self._lock:
            self._kept.append(line)
            if isinstance(line, StepLine):
                self.last_step_at = time.monotonic()

    def take_all(self) -> tuple[Line, ...]:
        """Every line that is not acknowledged: where a group breaks up, this rank may be the only one that has it."""
        with self._lock:
            lines = tuple(self._kept)
            self._kept = [line for line in lines if not isinstance(line, NoteLine)]
            self._sent = len(self._kept) if self.is_sender else 0
            return lines

    def take(self) -> tuple[Line, ...]:
        """The lines to send now: all unsent ones on rank 0, a worker's own notes elsewhere."""
        with self._lock:
            unsent = self._kept[self._sent :]
            lines: list[Line] = [line for line in unsent if not isinstance(line, NoteLine)]
            self._kept = self._kept[: self._sent] + lines  # a note is sent once
            if self.is_sender:
                self._sent = len(self._kept)
                return tuple(unsent)
            return tuple(line for line in unsent if isinstance(line, NoteLine))

    def become(self, *, sender: bool) -> None:
        """Begin a generation as the rank that sends, or not; a new sender sends all that is not acknowledged."""
        with self._lock:
            if sender and not self.is_sender:
                self._sent = 0
            self.is_sender = sender

    def send_again(self) -> None:
        """The controller is another one, which knows only what stands in files: all that is not acknowledged is due."""
        with self._lock:
            self._sent = 0

    def acknowledge(self, known: Acknowledged) -> None:
        """Forget the lines of steps that are acknowledged, and what was recorded before them."""
        with self._lock:
            steps = ((i, line) for i, line in enumerate(self._kept) if isinstance(line, StepLine))
            last = max((i for i, s in steps if s.step < known.steps and s.token <= known.token), default=-1)
            self._kept = self._kept[last + 1 :]
            self._sent = max(0, self._sent - (last + 1))
