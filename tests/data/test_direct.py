from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from elastic_trainer.data.batch_plan import BatchPlan, MicroBatchPlan
from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import DataEngine
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.reader import DatasetReader


@pytest.fixture
def parts(dataset: str) -> tuple[DatasetReader, BatchPlan]:
    reader = DatasetReader(dataset)
    order = SampleOrder(reader.index.rows, reader.index.row_group, 24, 12, 3, 7)
    return reader, BatchPlan(order, 2)


def micro_batches(engine: DataEngine, step: int, ranks: range) -> list[tuple[MicroBatchPlan, Any]]:
    engine.begin(step, ranks)
    return [(planned, engine.data_of(planned)) for planned in engine.plan.of_rank(step, ranks)]


def engine_of(parts: tuple[DatasetReader, BatchPlan], preprocess: Any = None) -> DataEngine:
    reader, plan = parts
    return DataEngine(plan, DirectSource(reader, plan.order, preprocess))


def collected(engine: DataEngine, steps: range, ranges: list[range]) -> list[tuple[int, int, list[float]]]:
    found = []
    for step in steps:
        for each in ranges:
            for planned, data in micro_batches(engine, step, each):
                values = data["y"].tolist() if isinstance(data, dict) else [row["y"] for row in data]
                found.append((step, planned.logical_rank, values))
    engine.close()
    return found


def test_any_split_and_any_start_serve_the_same_rows(parts: tuple[DatasetReader, BatchPlan]) -> None:
    _reader, _plan = parts
    whole = collected(engine_of(parts), range(50), [range(12)])
    split = collected(engine_of(parts), range(50), [range(5), range(5, 7), range(7, 12)])
    late = collected(engine_of(parts), range(31, 50), [range(12)])

    assert split == whole
    assert late == [each for each in whole if each[0] >= 31]


def test_rows_are_those_of_the_planned_ids(parts: tuple[DatasetReader, BatchPlan]) -> None:
    reader, _plan = parts
    engine = engine_of(parts)

    for step in (0, 21, 22):
        for planned, data in micro_batches(engine, step, range(12)):
            assert isinstance(data, dict)
            assert (data["number"] == reader.rows(planned.ids)["number"]).all()
    engine.close()


def test_preprocess_gets_randomness_of_its_own_sample(parts: tuple[DatasetReader, BatchPlan]) -> None:
    _reader, _plan = parts

    def preprocess(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"y": row["y"] + rng.random()}

    whole = collected(engine_of(parts, preprocess), range(25), [range(12)])
    split = collected(engine_of(parts, preprocess), range(25), [range(1), range(1, 12)])
    plain = collected(engine_of(parts), range(25), [range(12)])

    assert split == whole
    drawn = [a - b for one, other in zip(whole, plain, strict=True) for a, b in zip(one[2], other[2], strict=True)]
    assert len({round(value, 9) for value in drawn}) == len(drawn)


def test_an_exception_in_preprocess_reaches_the_step_and_may_be_tried_again(
    parts: tuple[DatasetReader, BatchPlan],
) -> None:
    _reader, _plan = parts
    is_broken = threading.Event()
    is_broken.set()

    def preprocess(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if is_broken.is_set():
            raise ValueError("bad row")
        return row

    engine = engine_of(parts, preprocess)
    with pytest.raises(ValueError, match="bad row"):
        micro_batches(engine, 0, range(2))
    is_broken.clear()
    assert len(micro_batches(engine, 0, range(2))) == 2
    engine.close()


def test_a_span_is_read_ahead(parts: tuple[DatasetReader, BatchPlan]) -> None:
    _reader, _plan = parts
    engine = engine_of(parts)
    micro_batches(engine, 0, range(12))
    for future in engine._spans.values():
        future.result(10)
    before = engine.wait_s

    micro_batches(engine, 3, range(12))  # the next window

    assert engine.wait_s == before
    engine.close()
