"""What a worker needs to know of the resolved configuration to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_trainer.data.batch_plan import BatchPlan
from elastic_trainer.data.routing import Routing
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep


@dataclass(frozen=True)
class TrainSettings:
    """The fixed numbers of a run, the same for every worker and generation.

    `steps` counts optimizer steps of the whole run; `evaluate_every` is None when evaluation comes at the end only.
    `data_options` are for the store of the data; with a `routing` Ray Data makes the samples.
    `run_url` is the run's folder in the store, `start_from` another run's folder and a saved step in it. `gpus` is what
    each worker has.
    """

    run_name: str
    plan: BatchPlan
    train_data: str
    evaluation_data: str | None
    data_options: Mapping[str, Any]
    routing: Routing | None
    precision: str
    steps: int
    seed: int
    clip_norm: float | None
    evaluate_every: int | None
    form_s: float
    collective_s: float
    run_url: str
    storage_options: Mapping[str, Any]
    storage_s: float
    save_every: int | None
    save_every_s: float | None
    save_s: float
    start_from: tuple[str, SavedStep] | None = None
    gpus: float = 0

    def save_is_due(self, steps: int) -> bool:
        """Whether a save is due after `steps` done steps by their number."""
        return self.save_every is not None and steps % self.save_every == 0

    def evaluation_is_due(self, steps_done: int) -> bool:
        """Whether the group evaluates after so many done steps: arithmetic, so that all ranks agree."""
        if self.evaluation_data is None or steps_done == 0:
            return False
        every = self.evaluate_every
        return steps_done == self.steps or (every is not None and steps_done % every == 0)

    def open_store(self) -> ObjectStore:
        """The run's folder in the store, with a client of the calling process."""
        return ObjectStore(self.run_url, self.storage_options, timeout_s=self.storage_s)
