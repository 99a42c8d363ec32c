"""How spans are grouped for Ray Data, the same for whoever makes them and whoever takes them.

Pure: no I/O, no clock. Laws: tests/data/test_router.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.data.order import SampleOrder

GROUP_BYTES = 16 << 20  # of the spans that one task makes: a task costs some 10 ms besides


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
        """Spans that one task makes: a divisor of a window's; preprocess may make rows much larger than they were."""
        span_bytes = max(1.0, order.window * order.per_rank * self.row_bytes)
        most = max(1, int(GROUP_BYTES // span_bytes))
        return max(each for each in range(1, min(most, order.logical_ranks) + 1) if order.logical_ranks % each == 0)
