"""The worker actor: user code in its main thread, a control thread beside it that talks to the node agent.

While `run()` is in the main thread no Ray call reaches the actor, so orders come by long-polling the agent.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from elastic_trainer.cluster.logs import STACKS
from elastic_trainer.cluster.messages import Orders, Report
from elastic_trainer.cluster.outbox import Outbox
from elastic_trainer.cluster.processes import this_process
from elastic_trainer.control.effects import FormGeneration
from elastic_trainer.control.events import Event, GroupLeft, TaskFailed, WorkerFinished
from elastic_trainer.observability.lines import Line, NoteLine
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Worker

MARK = "ELASTIC_TRAINER_WORKER"
EXIT_WITHOUT_AGENT = 70
EXIT_FENCED = 71


def mark_of(run_mark: str, worker: Worker) -> str:
    """The value of the environment mark that a worker's process and all its children carry.

    `run_mark` tells this run from another one of the same name on the same machine.
    """
    return f"{run_mark}:{worker}"


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker process needs to begin.

    `task` is a pickled function that makes the task. It comes through Ray only, never from storage, and is opened in
    workers only: it imports the user's modules and torch.
    """

    run_name: str
    worker: Worker
    task: bytes
    settings: TrainSettings
    import_paths: tuple[str, ...]
    threads: int
    fence_after_s: float
    versions: dict[str, str]  # of the driver


class WorkerActor:
    """Plain class; `controller.py` makes it a Ray actor with the resources of its elastic unit.

    The pending call of `run()` is the controller's tripwire: it fails at once when the process dies.
    """

    def run(self, agent: ActorHandle, spec: WorkerSpec) -> None:
        """Live as this worker until the run ends."""
        faulthandler.register(STACKS, file=2, all_threads=True)
        link = _Link(agent, spec.worker, spec.fence_after_s)
        link.begin()
        for path in reversed(spec.import_paths):
            if path not in sys.path:
                sys.path.insert(0, path)
        _work(link, spec)
        link.flush()

    def ended(self) -> None:
        """The tripwire of a later controller: waits behind `run()`, fails at once when the process dies."""


def _work(link: _Link, spec: WorkerSpec) -> None:
    # imported here, in the worker, after the agent knows the process: it takes a second and may itself fail
    import torch

    from elastic_trainer.training.backends import backend_for
    from elastic_trainer.training.entry import work
    from elastic_trainer.training.mailbox import Mailbox
    from elastic_trainer.training.saver import versions

    for name, here in versions().items():
        if here != spec.versions.get(name, here):
            there = spec.versions[name]
            link.outbox.record(
                NoteLine(str(spec.worker), f"runs {name} {here}, the driver {name} {there}: use the same")
            )
    torch.set_num_threads(spec.threads)
    mailbox = Mailbox(link.report, link.outbox.record)
    backend = backend_for(spec.settings, ray.util.get_node_ip_address())
    link.deliver_to(mailbox)
    work(lambda: cloudpickle.loads(spec.task)(), spec.worker, spec.settings, mailbox, backend)


class _Link:
    """Reports out at once, orders in by a thread that waits for them."""

    def __init__(self, agent: ActorHandle, worker: Worker, fence_after_s: float) -> None:
        self._agent = agent
        self._worker = worker
        self._fence_after_s = fence_after_s
        self._term = 0
        self.outbox = Outbox()
        self._mailbox: Any = None
        self._early: list[Any] = []
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Tell the agent who lives here, and listen."""
        ray.get(self._send((), process=this_process()))
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def deliver_to(self, mailbox: Any) -> None:
        """Orders go to this mailbox from now on, those that came before it first."""
        with self._lock:
            self._mailbox = mailbox
            for order in self._early:
                mailbox.put(order)

    def report(self, event: Event) -> None:
        """Send an event now, behind the lines recorded before it."""
        with self._sending:  # lines are taken and numbered at once, whichever thread reports
            is_leaving = isinstance(event, GroupLeft | TaskFailed | WorkerFinished)
            self._send(self.outbox.take_all() if is_leaving else self.outbox.take(), (event,))

    def flush(self) -> None:
        """Send what is left and wait until the agent has it."""
        with self._sending:
            sent = self._send(self.outbox.take_all())
        ray.get(sent)

    def _send(self, lines: tuple[Line, ...], events: tuple[Event, ...] = (), process: Any = None) -> ray.ObjectRef:
        return self._agent.report.remote(Report(self._worker, next(self._numbers), lines, events, process))

    def _listen(self) -> None:
        try:
            while True:
                self._exchange()
        except BaseException as error:
            # without its agent, or this thread, nobody could order this worker: an ordinary loss is better
            print(f"worker {self._worker} cannot be reached any more and ends: {error!r}", file=sys.stderr, flush=True)
            os._exit(EXIT_WITHOUT_AGENT)

    def _exchange(self) -> None:
        with self._sending:
            where = None if self._mailbox is None else self._mailbox.position.look()
            report = Report(self._worker, next(self._numbers), self.outbox.take(), where=where)
            asked = self._agent.exchange.remote(report)
        answer: Orders = ray.get(asked)
        if answer.term != self._term:
            self._term = answer.term
            self.outbox.send_again()
        self.outbox.acknowledge(answer.acknowledged)
        idle_s = time.monotonic() - self.outbox.last_step_at
        if answer.silent_s > self._fence_after_s and idle_s > self._fence_after_s:
            print(
                f"worker {self._worker} has heard of no controller for {answer.silent_s:.0f} s and has done no step "
                f"for {idle_s:.0f} s: another may have its place, so it ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_FENCED)
        for order in answer.orders:
            if isinstance(order, FormGeneration) and self._worker in order.ranks:
                self.outbox.become(sender=order.ranks[0] == self._worker)
            with self._lock:
                if self._mailbox is None:
                    self._early.append(order)
                else:
                    self._mailbox.put(order)
