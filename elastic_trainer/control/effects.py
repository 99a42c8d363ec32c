"""What is to be done: decisions as frozen data, each with its reason in words.

Pure. Those that go to workers are `Order`s; a worker obeys the newest.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.vocabulary import Rollback, RunStatus, SavedStep, Token, Worker


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Reserve the unit's resources if they are not reserved yet, then start the process."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker's process and its children; `is_hung`: after its stacks have been kept for people to read."""

    worker: Worker
    reason: str
    is_hung: bool = False


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """End a worker and give its resources back: none takes its place."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeHosts:
    """Let these nodes try to reach each other."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FormGeneration:
    """Form a process group of `ranks` (rank r is the r-th) and go on from the most advanced member's state.

    Where no member has state they restore it from the first of `sources` that verifies. Only a fresh generation may
    begin without either: with what rank 0 has built, or with the state that `start_from` holds. State from before a
    `rollback` is void, and the steps that it names update nothing. `shares`: how many logical ranks each rank carries;
    none: as even as can be.
    """

    token: Token
    ranks: tuple[Worker, ...]
    store: tuple[str, int]
    is_fresh: bool
    reason: str
    sources: tuple[SavedStep, ...] = ()
    rollback: Rollback | None = None
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Give up the current step now and tear the group down."""

    token: Token
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ParkGeneration:
    """Leave the group after the step that all ranks agree on."""

    token: Token
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SaveGeneration:
    """Save the state after the step that all ranks agree on, whether a save is due or not."""

    token: Token
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StopGeneration:
    """Leave the group after the step that all ranks agree on, because the run ends."""

    token: Token
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RunTaskAgain:
    """Enter the user's task once more in the same process, with the state that it held."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class WritePieces:
    """Divide a save anew: each of `writers` that has a copy writes its part under this attempt."""

    steps: int
    token: Token
    attempt: int
    writers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class CommitSave:
    """Write the manifest of a save and make it part of the history."""

    steps: int
    token: Token
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class SettleSave:
    """Copies of this step, and of any before, are no longer needed: it is saved, or given up."""

    steps: int
    token: Token
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecordResumption:
    """The run went back to a saved step: lines of `steps` and later with an older token are void."""

    token: Token
    steps: int
    reason: str
    rollback: Rollback | None = None


@dataclass(frozen=True, slots=True)
class StartStore:
    """Start a rendezvous store outside any rank."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Nothing to do but to let people know."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """Let every worker go and write the summary."""

    status: RunStatus
    reason: str


Effect = (
    StartWorker
    | KillWorker
    | RetireWorker
    | ProbeHosts
    | FormGeneration
    | AbortGeneration
    | ParkGeneration
    | SaveGeneration
    | StopGeneration
    | RunTaskAgain
    | WritePieces
    | CommitSave
    | SettleSave
    | RecordResumption
    | StartStore
    | Tell
    | EndRun
)
Order = (
    FormGeneration
    | AbortGeneration
    | ParkGeneration
    | SaveGeneration
    | StopGeneration
    | RunTaskAgain
    | WritePieces
    | SettleSave
    | EndRun
)
