"""Words that every layer shares: who a worker is, which generation a message belongs to, where a run stands."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

NAMESPACE = "elastic_trainer"  # of every named actor in Ray
JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


def counted(number: int, noun: str) -> str:
    """Number and noun, as people write them: 1 worker, 2 workers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Worker(NamedTuple):
    """One life of a worker: a replacement keeps the `worker_id` and takes the next incarnation."""

    worker_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"w{self.worker_id}.{self.incarnation}"


class Token(NamedTuple):
    """Fences everything that belongs to one generation; ordered: a later token replaces an earlier one."""

    term: int
    generation: int

    def __str__(self) -> str:
        return f"{self.term}-{self.generation}"


NO_GENERATION = Token(0, 0)  # older than any


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


class SavedStep(NamedTuple):
    """A checkpoint that the run's log names: the state after `steps` done steps."""

    steps: int
    path: str  # of the manifest, in the run's folder
    sha256: str  # of the manifest


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Rollback(NamedTuple):
    """The run went back because the loss or a gradient was not finite, step after step.

    `path` is of the saved step that it went back to, after `steps` done steps, `since` the generation that began there:
    state of older ones is void. The steps in `skipped` update nothing when they come again.
    """

    path: str
    steps: int
    since: Token
    skipped: tuple[int, ...]

    @classmethod
    def of(cls, found: Sequence[Any] | None) -> Rollback | None:
        """The rollback after a way through JSON."""
        return None if found is None else cls(found[0], found[1], Token(*found[2]), tuple(found[3]))
