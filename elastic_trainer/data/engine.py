"""Serves a worker's micro-batches by position, a window ahead, whatever the spans come from.

What is prefetched and not consumed is cache, never state: a change of range or step drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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

    def take(self, places: NDArray[np.int64]) -> list[Row] | Columns:
        """Rows as they were preprocessed, or columns when nothing was."""
        if self.gathered is not None:
            return self.gathered.take(places)
        assert self.rows is not None
        return [Named(self.rows[place]) for place in places]  # collate may change a row, and a step may come again


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
        self._plan = plan
        self._source = source
        self._note = note
        self._noted: set[str] = set()
        self._pool = ThreadPoolExecutor(source.threads, thread_name_prefix="prefetch")
        self._spans: dict[SpanName, Future[Span]] = {}
        self._lock = threading.Lock()
        self.wait_s = 0.0  # how long `micro_batches` has waited for data since the engine was made

    def micro_batches(
        self, step: int, logical_ranks: range, check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[MicroBatchPlan, list[Row] | Columns]]:
        """The planned micro-batches of these logical ranks at `step`, each with its rows or columns.

        Args:
            step: Counted over the whole run.
            logical_ranks: Whose samples.
            check: Called again and again while waiting for data; what it raises ends the wait.

        Raises:
            DataError: A data file is damaged.
            StorageError: The store of the data cannot be reached.
            Exception: Whatever the task's `preprocess` raised.
        """
        self._prefetch(step, logical_ranks)
        for planned in self._plan.of_rank(step, logical_ranks):
            epoch, window, j = self._plan.order.window_of(step)
            span = self._wait(SpanName(epoch, window, planned.logical_rank), check)
            low = j * self._plan.order.per_rank + planned.index * self._plan.micro_batch
            places = low + np.arange(planned.rows, dtype=np.int64)
            yield planned, span.take(np.resize(places, len(planned.ids)))

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

    def _prefetch(self, step: int, logical_ranks: range) -> None:
        epoch, window, _ = self._plan.order.window_of(step)
        self._source.follow(epoch, window, logical_ranks)
        wanted = [SpanName(epoch, window, logical_rank) for logical_rank in logical_ranks]
        after = (epoch, window + 1) if window + 1 < self._plan.order.windows_per_epoch else (epoch + 1, 0)
        wanted += [SpanName(*after, logical_rank) for logical_rank in logical_ranks]
        with self._lock:
            for name in [name for name in self._spans if name not in wanted]:
                self._spans.pop(name).cancel()
            for name in wanted:
                if name not in self._spans or _failed(self._spans[name]):  # a repeated step reads again
                    self._spans[name] = self._pool.submit(self._source.load, name)


def _failed(future: Future[Span]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
