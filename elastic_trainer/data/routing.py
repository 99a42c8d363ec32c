"""How spans are grouped into the tasks of Ray Data, and how many may wait for their owners.

Pure: no I/O, no clock. Laws: tests/data/test_router.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.data.order import SampleOrder

GROUP_BYTES = 16 << 20  # of the spans that one task makes: a task costs some 10 ms besides
GROUPS_AHEAD = 8  # at least so many fit into what may wait
TOO_LARGE = 2  # times what a group should have: worth the second that an execution takes to begin anew


@dataclass(frozen=True)
class Routing:
    """Ray Data's share of a run.

    Args:
        cpus: For its tasks.
        ahead_bytes: How much may wait for its owners.
        row_bytes: Of a row of the data, on average, before it is preprocessed.
    """

    cpus: int
    ahead_bytes: int
    row_bytes: float

    def group_of(self, order: SampleOrder, ahead_bytes: int) -> int:
        """Spans that one task makes, as far as can be told from the data: a divisor of a window's."""
        span_bytes = order.window * order.per_rank * self.row_bytes
        return _divisor(order.logical_ranks, _allowed(ahead_bytes) / max(1.0, span_bytes))


def smaller_group(group: int, group_bytes: int, ahead_bytes: int) -> int:
    """The group to make instead of one that came to `group_bytes`: preprocess may make rows larger than they were.

    Returns:
        A divisor of `group`; itself unless that was much too large.
    """
    allowed = _allowed(ahead_bytes)
    if group_bytes <= TOO_LARGE * allowed:
        return group
    return _divisor(group, group * allowed / group_bytes)


def _allowed(ahead_bytes: int) -> int:
    return min(GROUP_BYTES, ahead_bytes // GROUPS_AHEAD)


def _divisor(number: int, most: float) -> int:
    return max(each for each in range(1, max(1, min(int(most), number)) + 1) if number % each == 0)
