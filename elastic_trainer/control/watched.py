"""What is known of hosts and of where workers are, as their node agents tell it.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_trainer.control.events import TaskPhase, Whereabouts
from elastic_trainer.vocabulary import Worker


@dataclass
class Host:
    """A node, by what its agent said last; `is_given_up` until it says something again."""

    name: str
    address: str
    heard_at: float
    is_given_up: bool = False


@dataclass
class Seen:
    """A worker's process: where its main thread is, and since when it was not seen to move."""

    worker: Worker
    node: str
    since: float
    where: Whereabouts | None = None
    stopped_since: float | None = None
    is_busy: bool = True
    told_at: float = 0.0
    is_mute: bool = False  # it has not told where it is: something holds its interpreter, or it has no CPU
    slow_since: int | None = None  # the step since which it is much slower than the others
    is_named: bool = False  # for that
    slowness: float = 1.0  # as long as the others it takes, when it was named
    fast_since: int | None = None  # the step since which one that was named is so no more
    loss: tuple[int, float] = (0, 0.0)  # stays in that phase, as they were told last

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Seen:
        """After a way through JSON."""
        where = found["where"]
        if where is not None:
            where = Whereabouts(**{**where, "phase": TaskPhase(where["phase"])})
        loss = (found["loss"][0], found["loss"][1])
        return cls(**{**found, "loss": loss, "worker": Worker(*found["worker"]), "where": where})
