"""The direct engine's spans: each worker reads and preprocesses its own, in threads beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from elastic_trainer.data.dataset import Named
from elastic_trainer.data.engine import Row, Span, SpanName
from elastic_trainer.data.order import SampleOrder, key
from elastic_trainer.data.reader import DatasetReader

Preprocess = Callable[[Row, np.random.Generator], Row]
_PREPROCESS = 5  # separates preprocessing's random streams from the order's keys


class DirectSource:
    """Makes spans in this process.

    Args:
        reader: Of the training data.
        order: Of its samples.
        preprocess: The task's, or None. Gets a row and a generator that depends on (seed, epoch, sample) alone.
    """

    def __init__(self, reader: DatasetReader, order: SampleOrder, preprocess: Preprocess | None = None) -> None:
        self._reader = reader
        self._order = order
        self._preprocess = preprocess
        self.threads = 2 if reader.is_remote else 1

    def load(self, name: SpanName) -> Span:
        """Read and preprocess a span."""
        ids = self._order.span(*name)
        gathered = self._reader.gather(ids)
        if self._preprocess is None:
            return Span(gathered, None)
        columns = gathered.take(slice(None))
        rows = [self._preprocess(row, rng) for row, rng in self._raw_rows(name.epoch, ids, columns)]
        return Span(None, rows, self._doubt(name, ids, columns, rows))

    def hurry(self, name: SpanName) -> None:
        """It is being loaded as fast as it can be."""

    def follow(self, epoch: int, window: int, logical_ranks: range) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is open."""

    def _raw_rows(self, epoch: int, ids: Any, columns: Any) -> Any:
        for place, sample in enumerate(ids):
            yield Named({n: values[place] for n, values in columns.items()}), self._random(epoch, int(sample))

    def _doubt(self, name: SpanName, ids: Any, columns: Any, rows: list[Row]) -> str:
        """Whether preprocess is deterministic is looked at, not believed: one row of each span is made twice."""
        if not rows or self._preprocess is None:
            return ""
        place = key(*name) % len(ids)
        one = {n: values[place : place + 1] for n, values in columns.items()}
        row, rng = next(iter(self._raw_rows(name.epoch, ids[place : place + 1], one)))
        if pickle.dumps(self._preprocess(row, rng)) == pickle.dumps(rows[place]):
            return ""
        return (
            "preprocess() made two different rows of one sample, so what is trained depends on chance. Take all "
            "randomness from the generator that it is given"
        )

    def _random(self, epoch: int, sample: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=key(_PREPROCESS, self._order.seed, epoch, sample)))
