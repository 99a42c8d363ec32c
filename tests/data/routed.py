"""A run's router, and what workers would be served by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from elastic_trainer.data.batch_plan import BatchPlan
from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import DataEngine, SpanName
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.data.routed import RoutedSource
from elastic_trainer.data.router import RouterSpec, router_name, start_router
from elastic_trainer.data.routing import Routing
from elastic_trainer.vocabulary import NAMESPACE

ROWS, RANKS = 5080, 12
Served = list[tuple[int, int, list[list[tuple[str, str, bytes]]]]]


class Shifting:
    """A task whose preprocess draws."""

    def preprocess(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"y": row["y"] + rng.random(), "x": row["x"] * 2, "number": row["number"]}


class Sized(Shifting):
    """Rows of very different size."""

    def preprocess(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"blob": bytes(int(row["number"]) % 97 * 1000), "y": row["y"]}


class Raising(Shifting):
    def preprocess(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        if row["number"] == 77:
            raise ValueError("row 77 is bad")
        return super().preprocess(row, rng)


class Chancy(Shifting):
    def preprocess(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"y": np.random.random(), "number": row["number"]}


class Routed:
    """A run's router, and what workers would be served by it."""

    def __init__(self, name: str, folder: str, task: Any, *, window: int = 3, ahead_bytes: int = 64 << 20) -> None:
        reader = DatasetReader(folder)
        self.name, self.notes = name, list[str]()
        self.order = SampleOrder(ROWS, reader.index.row_group, 24, RANKS, window, 7)
        self.plan = BatchPlan(self.order, 2)
        self.direct = DirectSource(reader, self.order, task.preprocess)
        routing = Routing(1, ahead_bytes, reader.index.row_bytes)
        loaded = ray.cloudpickle.dumps(lambda: task)
        root = str(Path(__file__).parents[2])
        start_router(RouterSpec(name, self.order, folder, {}, loaded, (root,), routing))

    def engine(self) -> DataEngine:
        source = RoutedSource(self.name, self.order, self.direct, self.notes.append)
        return DataEngine(self.plan, source, self.notes.append)

    def serve(
        self, steps: range, ranges: Sequence[range], meanwhile: Callable[[int], None] = lambda step: None
    ) -> Served:
        """Each range is a worker's."""
        engines = [self.engine() for _ in ranges]
        try:
            return served(engines, steps, ranges, meanwhile)
        finally:
            for engine in engines:
                engine.close()

    def serve_until_routed(self, first: int, ranges: Sequence[range], share: float) -> None:
        """Serve 60 steps again and again until so much of them came from the router, in rows that are right.

        How soon that is depends on what else the machine does; the bound is 20 times what an idle one takes.
        """
        spans = -(-60 // self.order.window) * RANKS
        load = self.direct.load
        made: list[SpanName] = []
        for start in range(first, first + 1200, 60):
            made.clear()
            self.direct.load = lambda name: made.append(name) or load(name)  # type: ignore[method-assign,func-returns-value]
            try:
                found = self.serve(range(start, start + 60), ranges)
            finally:
                self.direct.load = load  # type: ignore[method-assign]
            assert found == self.expected(range(start, start + 60))
            if len(made) <= (1 - share) * spans:
                return
        raise AssertionError(f"{len(made)} of {spans} spans were made by the workers to the last")

    def expected(self, steps: range) -> Served:
        engine = DataEngine(self.plan, self.direct)
        try:
            return served([engine], steps, [range(RANKS)], lambda step: None, step_s=0.0)
        finally:
            engine.close()

    def end(self) -> None:
        ray.kill(ray.get_actor(router_name(self.name), namespace=NAMESPACE))


def served(
    engines: list[DataEngine],
    steps: range,
    ranges: Sequence[range],
    meanwhile: Callable[[int], None],
    step_s: float = 0.02,
) -> Served:
    found: Served = []
    for step in steps:
        for engine, ranks in zip(engines, ranges, strict=True):
            engine.begin(step, ranks)
            for planned in engine.plan.of_rank(step, ranks):
                rows = engine.data_of(planned)
                found.append((step, planned.logical_rank, [bytes_of(row) for row in rows]))
        meanwhile(step)
        time.sleep(step_s)
    return found


def bytes_of(row: dict[str, Any]) -> list[tuple[str, str, bytes]]:
    return [(name, type(value).__name__, np.asarray(value).tobytes()) for name, value in sorted(row.items())]


class Idle:
    def ping(self) -> bool:
        return True
