"""Who gets which rank in a new generation: survivors keep their order, newcomers follow.

Pure. Keeping the order keeps the ranges of logical ranks as close as their sizes allow, and so prefetched data useful.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from elastic_trainer.vocabulary import Worker


def assign(last_group: Sequence[Worker], ready: Collection[Worker], most: int) -> tuple[Worker, ...]:
    """The members of the next generation by rank, at most `most`."""
    survivors = [worker for worker in last_group if worker in ready]
    newcomers = sorted(worker for worker in ready if worker not in survivors)
    return tuple((survivors + newcomers)[:most])


def shares(slowness: Sequence[float], logical_ranks: int) -> tuple[int, ...]:
    """How many logical ranks each rank carries so that the last one is through as early as can be, at least one each.

    Args:
        slowness: How long each rank takes for one, in any unit.
        logical_ranks: At least as many as ranks.
    """
    found = [1] * len(slowness)
    through = [(2 * each, rank) for rank, each in enumerate(slowness)]  # when each would be with one more
    heapq.heapify(through)
    for _ in range(logical_ranks - len(slowness)):
        at, rank = heapq.heappop(through)
        found[rank] += 1
        heapq.heappush(through, (at + slowness[rank], rank))
    return tuple(found)
