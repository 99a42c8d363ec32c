"""How a step's work falls on data ranks and micro-batches: ranges of logical ranks, constant shapes, short ends.

Pure: no I/O, no clock. Laws: tests/data/test_batch_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from elastic_trainer.data.order import Ids, SampleOrder, Words, key, mix_array


@dataclass(frozen=True)
class MicroBatchPlan:
    """One forward-backward: which samples, by which logical rank.

    `ids` holds real samples first; `rows` of them are real. Only a task with fixed shapes gets more ids than rows: the
    first samples again, to be given weight 0.
    """

    step: int
    logical_rank: int
    index: int
    ids: Ids
    rows: int


@dataclass(frozen=True)
class BatchPlan:
    """The work of every step: `global_batch == logical_ranks * micro_batch * accumulate`."""

    order: SampleOrder
    micro_batch: int
    fixed_shapes: bool = False

    def __post_init__(self) -> None:
        if self.order.per_rank % self.micro_batch:
            raise ValueError(
                f"micro-batches of {self.micro_batch} do not divide a logical rank's {self.order.per_rank} samples"
            )

    def of_rank(self, step: int, logical_ranks: range) -> Iterator[MicroBatchPlan]:
        """The micro-batches that a data rank with these logical ranks does at `step`, in order; none without rows."""
        for logical_rank in logical_ranks:
            ids = self.order.ids(step, logical_rank)
            for index, low in enumerate(range(0, len(ids), self.micro_batch)):
                chosen = ids[low : low + self.micro_batch]
                rows = len(chosen)
                if self.fixed_shapes and rows < self.micro_batch:
                    chosen = np.resize(chosen, self.micro_batch)
                yield MicroBatchPlan(step, logical_rank, index, chosen, rows)


def range_of(rank: int, world_size: int, logical_ranks: int, shares: Sequence[int] = ()) -> range:
    """The contiguous logical ranks of a data rank: so many as `shares` says by rank.

    Without shares they are as even as can be, the first ranks taking one more.
    """
    if shares:
        return range(sum(shares[:rank]), sum(shares[: rank + 1]))
    base, more = divmod(logical_ranks, world_size)
    low = rank * base + min(rank, more)
    return range(low, low + base + (rank < more))


def steps_digest(step: int, ids: Ids) -> int:
    """64-bit digest of the samples trained at `step`: a sum, so that it can be reduced over ranks in any order."""
    salted: Words = ids.astype(np.uint64) ^ np.uint64(key(step))
    return int(mix_array(salted).sum(dtype=np.uint64))


def expected_digest(order: SampleOrder, step: int) -> int:
    """The digest that the whole group must reach at `step`."""
    epoch, window, j = order.window_of(step)
    return _window_digests(order, epoch, window, step - j)[j]


@lru_cache(maxsize=4)  # steps come in order, and a window's ids are worked out together
def _window_digests(order: SampleOrder, epoch: int, window: int, first_step: int) -> list[int]:
    spans = [order.span(epoch, window, logical_rank) for logical_rank in range(order.logical_ranks)]
    steps = -(-len(spans[0]) // order.per_rank)
    return [
        steps_digest(first_step + j, np.concatenate([s[j * order.per_rank : (j + 1) * order.per_rank] for s in spans]))
        for j in range(steps)
    ]


def evaluation_rows(samples: int, logical_rank: int, logical_ranks: int) -> range:
    """The contiguous evaluation rows of a logical rank, the same whatever the world size."""
    return range_of(logical_rank, logical_ranks, samples)


def choose_window(row_group: int, per_rank: int, global_batch: int, row_bytes: float, window_bytes: int) -> int:
    """K: enough steps that a span covers two row groups, as far as a window fits into `window_bytes`; at least 1."""
    wanted = -(-2 * row_group // per_rank)
    allowed = int(window_bytes // max(1.0, global_batch * row_bytes))
    return max(1, min(wanted, allowed))


def choose_micro_batch(global_batch: int, max_workers: int) -> int:
    """The largest micro-batch that still leaves four logical ranks for each worker, else 1."""
    for micro_batch in range(global_batch, 0, -1):
        if global_batch % micro_batch == 0 and global_batch // micro_batch >= 4 * max_workers:
            return micro_batch
    return 1


def choose_logical_ranks(global_batch: int, micro_batch: int, max_workers: int) -> int:
    """L: the smallest divisor of B / micro_batch that is at least 4 x max workers, else the largest."""
    slices = global_batch // micro_batch
    divisors = [d for d in range(1, slices + 1) if slices % d == 0]
    return next((d for d in divisors if d >= 4 * max_workers), divisors[-1])
