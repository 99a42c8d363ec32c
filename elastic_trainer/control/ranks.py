"""Who gets which rank in a new generation: survivors keep their order, newcomers follow.

Pure. Keeping the order keeps the ranges of logical ranks as close as their sizes allow, and so prefetched data useful.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_trainer.vocabulary import Worker


def assign(last_group: Sequence[Worker], ready: Collection[Worker], most: int) -> tuple[Worker, ...]:
    """The members of the next generation by rank, at most `most`."""
    survivors = [worker for worker in last_group if worker in ready]
    newcomers = sorted(worker for worker in ready if worker not in survivors)
    return tuple((survivors + newcomers)[:most])
