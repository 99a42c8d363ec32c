"""What passes between worker, node agent and controller: frozen data with a sender, fenced by incarnation and token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elastic_trainer.cluster.processes import ProcessId
from elastic_trainer.control.effects import Order
from elastic_trainer.control.events import Event, Whereabouts
from elastic_trainer.observability.lines import Line
from elastic_trainer.vocabulary import NO_GENERATION, Token, Worker


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
    where: Whereabouts | None = None  # with every exchange


class Acknowledged(NamedTuple):
    """Lines of steps below `steps`, recorded in the generation of `token` or before, stand in the ledger's files.

    Without the token an answer from before a return to an earlier step would void the lines of the steps done again.
    """

    steps: int = 0
    token: Token = NO_GENERATION


@dataclass(frozen=True, slots=True)
class Orders:
    """From the controller, by way of a node agent, to a worker.

    A worker may forget its lines that are `acknowledged`. A new `term` has to be told again what is not. `silent_s` is
    how long the agent has not heard of a controller.
    """

    orders: tuple[Order, ...]
    acknowledged: Acknowledged
    term: int = 0
    silent_s: float = 0.0
