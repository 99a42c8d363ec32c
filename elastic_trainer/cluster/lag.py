"""How long an event loop was held up: by a call that blocks, or by a machine that stood still."""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.05
LEAST_S = 0.1  # what a loaded machine costs all the time is nobody's excuse


class Lag:
    """Counts the time in which the loop that runs `watch()` did nothing else."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._late_s = 0.0

    async def watch(self) -> None:
        """Look again and again; ends with the loop."""
        while True:
            self._look()
            self._at = time.monotonic()
            await asyncio.sleep(TICK_S)

    def take(self) -> float:
        """Seconds in which the loop was held up since they were last taken, this moment's included."""
        self._look()
        late_s, self._late_s = self._late_s, 0.0
        return late_s

    def _look(self) -> None:
        late_s = time.monotonic() - self._at - TICK_S
        if late_s >= LEAST_S:
            self._late_s += late_s
            self._at += late_s
