"""The direct data engine: each worker reads and preprocesses its own spans, a window ahead, in a thread beside it.

What is prefetched and not consumed is cache, never state: a change of range or step drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.batch_plan import BatchPlan, MicroBatchPlan
from elastic_trainer.data.dataset import DatasetReader, Named
from elastic_trainer.data.order import Ids, key

Row = dict[str, Any]
Preprocess = Callable[[Row, np.random.Generator], Row]
SpanName = tuple[int, int, int]  # epoch, window, logical rank
LOOK_UP_S = 0.05  # how late a wait for data may notice that its step was given up
_PREPROCESS = 5  # separates preprocessing's random streams from the order's keys


class Span:
    """The rows of one logical rank in a window, by position in the span."""

    def __init__(self, ids: Ids, columns: dict[str, NDArray[np.generic]] | None, rows: list[Row] | None) -> None:
        self.ids = ids
        self._columns = columns
        self._rows = rows

    def take(self, places: NDArray[np.int64]) -> list[Row] | dict[str, NDArray[np.generic]]:
        """Rows as they were preprocessed, or columns when nothing was."""
        if self._columns is not None:
            return {name: values[places] for name, values in self._columns.items()}
        assert self._rows is not None
        return [Named(self._rows[place]) for place in places]  # collate may change a row, and a step may come again


class DirectEngine:
    """Serves micro-batches by position.

    Args:
        reader: Of the training data.
        plan: What each logical rank trains at a step.
        preprocess: The task's, or None. Gets a row and a generator that depends on (seed, epoch, sample) alone.
    """

    def __init__(self, reader: DatasetReader, plan: BatchPlan, preprocess: Preprocess | None = None) -> None:
        self._reader = reader
        self._plan = plan
        self._preprocess = preprocess
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._spans: dict[SpanName, Future[Span]] = {}
        self._lock = threading.Lock()
        self.wait_s = 0.0  # how long `micro_batches` has waited for data since the engine was made

    def micro_batches(
        self, step: int, logical_ranks: range, check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[MicroBatchPlan, list[Row] | dict[str, NDArray[np.generic]]]]:
        """The planned micro-batches of these logical ranks at `step`, each with its rows or columns.

        Args:
            step: Counted over the whole run.
            logical_ranks: Whose samples.
            check: Called again and again while waiting for data; what it raises ends the wait.

        Raises:
            DataError: A data file is damaged.
            Exception: Whatever the task's `preprocess` raised.
        """
        self._prefetch(step, logical_ranks)
        for planned in self._plan.of_rank(step, logical_ranks):
            epoch, window, j = self._plan.order.window_of(step)
            span = self._wait((epoch, window, planned.logical_rank), check)
            low = j * self._plan.order.per_rank + planned.index * self._plan.micro_batch
            places = low + np.arange(planned.rows, dtype=np.int64)
            yield planned, span.take(np.resize(places, len(planned.ids)))

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, name: SpanName, check: Callable[[], None]) -> Span:
        future = self._spans[name]
        if future.done():
            return future.result()
        start = time.perf_counter()
        try:
            while not wait([future], LOOK_UP_S).done:
                check()
            return future.result()
        finally:
            self.wait_s += time.perf_counter() - start

    def _prefetch(self, step: int, logical_ranks: range) -> None:
        epoch, window, _ = self._plan.order.window_of(step)
        wanted = [(epoch, window, logical_rank) for logical_rank in logical_ranks]
        after = (epoch, window + 1) if window + 1 < self._plan.order.windows_per_epoch else (epoch + 1, 0)
        wanted += [(*after, logical_rank) for logical_rank in logical_ranks]
        with self._lock:
            for name in [name for name in self._spans if name not in wanted]:
                self._spans.pop(name).cancel()
            for name in wanted:
                if name not in self._spans or _failed(self._spans[name]):  # a repeated step reads again
                    self._spans[name] = self._pool.submit(self._load, name)

    def _load(self, name: SpanName) -> Span:
        epoch, window, logical_rank = name
        ids = self._plan.order.span(epoch, window, logical_rank)
        columns = self._reader.rows(ids)
        if self._preprocess is None:
            return Span(ids, columns, None)
        rows = []
        for place, sample in enumerate(ids):
            row = Named({name: values[place] for name, values in columns.items()})
            rows.append(self._preprocess(row, self._random(epoch, int(sample))))
        return Span(ids, None, rows)

    def _random(self, epoch: int, sample: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=key(_PREPROCESS, self._plan.order.seed, epoch, sample)))


def _failed(future: Future[Span]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
