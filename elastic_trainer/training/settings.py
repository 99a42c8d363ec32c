"""What a worker needs to know of the resolved configuration to step."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.data.batch_plan import BatchPlan


@dataclass(frozen=True)
class TrainSettings:
    """The fixed numbers of a run, the same for every worker and generation.

    `steps` counts optimizer steps of the whole run; `evaluate_every` is None when evaluation comes at the end only.
    """

    run_name: str
    plan: BatchPlan
    train_data: str
    evaluation_data: str | None
    steps: int
    seed: int
    clip_norm: float | None
    evaluate_every: int | None
    form_s: float
    collective_s: float

    def evaluation_is_due(self, steps_done: int) -> bool:
        """Whether the group evaluates after so many done steps: arithmetic, so that all ranks agree."""
        if self.evaluation_data is None or steps_done == 0:
            return False
        every = self.evaluate_every
        return steps_done == self.steps or (every is not None and steps_done % every == 0)
