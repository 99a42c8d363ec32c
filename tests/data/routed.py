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
from elastic_trainer.data.engine import DataEngine
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
        self.routing = Routing(1, ahead_bytes, reader.index.row_bytes)
        self.direct = DirectSource(reader, self.order, task.preprocess)
        loaded = ray.cloudpickle.dumps(lambda: task)
        root = str(Path(__file__).parents[2])
        start_router(RouterSpec(name, self.order, folder, {}, loaded, (root,), self.routing))

    def engine(self) -> DataEngine:
        source = RoutedSource(self.name, self.order, self.routing, self.direct, self.notes.append)
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
            for planned, rows in engine.micro_batches(step, ranks):
                found.append((step, planned.logical_rank, [bytes_of(row) for row in rows]))
        meanwhile(step)
        time.sleep(step_s)
    return found


def bytes_of(row: dict[str, Any]) -> list[tuple[str, str, bytes]]:
    return [(name, type(value).__name__, np.asarray(value).tobytes()) for name, value in sorted(row.items())]


class Idle:
    def ping(self) -> bool:
        return True
