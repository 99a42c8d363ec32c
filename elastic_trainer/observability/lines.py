"""What a worker writes into the run's folder, line by line: a done step, an evaluation, a note.

A done step is one line of the ledger and one of the metrics; the ledger's part is a fact, the rest are measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.vocabulary import Token


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step that the whole group has done."""

    step: int
    token: Token
    samples: int
    digest: int  # of the sample ids in the tensors that were consumed, 64 bits
    loss: float  # mean over the step's weight; not finite when that was so
    world_size: int
    done_at: float  # seconds since the epoch, the recording worker's clock
    step_s: float
    data_wait_s: float
    skipped: str = ""  # why nothing was updated by it


@dataclass(frozen=True, slots=True)
class EvaluationLine:
    """What the whole group measured on the evaluation data after `steps` done steps."""

    steps: int
    token: Token
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class NoteLine:
    """Something that people should know: a user's callback that raised, a warning."""

    worker: str
    text: str


Line = StepLine | EvaluationLine | NoteLine
