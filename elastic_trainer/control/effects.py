"""What is to be done: decisions as frozen data, each with its reason in words.

Pure. Those that go to workers are `Order`s; a worker obeys the newest.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.vocabulary import RunStatus, Token, Worker


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Reserve the unit's resources if they are not reserved yet, then start the process."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker's process and its children."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class FormGeneration:
    """Form a process group of `ranks` (rank r is the r-th) and go on from the most advanced member's state.

    Only a fresh generation may begin where no member has state: with what rank 0 has built.
    """

    token: Token
    ranks: tuple[Worker, ...]
    store: tuple[str, int]
    is_fresh: bool
    reason: str


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
    | FormGeneration
    | AbortGeneration
    | ParkGeneration
    | StopGeneration
    | RunTaskAgain
    | StartStore
    | Tell
    | EndRun
)
Order = FormGeneration | AbortGeneration | ParkGeneration | StopGeneration | RunTaskAgain | EndRun
