"""States to save, and a store with a checkpoint of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from elastic_trainer.checkpoint.committer import Committer
from elastic_trainer.checkpoint.history import fold
from elastic_trainer.checkpoint.layout import Layout, TensorInfo
from elastic_trainer.checkpoint.writer import Writer
from elastic_trainer.control.events import PiecesFailed, PiecesWritten
from elastic_trainer.errors import StorageError
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep, Token, Worker


def tensors_of(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Shapes that do not divide, several dtypes, a scalar and an empty one."""
    random = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(37 * scale, 1001, generator=random),
        "bias": torch.randn(1001, generator=random, dtype=torch.float64),
        "half": torch.randn(5, 3, 2, generator=random).to(torch.bfloat16),
        "step": torch.tensor(float(seed)),
        "mask": torch.rand(11, generator=random) > 0.5,
        "empty": torch.empty(0, 4),
        "count": torch.tensor([seed, 2, 3]),
    }


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    return Layout(tuple(TensorInfo(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()))


class Ranks:
    """Writers of one generation, and the committer that makes what they write stand."""

    def __init__(self, stores: Sequence[ObjectStore], term: int | None = None) -> None:
        self.store = stores[0]
        log = RunLog(self.store)
        history = fold(log.read())
        self.committer = Committer(self.store, log, history, term or history.term + 1)
        self.committer.append("term", {"owner": "test", "config": {}, "code": ""})
        self.token = Token(history.term, 1)
        self.events: list[Any] = []
        self._has_event = threading.Condition()
        self.writers = [
            Writer(Worker(i, 0), lambda store=store: store, self._report, {"by": "test"})  # type: ignore[misc]
            for i, store in enumerate(stores)
        ]

    def _report(self, event: Any) -> None:
        with self._has_event:
            self.events.append(event)
            self._has_event.notify_all()

    def begin(self, steps: int, tensors: dict[str, torch.Tensor], state: Any = None) -> None:
        """Every rank copies and writes its part."""
        for rank, writer in enumerate(self.writers):
            writer.begin(
                steps,
                self.token,
                0,
                layout_of(tensors),
                list(tensors.values()),
                state,
                part=rank,
                parts=len(self.writers),
            )

    def await_parts(self, steps: int, attempt: int = 0, count: int | None = None) -> list[Any]:
        """The reports of all parts of a save."""

        def found() -> list[Any]:
            return [
                each
                for each in self.events
                if isinstance(each, PiecesWritten | PiecesFailed) and (each.steps, each.attempt) == (steps, attempt)
            ]

        with self._has_event:
            assert self._has_event.wait_for(lambda: len(found()) >= (count or len(self.writers)), 60)
        return found()

    def commit(self, steps: int, attempt: int = 0) -> SavedStep:
        """Make a save stand whose parts were taken."""
        saved = self.committer.write_manifest(steps, self.token, attempt)
        self.committer.stand(saved, self.token, ACCOUNT)
        return saved

    def save(self, steps: int, tensors: dict[str, torch.Tensor], state: Any = None) -> SavedStep:
        """A whole save, to the entry in the log."""
        self.begin(steps, tensors, state)
        try:
            for report in self.await_parts(steps):
                if isinstance(report, PiecesFailed):
                    raise StorageError(report.detail)
                self.committer.take(report)
            return self.commit(steps)
        finally:
            for writer in self.writers:
                writer.settle(steps, self.token)


ACCOUNT: dict[str, Any] = {"audit": {}, "evaluation": {}, "ledger": []}
