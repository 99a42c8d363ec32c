"""All that the control machine knows, as plain data that goes to a dict and back.

Pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from elastic_trainer.control.watched import Host, Seen
from elastic_trainer.vocabulary import NO_GENERATION, Rollback, SavedStep, Stage, Token, Worker


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


MEMBER = (Stage.JOINING, Stage.TRAINING, Stage.DONE)


@dataclass(frozen=True)
class Limits:
    """What the run may and must have; times in seconds, each with its reason in the configuration."""

    min_workers: int
    max_workers: int
    place_s: float
    form_s: float
    leave_s: float
    spares: int = 0  # warm workers on top of max_workers
    coalesce_s: float = 0.05  # detectors of one fault report within some 20 ms of each other on an idle machine
    gather_s: float = 30.0  # at first start the fast wait for the slow this long; who comes later joins at a boundary
    backoff_s: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
    settle_s: tuple[float, ...] = (0.0, 0.0, 0.0, 15.0, 60.0, 300.0)  # by how often in a row a place was lost soon
    logical_ranks: int = 0  # of the run
    rebalances: bool = False  # slow workers get fewer of these
    schedule: tuple[tuple[int, int], ...] = ()  # (done steps, at most so many workers from then on), in order
    stall_s: float | None = None  # how long a worker may stand still; None: learned from how long its phases take
    save_s: float = 600.0  # from the first copy until a save stands
    rollback_after: int | None = 3  # steps in a row that were not finite
    tries: int = 3  # the same exception this often without progress is the task's, not the machine's


@dataclass
class WorkerState:
    """One worker, by its present incarnation."""

    worker: Worker
    stage: Stage = Stage.GONE
    attempt: int = 0
    holds: int | None = None
    formed: bool = False
    has_trained: bool = False  # so its model is not what the task built
    deaths: int = 0  # in a row, without a step done in between
    joined_at: float = 0.0  # when this process joined a group for the first time
    short_stays: int = 0  # of this place, in a row
    settled_at: float = 0.0  # before that it joins no group that can do without it
    start_at: float = 0.0  # when a process, or another try of the task in it, is due


@dataclass
class Tries:
    """How often a failure was met since the run last made progress."""

    signature: tuple[str, str, str]
    done: int  # the highest step ever done when it was first met
    rounds: list[str] = field(default_factory=list)  # one entry a generation, or a build attempt


@dataclass
class Save:
    """The save in flight, one at a time."""

    steps: int
    token: Token
    ranks: list[Worker]  # of the generation that copies
    writers: list[Worker]  # by part, of the present attempt
    attempt: int = 0
    copies: list[Worker] = field(default_factory=list)
    written: list[Worker] = field(default_factory=list)
    failures: int = 0
    is_committing: bool = False
    until: float = 0.0


@dataclass
class State:
    """The whole memory of the machine."""

    term: int
    phase: Phase = Phase.WAITING
    generation: int = 0
    token: Token = NO_GENERATION  # of the current or last generation, which may be one of an earlier term
    group: list[Worker] = field(default_factory=list)  # members of the current generation, by rank
    last_group: list[Worker] = field(default_factory=list)  # of the one before: survivors keep their order
    workers: dict[int, WorkerState] = field(default_factory=dict)
    store: tuple[str, int] | None = None
    capacity: str = ""  # what the cluster has, in words
    done: int = 0  # highest number of done steps ever reported
    why: str = "first start"  # of the change that is under way
    why_is_symptom: bool = False  # what made it necessary has not been reported yet
    quiet_until: float = 0.0
    has_begun: bool = False  # a generation was formed in this term or taken over
    goes_back: bool = False  # the generation that forms begins at a saved step, or anew
    rollback: Rollback | None = None  # the last one
    rolls_back: bool = False  # it is under way: no state that is held counts
    stop_by: str = ""  # who wants the run to end
    stop_until: float | None = None
    saved: list[SavedStep] = field(default_factory=list)  # what can be restored, oldest first
    save: Save | None = None
    unknown: list[tuple[Token, int]] = field(default_factory=list)  # saves of which the store has not been heard
    settled: tuple[Token, int] | None = None  # the last save that was settled, token and steps
    saves_failed: int = 0
    place_until: float | None = None
    gather_until: float | None = None
    form_until: float | None = None
    leave_until: float | None = None
    failed_forms: int = 0  # in a row
    tries: list[Tries] = field(default_factory=list)
    first_failure: str = ""  # since the last progress, with rank and step
    told: str = ""  # the kind of waiting that people know of
    hosts: dict[str, Host] = field(default_factory=dict)  # by node id
    seen: dict[int, Seen] = field(default_factory=dict)  # by worker id
    is_deaf: bool = False  # no host is heard
    probe_at: float = 0.0  # not before that hosts are asked to try to reach each other
    retry_at: float = 0.0  # nor those that could not before that
    reached: list[str] = field(default_factory=list)  # nodes that have been asked so
    apart: list[tuple[str, str]] = field(default_factory=list)  # pairs of them that could not
    draining: list[str] = field(default_factory=list)  # nodes that are being taken away
    drain_is_told: bool = False  # that workers there must stay
    slots: int = 1 << 30  # worker ids below are wanted
    formed_with: tuple[int, int] = (1, 1 << 30)  # the least and the most that counted for the present generation
    hung_at: list[float] = field(default_factory=list)  # when workers were killed lately because they stood still
    suspected: int = 0  # workers given up on suspicion, in all
    relieved: list[Worker] = field(default_factory=list)  # slow members with fewer logical ranks
    rebalance_at: float = 0.0  # not before that logical ranks are dealt anew

    @property
    def is_ending(self) -> bool:
        """Whether a save that fails now is not followed by another."""
        living = [each for each in self.workers.values() if each.worker in self.group and each.stage is not Stage.GONE]
        return self.phase is Phase.STOPPING or (len(living) > 0 and all(each.stage is Stage.DONE for each in living))

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> State:
        """The state that `to_dict` described, also after a way through JSON."""
        values = dict(found)
        values["phase"] = Phase(values["phase"])
        values["group"] = [Worker(*worker) for worker in values["group"]]
        values["relieved"] = [Worker(*worker) for worker in values["relieved"]]
        values["last_group"] = [Worker(*worker) for worker in values["last_group"]]
        values["token"] = Token(*values["token"])
        values["saved"] = [SavedStep(*each) for each in values["saved"]]
        values["save"] = None if values["save"] is None else _save_from(values["save"])
        values["unknown"] = [(Token(*token), steps) for token, steps in values["unknown"]]
        settled = values["settled"]
        values["settled"] = None if settled is None else (Token(*settled[0]), settled[1])
        values["rollback"] = Rollback.of(values["rollback"])
        values["store"] = None if values["store"] is None else (values["store"][0], values["store"][1])
        values["workers"] = {
            int(worker_id): WorkerState(**{**w, "worker": Worker(*w["worker"]), "stage": Stage(w["stage"])})
            for worker_id, w in values["workers"].items()
        }
        values["formed_with"] = (values["formed_with"][0], values["formed_with"][1])
        values["apart"] = [(a, b) for a, b in values["apart"]]
        values["hosts"] = {node: Host(**host) for node, host in values["hosts"].items()}
        values["seen"] = {int(worker_id): Seen.from_dict(seen) for worker_id, seen in values["seen"].items()}
        values["tries"] = [Tries(**{**t, "signature": tuple(t["signature"])}) for t in values["tries"]]
        return cls(**values)


def _save_from(found: dict[str, Any]) -> Save:
    workers = {name: [Worker(*each) for each in found[name]] for name in ("ranks", "writers", "copies", "written")}
    return Save(**{**found, **workers, "token": Token(*found["token"])})
