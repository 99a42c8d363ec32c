"""Where each worker of a node stands, by what passes through its agent: what a new controller needs to take over.

Pure.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.control import events as e
from elastic_trainer.control.effects import FormGeneration, Order, RunTaskAgain, StopGeneration
from elastic_trainer.observability.lines import Line, StepLine
from elastic_trainer.vocabulary import Stage, Worker


class Inventory:
    """The workers of a node."""

    def __init__(self) -> None:
        self._found: dict[Worker, e.FoundWorker] = {}

    def workers(self) -> tuple[e.FoundWorker, ...]:
        """Where each stands now."""
        return tuple(self._found[worker] for worker in sorted(self._found))

    def began(self, worker: Worker) -> None:
        """Its process lives."""
        self._found.setdefault(worker, e.FoundWorker(worker, Stage.STARTING))

    def forget(self, worker: Worker) -> None:
        """Its process is gone."""
        self._found.pop(worker, None)

    def reported(self, worker: Worker, event: e.Event) -> None:
        """What it says of itself."""
        match event:
            case e.WorkerWarm():
                self._set(worker, stage=Stage.WARM, attempt=event.attempt, holds=event.holds)
            case e.GenerationJoined():
                self._set(worker, stage=Stage.TRAINING, token=event.token, holds=event.steps)
            case e.GroupLeft():
                self._set(worker, stage=Stage.WARM, holds=event.holds)
            case e.TaskFailed():
                self._set(worker, stage=Stage.FAULTY, attempt=event.attempt, holds=event.holds)
            case e.WorkerFinished():
                self._set(worker, stage=Stage.DONE)

    def recorded(self, worker: Worker, line: Line) -> None:
        """A step that it has done."""
        found = self._found.get(worker)
        if isinstance(line, StepLine) and found is not None and found.stage is Stage.TRAINING:
            self._set(worker, holds=max(found.holds or 0, line.step + 1))

    def ordered(self, worker: Worker, order: Order) -> None:
        """What it was told to do."""
        match order:
            case FormGeneration() if worker in order.ranks:
                self._set(worker, stage=Stage.JOINING, token=order.token, rank=order.ranks.index(worker))
            case StopGeneration():
                self._set(worker, is_stopping=True)
            case RunTaskAgain():
                self._set(worker, stage=Stage.STARTING)
            case _:
                pass

    def _set(self, worker: Worker, **changes: object) -> None:
        if (found := self._found.get(worker)) is not None:
            self._found[worker] = replace(found, **changes)  # type: ignore[arg-type]
