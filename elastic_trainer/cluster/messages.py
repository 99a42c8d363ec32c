"""What passes between worker, node agent and controller: frozen data with a sender, fenced by incarnation and token."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_trainer.cluster.processes import ProcessId
from elastic_trainer.control.effects import Order
from elastic_trainer.control.events import Event
from elastic_trainer.observability.lines import Line
from elastic_trainer.vocabulary import Worker


@dataclass(frozen=True, slots=True)
class Report:
    """From a worker, by way of its node agent, to the controller. Lines stand before the events they belong to."""

    worker: Worker
    lines: tuple[Line, ...] = ()
    events: tuple[Event, ...] = ()
    process: ProcessId | None = None  # once, when the worker begins


@dataclass(frozen=True, slots=True)
class Orders:
    """From the controller, by way of a node agent, to a worker.

    Steps below `acknowledged` stand in the ledger, so a worker may forget its lines of them.
    """

    orders: tuple[Order, ...]
    acknowledged: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the run stands, for people."""

    phase: str
    step: int
    steps: int
    loss: float | None
    samples_per_s: float
    world_size: int
    news: tuple[str, ...] = ()
    cursor: int = 0
    has_ended: bool = False
    pids: dict[str, int] = field(default_factory=dict)
