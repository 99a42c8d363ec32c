"""Feeds a worker's steps: their micro-batches, those of the next step made while this one's gradients travel.

What is made ahead is cache, never state: a step that comes otherwise than expected makes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from elastic_trainer.data.batch_plan import MicroBatchPlan, steps_digest
from elastic_trainer.data.dataset import Columns
from elastic_trainer.data.engine import DataEngine
from elastic_trainer.errors import TaskError
from elastic_trainer.training.batches import Batch, Collate, Rows, make_batch
from elastic_trainer.training.device import BatchCopies
from elastic_trainer.training.randomness import stream


@dataclass
class StepWork:
    """What a worker does at a step: its micro-batches with their random streams; number and digest of the samples."""

    step: int
    logical_ranks: range
    planned: list[MicroBatchPlan]
    streams: list[int]
    samples: int
    digest: int
    made: dict[int, Batch] = field(default_factory=dict)  # ahead, by place in `planned`


class Feed:
    """Makes batches from the rows that a data engine serves.

    Args:
        engine: Serves the rows.
        seed: Of the run's random streams.
        collate: The task's, or None. Its batches are never made ahead: it may draw from the micro-batch's own random
            stream, and what it raises belongs to that step.
        device: Where the batches shall be.
    """

    def __init__(self, engine: DataEngine, seed: int, collate: Collate | None, device: torch.device) -> None:
        self._engine = engine
        self._seed = seed
        self._collate = collate
        self._copies = BatchCopies(device)
        self._ahead: StepWork | None = None

    def begin(self, step: int, logical_ranks: range) -> StepWork:
        """What these logical ranks do at `step`; its data is on its way."""
        self._engine.begin(step, logical_ranks)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.step, ahead.logical_ranks) == (step, logical_ranks):
            return ahead
        return self._work(step, logical_ranks)

    def batch(self, work: StepWork, place: int, check: Callable[[], None]) -> Batch:
        """The micro-batch at a place of the plan; may be asked for once.

        Raises:
            DataError, StorageError: As `DataEngine.data_of`.
            TaskError: Its rows cannot be stacked.
        """
        made = work.made.pop(place, None)
        if made is not None:
            return self._copies.on_device(made)
        planned = work.planned[place]
        return self.make(planned, self._engine.data_of(planned, check))

    def make(self, planned: MicroBatchPlan, data: Rows | Columns) -> Batch:
        """A batch on the device, of rows or columns.

        Raises:
            TaskError: The rows cannot be stacked.
        """
        return self._copies.on_device(self._on_host(planned, data))

    def look_ahead(self, step: int, logical_ranks: range) -> None:
        """Make what can be made of a step without waiting for data."""
        work = self._work(step, logical_ranks)
        self._ahead = work
        if self._collate is not None:
            return
        for place, planned in enumerate(work.planned):
            if self._engine.has(planned):
                try:
                    work.made[place] = self._on_host(planned, self._engine.data_of(planned))
                except TaskError:
                    return  # the step itself will say so

    @property
    def wait_s(self) -> float:
        """Seconds that this worker has waited for data."""
        return self._engine.wait_s

    def close(self) -> None:
        """Nothing more is wanted."""
        self._engine.close()

    def _on_host(self, planned: MicroBatchPlan, data: Rows | Columns) -> Batch:
        return self._copies.pinned(make_batch(planned, data, self._collate, self._engine.plan.fixed_shapes))

    def _work(self, step: int, logical_ranks: range) -> StepWork:
        planned = list(self._engine.plan.of_rank(step, logical_ranks))
        streams = [stream(self._seed, step, each.logical_rank, each.index) for each in planned]
        samples = sum(each.rows for each in planned)
        digest = steps_digest(step, np.concatenate([each.ids[: each.rows] for each in planned])) if planned else 0
        return StepWork(step, logical_ranks, planned, streams, samples, digest)
