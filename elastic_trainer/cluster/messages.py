"""What passes between worker, node agent and controller: frozen data with a sender, fenced by incarnation and token."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.cluster.processes import ProcessId
from elastic_trainer.control.effects import Order
from elastic_trainer.control.events import Event
from elastic_trainer.observability.lines import Line
from elastic_trainer.vocabulary import Worker


@dataclass(frozen=True, slots=True)
class Report:
    """From a worker, by way of its node agent, to the controller. Lines stand before the events they belong to.

    `number` counts the reports of a worker from 0: the agent passes them on in that order.
    """

    worker: Worker
    number: int
    lines: tuple[Line, ...] = ()
    events: tuple[Event, ...] = ()
    process: ProcessId | None = None  # once, when the worker begins


@dataclass(frozen=True, slots=True)
class Orders:
    """From the controller, by way of a node agent, to a worker.

    Steps below `acknowledged` stand in the ledger's files, so a worker may forget its lines of them. A new `term` has
    to be told again what is not acknowledged. `silent_s` is how long the agent has not heard of a controller.
    """

    orders: tuple[Order, ...]
    acknowledged: int
    term: int = 0
    silent_s: float = 0.0
