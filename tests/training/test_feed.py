"""Batches are the same whether they were made ahead or when they were needed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.data.batch_plan import BatchPlan, expected_digest
from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import DataEngine, Span, SpanName
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import TaskError
from elastic_trainer.training.feed import Feed

CPU = torch.device("cpu")


class Counted:
    """A source that counts, and can be held up."""

    threads = 1

    def __init__(self, inner: DirectSource) -> None:
        self._inner = inner
        self.may_load = threading.Event()
        self.may_load.set()

    def load(self, name: SpanName) -> Span:
        assert self.may_load.wait(20)
        return self._inner.load(name)

    def hurry(self, name: SpanName) -> None:
        pass

    def follow(self, epoch: int, window: int, logical_ranks: range) -> None:
        pass

    def close(self) -> None:
        pass


class Fed:
    def __init__(self, dataset: str, preprocess: Any = None, collate: Any = None) -> None:
        reader = DatasetReader(dataset)
        self.order = SampleOrder(reader.index.rows, reader.index.row_group, 24, 12, 3, 7)
        self.source = Counted(DirectSource(reader, self.order, preprocess))
        self.engine = DataEngine(BatchPlan(self.order, 2), self.source)
        self.feed = Feed(self.engine, 1, collate, CPU)

    def settle(self) -> None:
        for future in self.engine._spans.values():
            future.result(20)

    def step(self, step: int, ranks: range) -> list[tuple[list[int], list[float]]]:
        work = self.feed.begin(step, ranks)
        batches = [self.feed.batch(work, place, lambda: None) for place in range(len(work.planned))]
        return [(batch.sample_ids.tolist(), batch["y"].tolist()) for batch in batches]


@pytest.fixture
def fed(dataset: str) -> Any:
    made = []

    def make(**parts: Any) -> Fed:
        made.append(Fed(dataset, **parts))
        return made[-1]

    yield make
    for each in made:
        each.feed.close()


def test_what_is_made_ahead_is_what_the_step_would_have_made(fed: Any) -> None:
    ahead, plain = fed(), fed()
    for step in range(8):  # over borders of windows and of an epoch
        expected = plain.step(step, range(2, 5))
        assert ahead.step(step, range(2, 5)) == expected
        ahead.settle()
        ahead.feed.look_ahead(step + 1, range(2, 5))


def test_batches_made_ahead_are_used_once_and_a_repeated_step_gets_its_own(fed: Any) -> None:
    feed = fed()
    feed.step(0, range(3))
    feed.settle()
    feed.feed.look_ahead(1, range(3))
    work = feed.feed.begin(1, range(3))
    first = feed.feed.batch(work, 0, lambda: None)
    kept = first["y"].clone()
    first["y"].zero_()  # as a task may

    again = feed.feed.batch(feed.feed.begin(1, range(3)), 0, lambda: None)

    assert torch.equal(again["y"], kept)


def test_another_step_or_range_than_was_expected_makes_its_own(fed: Any) -> None:
    feed, plain = fed(), fed()
    feed.step(0, range(3))
    feed.settle()
    feed.feed.look_ahead(1, range(3))
    assert feed.step(1, range(6)) == plain.step(1, range(6))
    feed.feed.look_ahead(2, range(6))
    assert feed.step(1, range(6)) == plain.step(1, range(6))


def test_looking_ahead_does_not_wait_for_data(fed: Any) -> None:
    feed = fed()
    feed.source.may_load.clear()
    feed.feed.begin(0, range(3))
    feed.feed.look_ahead(0, range(3))
    assert feed.feed._ahead is not None
    assert feed.feed._ahead.made == {}
    feed.source.may_load.set()
    assert feed.step(0, range(3)) == fed().step(0, range(3))


def test_rows_that_cannot_be_stacked_are_told_at_their_own_step(fed: Any) -> None:
    def ragged(row: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {"y": np.zeros(1 + int(row["y"]) % 7)}

    feed = fed(preprocess=ragged)
    feed.feed.begin(0, range(3))
    feed.settle()
    feed.feed.look_ahead(1, range(3))
    with pytest.raises(TaskError, match="cannot be stacked"):
        feed.step(1, range(3))


def test_collate_is_never_called_ahead(fed: Any) -> None:
    calls = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        calls.append(len(rows))
        return {"y": torch.tensor([float(row["y"]) for row in rows], dtype=torch.float64)}

    feed = fed(collate=collate)
    feed.feed.begin(0, range(3))
    feed.settle()
    feed.feed.look_ahead(1, range(3))
    assert calls == []
    assert [values for _, values in feed.step(1, range(3))] == [values for _, values in fed().step(1, range(3))]


def test_the_parts_of_a_steps_digest_sum_to_the_groups(fed: Any) -> None:
    feed = fed()
    works = [feed.feed.begin(4, ranks) for ranks in (range(5), range(5, 12))]
    assert sum(work.digest for work in works) % 2**64 == expected_digest(feed.order, 4)
    assert sum(work.samples for work in works) == 24
