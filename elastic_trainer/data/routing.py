"""How spans are grouped for Ray Data, the same for whoever makes them and whoever takes them.

Pure: no I/O, no clock. Laws: tests/data/test_router.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.data.order import SampleOrder

GROUP_BYTES = 16 << 20  # of the spans that one task makes: a task costs some 10 ms besides
GROUP_WINDOWS = 4  # at most: what a task makes is there when all of it is


@dataclass(frozen=True)
class Routing:
    """Ray Data's share of a run.

    Args:
        cpus: For its tasks.
        ahead_bytes: How much may wait for its owners.
        row_bytes: Of a row of the data, on average.
    """

    cpus: int
    ahead_bytes: int
    row_bytes: float

    def group_of(self, order: SampleOrder) -> int:
        """Spans that one task makes: a divisor of a window's, or some whole windows."""
        span_bytes = max(1.0, order.window * order.per_rank * self.row_bytes)
        most = max(1, int(GROUP_BYTES // span_bytes))
        if most >= order.logical_ranks:
            return order.logical_ranks * min(GROUP_WINDOWS, most // order.logical_ranks)
        return max(each for each in range(1, most + 1) if order.logical_ranks % each == 0)
