"""What happened: facts about a worker or the run, idempotent and free of order.

Pure. A worker's own reports carry its incarnation and, inside a generation, the token; `machine.py` ignores stale ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.vocabulary import NO_GENERATION, Rollback, SavedStep, Stage, Token, Worker


class Left(StrEnum):
    """Why a worker left its generation."""

    COLLECTIVE_FAILED = "collective failed"
    ORDERED = "ordered"
    PARKED = "parked"
    STOPPED = "stopped"
    NOT_RESTORED = "not restored"


class TaskPhase(StrEnum):
    """Where a worker's main thread is: which part of the task runs, or what the worker waits for."""

    BUILD = "build"
    WAIT = "wait"  # for an order, outside any group
    FORM = "form"  # for the others, to form the group
    STATE = "state"  # for the run's state
    DATA = "data"
    LOSS = "loss"
    REDUCE = "reduce"  # for the others, in a collective
    APPLY = "apply"
    BETWEEN = "between steps"
    EVALUATE = "evaluate"
    SAVE = "save"  # copies the state
    UPLOAD = "upload"  # waits until the copy of a save is written
    END = "end"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a worker's main thread is, after so many done steps.

    `mark` counts the stays in phases: while it stays the same nothing goes on. `stays` and `longest_s` are of the last
    stays in this phase that ended. `pace_s` is the median time of a micro-batch's forward and backward, 0 while it is
    not known.
    """

    phase: TaskPhase
    steps: int
    mark: int
    stays: int
    longest_s: float
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a worker is, as its node agent sees it.

    `where` is what it told last, `told_s` ago; None before that. `is_stopped`: the system does not let its process run.
    `is_busy`: its process or a child of it used the CPU, wanted to or waited for a disk in the last second.
    """

    worker: Worker
    where: Whereabouts | None
    told_s: float
    is_stopped: bool
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """A node agent lives, and so do these workers of its; `host` names the node to people, `address` to sockets."""

    node: str
    host: str
    address: str
    pulses: tuple[Pulse, ...]


@dataclass(frozen=True, slots=True)
class NodesDraining:
    """All nodes that are being taken away, each with the seconds that are left; 0 when that is not known."""

    nodes: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class HostsProbed:
    """Pairs of these nodes that could not reach each other when they were asked to try."""

    nodes: tuple[str, ...]
    unreachable: tuple[tuple[str, str], ...]


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
class NodeRefused:
    """A worker cannot be started where its resources are: that node cannot use the run's storage."""

    worker: Worker
    detail: str


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
class StepsSkipped:
    """The newest steps in a row updated nothing, because the loss or a gradient was not finite."""

    token: Token
    steps: tuple[int, ...]


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
class SaveBegan:
    """A worker has copied its state after `steps` done steps and is writing its part of it."""

    worker: Worker
    token: Token
    steps: int


@dataclass(frozen=True, slots=True)
class PiecesWritten:
    """A worker has written its part of a save; `content` (JSON) goes into the manifest and means nothing here."""

    worker: Worker
    token: Token
    steps: int
    attempt: int
    content: str = "{}"


@dataclass(frozen=True, slots=True)
class PiecesFailed:
    """A worker could not write its part of a save."""

    worker: Worker
    token: Token
    steps: int
    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class StepSaved:
    """A save stands in the log."""

    token: Token
    saved: SavedStep


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save whose parts were all written could not be made to stand."""

    token: Token
    steps: int
    detail: str


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
class ScaleRequested:
    """Somebody wants at least and at most so many workers from now on."""

    least: int
    most: int
    by: str


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker of an earlier term that lives, as it says itself; with stage `gone`, one of which only the name is left.

    `token` and `rank` are those of the last generation that it was ordered to form.
    """

    worker: Worker
    stage: Stage
    attempt: int = 0
    holds: int | None = None
    token: Token = NO_GENERATION
    rank: int = 0
    is_stopping: bool = False


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The first event of a term: what it has.

    Attributes:
        capacity: In words what was asked and what the cluster has.
        generation: The highest of the run that is known.
        saved: What can be restored, oldest first.
        found: Workers of an earlier term.
        has_store: A rendezvous store of an earlier term lives; its address follows.
        rollback: The last one of the run.
    """

    capacity: str = ""
    generation: int = 0
    saved: tuple[SavedStep, ...] = ()
    found: tuple[FoundWorker, ...] = ()
    has_store: bool = False
    rollback: Rollback | None = None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline came; what it means is for the machine to say."""


@dataclass(frozen=True, slots=True)
class HeldUp:
    """For so many seconds until now the machine's shell could hear nobody, so that silence shows nothing."""

    seconds: float


Event = (
    RunBegan
    | WorkerPlaced
    | WorkerWarm
    | WorkerLost
    | NodeRefused
    | GroupFormed
    | GenerationJoined
    | GroupLeft
    | StepsDone
    | StepsSkipped
    | TaskFailed
    | WorkerFinished
    | SaveBegan
    | PiecesWritten
    | PiecesFailed
    | StepSaved
    | SaveFailed
    | StoreReady
    | StoreLost
    | StopRequested
    | ScaleRequested
    | Beat
    | HostsProbed
    | NodesDraining
    | TimePassed
    | HeldUp
)
