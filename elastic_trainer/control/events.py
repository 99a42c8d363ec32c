"""What happened: facts about a worker or the run, idempotent and free of order.

Pure. A worker's own reports carry its incarnation and, inside a generation, the token; `machine.py` ignores stale ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.vocabulary import Token, Worker


class Left(StrEnum):
    """Why a worker left its generation."""

    COLLECTIVE_FAILED = "collective failed"
    ORDERED = "ordered"
    PARKED = "parked"
    STOPPED = "stopped"


class TaskPhase(StrEnum):
    """Which part of the user's task was running."""

    BUILD = "build"
    DATA = "data"
    LOSS = "loss"
    APPLY = "apply"
    EVALUATE = "evaluate"
    END = "end"


@dataclass(frozen=True, slots=True)
class Failure:
    """A user's exception. Two are the same failure when kind, line and phase agree."""

    phase: TaskPhase
    kind: str
    line: str  # "file:number" of the innermost line of user code
    text: str  # the user's traceback and message

    @property
    def signature(self) -> tuple[str, str, str]:
        """What makes two failures the same."""
        return (self.phase.value, self.kind, self.line)


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """The resources of a worker's elastic unit are reserved; its process is being started."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerWarm:
    """A worker has built what it trains and waits for a generation.

    `holds` is the number of done steps that its state contains, None for a new process. `attempt` counts how often
    the task was entered in this process.
    """

    worker: Worker
    attempt: int
    holds: int | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone."""

    worker: Worker
    cause: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """A worker's process group stands."""

    worker: Worker
    token: Token


@dataclass(frozen=True, slots=True)
class GenerationJoined:
    """A worker has the generation's state and goes on after `steps` done steps; `pid` is its process, as it says."""

    worker: Worker
    token: Token
    steps: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A worker has torn its process group down; its state is that after `holds` steps, None when it has none."""

    worker: Worker
    token: Token
    cause: Left
    holds: int | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StepsDone:
    """A worker has done `steps` steps of the run."""

    worker: Worker
    token: Token
    steps: int


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The user's task raised on a worker, which left its group, if it had one, and keeps its process."""

    worker: Worker
    attempt: int
    token: Token | None
    steps: int
    holds: int | None
    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """A worker has done the run's last step and what follows it."""

    worker: Worker
    token: Token


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The rendezvous store listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The process of the rendezvous store is gone."""

    cause: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end: at the next step boundary, or at once."""

    by: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The first event of a term; `capacity` says in words what was asked and what the cluster has."""

    capacity: str = ""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline came; what it means is for the machine to say."""


Event = (
    RunBegan
    | WorkerPlaced
    | WorkerWarm
    | WorkerLost
    | GroupFormed
    | GenerationJoined
    | GroupLeft
    | StepsDone
    | TaskFailed
    | WorkerFinished
    | StoreReady
    | StoreLost
    | StopRequested
    | TimePassed
)
