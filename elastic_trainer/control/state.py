"""All that the control machine knows, as plain data that goes to a dict and back.

Pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from elastic_trainer.vocabulary import Token, Worker


class Phase(StrEnum):
    """Where the run stands."""

    WAITING = "waiting"  # no generation: for workers, the store, or the quiet time after a fault
    FORMING = "forming"
    RUNNING = "running"
    PARKING = "parking"  # a planned change: on the way to a step boundary
    ABORTING = "aborting"  # a fault: survivors are leaving the group
    STOPPING = "stopping"  # on the way to a step boundary, to end there
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = (Phase.FINISHED, Phase.STOPPED, Phase.FAILED)
IN_GENERATION = (Phase.FORMING, Phase.RUNNING, Phase.PARKING, Phase.ABORTING, Phase.STOPPING)


class Stage(StrEnum):
    """Where a worker stands."""

    GONE = "gone"  # no process; a start is due at `start_at`
    PLACING = "placing"
    STARTING = "starting"
    WARM = "warm"  # outside any group and able to form one: new, or left the last one
    JOINING = "joining"
    TRAINING = "training"
    DONE = "done"  # finished the last step, still a member of its group
    FAULTY = "faulty"  # its task raised; the process waits for an order


MEMBER = (Stage.JOINING, Stage.TRAINING, Stage.DONE)


@dataclass(frozen=True)
class Limits:
    """What the run may and must have; times in seconds, each with its reason in the configuration."""

    min_workers: int
    max_workers: int
    place_s: float
    form_s: float
    leave_s: float
    coalesce_s: float = 0.05  # detectors of one fault report within some 20 ms of each other on an idle machine
    gather_s: float = 30.0  # at first start the fast wait for the slow this long; who comes later joins at a boundary
    backoff_s: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
    tries: int = 3  # the same exception this often without progress is the task's, not the machine's


@dataclass
class WorkerState:
    """One worker, by its present incarnation."""

    worker: Worker
    stage: Stage = Stage.GONE
    attempt: int = 0
    holds: int | None = None
    formed: bool = False
    deaths: int = 0  # in a row, without a step done in between
    start_at: float = 0.0  # when a process, or another try of the task in it, is due


@dataclass
class Tries:
    """How often a failure was met since the run last made progress."""

    signature: tuple[str, str, str]
    done: int  # the highest step ever done when it was first met
    rounds: list[str] = field(default_factory=list)  # one entry a generation, or a build attempt


@dataclass
class State:
    """The whole memory of the machine."""

    term: int
    phase: Phase = Phase.WAITING
    generation: int = 0
    group: list[Worker] = field(default_factory=list)  # members of the current generation, by rank
    last_group: list[Worker] = field(default_factory=list)  # of the one before: survivors keep their order
    workers: dict[int, WorkerState] = field(default_factory=dict)
    store: tuple[str, int] | None = None
    capacity: str = ""  # what the cluster has, in words
    done: int = 0  # highest number of done steps ever reported
    why: str = "first start"  # of the change that is under way
    why_is_symptom: bool = False  # what made it necessary has not been reported yet
    quiet_until: float = 0.0
    place_until: float | None = None
    gather_until: float | None = None
    form_until: float | None = None
    leave_until: float | None = None
    failed_forms: int = 0  # in a row
    tries: list[Tries] = field(default_factory=list)
    first_failure: str = ""  # since the last progress, with rank and step
    told: str = ""  # the kind of waiting that people know of

    @property
    def token(self) -> Token:
        """Of the current or last generation."""
        return Token(self.term, self.generation)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> State:
        """The state that `to_dict` described, also after a way through JSON."""
        values = dict(found)
        values["phase"] = Phase(values["phase"])
        values["group"] = [Worker(*worker) for worker in values["group"]]
        values["last_group"] = [Worker(*worker) for worker in values["last_group"]]
        values["store"] = None if values["store"] is None else (values["store"][0], values["store"][1])
        values["workers"] = {
            int(worker_id): WorkerState(**{**w, "worker": Worker(*w["worker"]), "stage": Stage(w["stage"])})
            for worker_id, w in values["workers"].items()
        }
        values["tries"] = [Tries(**{**t, "signature": tuple(t["signature"])}) for t in values["tries"]]
        return cls(**values)
