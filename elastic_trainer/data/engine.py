"""Serves a worker's micro-batches by position, a window ahead, whatever the spans come from.

What is prefetched and not consumed is cache, never state: a change of range or step drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.batch_plan import BatchPlan, MicroBatchPlan
from elastic_trainer.data.dataset import Columns, Named
from elastic_trainer.data.reader import Gathered

Row = dict[str, Any]
LOOK_UP_S = 0.05  # how late a wait for data may notice that its step was given up


class SpanName(NamedTuple):
    """The samples of one logical rank in a window."""

    epoch: int
    window: int
    logical_rank: int


@dataclass
class Span:
    """The rows of a span by position in it: as they were read when nothing was preprocessed, else rows.

    `problem` says in words what was found wrong with its making, and does not keep it from being trained.
    """

    gathered: Gathered | None
    rows: list[Row] | None
    problem: str = ""

    def take(self, places: NDArray[np.int64] | slice) -> list[Row] | Columns:
        """Rows as they were preprocessed, or columns when nothing was."""
        if self.gathered is not None:
            return self.gathered.take(places)
        assert self.rows is not None
        chosen = self.rows[places] if isinstance(places, slice) else [self.rows[place] for place in places]
        return [Named(row) for row in chosen]  # collate may change a row, and a step may come again


class SpanSource(Protocol):
    """What makes spans. `load` is called in `threads` threads, once for each span that is wanted."""

    threads: int

    def load(self, name: SpanName) -> Span:
        """The span; may take its time, until it is hurried."""

    def hurry(self, name: SpanName) -> None:
        """Training waits for this span now."""

    def follow(self, epoch: int, window: int, logical_ranks: range) -> None:
        """Training has come to this window, with these logical ranks."""

    def close(self) -> None:
        """Nothing more is wanted."""


class DataEngine:
    """Serves micro-batches by position.

    Args:
        plan: What each logical rank trains at a step.
        source: Makes the spans.
        note: Takes words for people.
    """

    def __init__(self, plan: BatchPlan, source: SpanSource, note: Callable[[str], None] = lambda text: None) -> None:
        self.plan = plan
        self._source = source
        self._note = note
        self._noted: set[str] = set()
        self._pool = ThreadPoolExecutor(source.threads, thread_name_prefix="prefetch")
        self._spans: dict[SpanName, Future[Span]] = {}
        self._lock = threading.Lock()
        self._fetched: tuple[int, int, range] | None = None  # window and range that `_spans` holds
        self.wait_s = 0.0  # how long `data_of` has waited since the engine was made

    def begin(self, step: int, logical_ranks: range) -> None:
        """Training has come to `step`, counted over the whole run, with these logical ranks: fetch what they need."""
        epoch, window, _ = self.plan.order.window_of(step)
        self._source.follow(epoch, window, logical_ranks)
        if self._fetched == (epoch, window, logical_ranks) and not any(map(_failed, self._spans.values())):
            return
        self._fetched = (epoch, window, logical_ranks)
        wanted = [SpanName(epoch, window, logical_rank) for logical_rank in logical_ranks]
        after = (epoch, window + 1) if window + 1 < self.plan.order.windows_per_epoch else (epoch + 1, 0)
        wanted += [SpanName(*after, logical_rank) for logical_rank in logical_ranks]
        with self._lock:
            for name in [name for name in self._spans if name not in wanted]:
                self._spans.pop(name).cancel()
            for name in wanted:
                if name not in self._spans or _failed(self._spans[name]):  # a repeated step reads again
                    self._spans[name] = self._pool.submit(self._source.load, name)

    def has(self, planned: MicroBatchPlan) -> bool:
        """Whether the data of a micro-batch is here."""
        future = self._spans.get(self._place_of(planned)[0])
        return future is not None and future.done() and not _failed(future)

    def data_of(self, planned: MicroBatchPlan, check: Callable[[], None] = lambda: None) -> list[Row] | Columns:
        """The rows or columns of a micro-batch of the step that was begun last, or of one that `has` data.

        Args:
            planned: The micro-batch.
            check: Called again and again while waiting for data; what it raises ends the wait.

        Raises:
            DataError: A data file is damaged.
            StorageError: The store of the data cannot be reached.
            Exception: Whatever the task's `preprocess` raised.
        """
        name, low = self._place_of(planned)
        span = self._wait(name, check)
        if planned.rows == len(planned.ids):
            return span.take(slice(low, low + planned.rows))
        return span.take(np.resize(np.arange(low, low + planned.rows), len(planned.ids)))

    def close(self) -> None:
        """Stop the threads."""
        self._source.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, name: SpanName, check: Callable[[], None]) -> Span:
        future = self._spans[name]
        if not future.done():
            start = time.perf_counter()
            self._source.hurry(name)
            try:
                while not wait([future], LOOK_UP_S).done:
                    check()
            finally:
                self.wait_s += time.perf_counter() - start
        span = future.result()
        if span.problem and span.problem not in self._noted:
            self._noted.add(span.problem)
            self._note(span.problem)
        return span

    def _place_of(self, planned: MicroBatchPlan) -> tuple[SpanName, int]:
        """Its span, and where in that it begins."""
        epoch, window, j = self.plan.order.window_of(planned.step)
        low = j * self.plan.order.per_rank + planned.index * self.plan.micro_batch
        return SpanName(epoch, window, planned.logical_rank), low


def _failed(future: Future[Span]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
