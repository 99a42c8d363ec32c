"""The node agent: the one actor a node whose workers talk to it, and through it to the controller.

It passes reports on at once and orders back by long poll, knows its workers' processes, and reaps what they leave. A
controller that dies is waited for: reports are kept and sent to the next one, which attaches with a higher term; orders
of an older term are refused. Without any controller for `orphan_s` it ends its workers, their placement groups, itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastic_trainer.cluster.in_order import InOrder
from elastic_trainer.cluster.inventory import Inventory
from elastic_trainer.cluster.logs import keep_log, log_since, stacks_of
from elastic_trainer.cluster.messages import Acknowledged, Orders, Report
from elastic_trainer.cluster.processes import ProcessId, kill_all, memory_kills, with_mark
from elastic_trainer.cluster.pulse_taker import PulseTaker
from elastic_trainer.cluster.worker import MARK, mark_of
from elastic_trainer.control.effects import Order
from elastic_trainer.control.events import Beat, FoundWorker
from elastic_trainer.errors import Fenced, StorageError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.probe import sees_marker
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import NAMESPACE, Worker

BEAT_S = 0.15  # how old the controller's picture of this node gets; `control/suspicion.py` counts on it
MEMORY_S = 1.0  # between looks at the kernel's count of processes killed for want of memory
POLL_S = 0.2  # how long an exchange waits for an order; bounds how old a worker's unsent lines get
CONNECT_S = 1.4  # the first packet of a connection that is lost is sent again after a second
AGAIN_S = 0.2  # between tries to reach a controller; one is back 1.4 s after its death


@dataclass(frozen=True)
class AgentSpec:
    """What the agent of a node needs to begin."""

    run_mark: str
    node_id: str
    host: tuple[str, str]  # its name and its address
    settings: TrainSettings
    orphan_s: float


class NodeAgent:
    """Async Ray actor, one a node and run."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._controller: ActorHandle | None = None
        self._term = 0
        self._heard_at = time.monotonic()
        self._reports: deque[Report] = deque()
        self._has_report = asyncio.Event()
        self._orders: dict[Worker, list[Order]] = {}
        self._has_order: dict[Worker, asyncio.Event] = {}
        self._processes: dict[Worker, ProcessId] = {}
        self._groups: dict[Worker, PlacementGroup] = {}
        self._in_order: dict[Worker, InOrder[Report]] = {}
        self._inventory = Inventory()
        self._pulses = PulseTaker()
        self._acknowledged = Acknowledged()
        self._memory_kills = deque([memory_kills()], maxlen=3)  # at the last beats
        self._uploads: set[asyncio.Task[None]] = set()
        self._has_another = asyncio.Event()
        self._running = [asyncio.ensure_future(self._forward()), asyncio.ensure_future(self._end_when_orphaned())]
        self._running.append(asyncio.ensure_future(self._count_memory_kills()))
        for each in self._running:
            each.add_done_callback(_end_with)

    # ---- for the controller

    async def attach(
        self, term: int, controller: ActorHandle
    ) -> tuple[tuple[FoundWorker, ...], dict[Worker, PlacementGroup]]:
        """Belong to this controller from now on.

        Returns:
            The living workers and their placement groups.

        Raises:
            Fenced: A later term has attached.
        """
        self._refuse_older(term)
        self._term, self._controller, self._heard_at = term, controller, time.monotonic()
        self._has_another.set()
        return self._inventory.workers(), dict(self._groups)

    async def look_at_storage(self, marker: tuple[str, bytes]) -> str:
        """Why this node cannot use the run's storage, in words; empty when it can."""
        return await asyncio.to_thread(self._look_at_storage, marker)

    async def adopt(self, term: int, worker: Worker, group: PlacementGroup) -> None:
        """A worker in this placement group will report here."""
        self._refuse_older(term)
        self._groups[worker] = group

    async def deliver(self, term: int, orders: list[tuple[Worker, Order]]) -> None:
        """Hand orders to workers of this node."""
        self._refuse_older(term)
        for worker, order in orders:
            self._inventory.ordered(worker, order)
            self._orders.setdefault(worker, []).append(order)
            self._has_order.setdefault(worker, asyncio.Event()).set()

    async def reap(self, term: int, worker: Worker, with_stacks: bool = False) -> str:
        """Kill what is left of a worker: its process and every process that descends from it.

        Returns:
            What its threads were doing, if that was asked for and the process told.
        """
        self._refuse_older(term)
        process = self._processes.get(worker)
        stacks = await asyncio.to_thread(stacks_of, process) if with_stacks and process is not None else ""
        await asyncio.to_thread(self._kill, [worker])
        self._inventory.forget(worker)
        self._pulses.forget(worker)
        self._in_order.pop(worker, None)
        self._groups.pop(worker, None)
        self._orders.pop(worker, None)
        self._has_order.pop(worker, None)
        if process is not None:  # nobody waits for that: it may take as long as a storage that does not answer
            upload = asyncio.to_thread(keep_log, self._spec.settings.open_store, process.pid, worker)
            self._uploads.add(task := asyncio.ensure_future(upload))
            task.add_done_callback(self._uploads.discard)
        return stacks

    async def reach(self, hosts: dict[str, tuple[str, int]]) -> list[str]:
        """Which of these nodes, with address and port of something that listens there, cannot be connected to."""
        tried = await asyncio.gather(*(_can_connect(*where) for where in hosts.values()))
        return [node for node, is_there in zip(hosts, tried, strict=True) if not is_there]

    async def kept_logs(self) -> None:
        """Returns when the logs of workers that were reaped are in the storage."""
        if self._uploads:
            await asyncio.wait(self._uploads)

    async def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this machine for want of memory in the last seconds."""
        return memory_kills() > self._memory_kills[0]

    async def ended(self) -> None:
        """The controller's tripwire: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()

    # ---- for workers

    async def report(self, report: Report) -> None:
        """Pass a worker's report on now."""
        self._take(report)

    async def exchange(self, report: Report) -> Orders:
        """Take a worker's lines and wait a little for orders to it."""
        self._take(report)
        has_order = self._has_order.setdefault(report.worker, asyncio.Event())
        try:
            await asyncio.wait_for(has_order.wait(), POLL_S)
        except TimeoutError:
            pass
        has_order.clear()
        orders = tuple(self._orders.pop(report.worker, ()))
        return Orders(orders, self._acknowledged, self._term, time.monotonic() - self._heard_at)

    # ---- for people

    async def log(self, worker: Worker, since: dict[str, int]) -> dict[str, str]:
        """What a living worker has printed, by stream, from these offsets on."""
        process = self._processes.get(worker)
        return {} if process is None else await asyncio.to_thread(log_since, process.pid, since)

    # ----

    def _refuse_older(self, term: int) -> None:
        if term < self._term:
            raise Fenced(f"this node belongs to the controller of term {self._term}, so that of term {term} must stop")

    def _look_at_storage(self, marker: tuple[str, bytes]) -> str:
        store: ObjectStore = self._spec.settings.open_store()
        try:
            if sees_marker(store, marker):
                return ""
            return f"sees another folder at storage {store.url!r} than the run's controller"
        except StorageError as error:
            return f"cannot reach the storage: {error}"

    def _take(self, report: Report) -> None:
        for due in self._in_order.setdefault(report.worker, InOrder()).take(report.number, report):
            self._pass_on(due)

    def _pass_on(self, report: Report) -> None:
        if report.process is not None:
            self._processes[report.worker] = report.process
            self._inventory.began(report.worker)
        if report.where is not None:
            self._pulses.told(report.worker, report.where)
        for line in report.lines:
            self._inventory.recorded(report.worker, line)
        for event in report.events:
            self._inventory.reported(report.worker, event)
        if report.lines or report.events or report.process:
            self._reports.append(report)
            self._has_report.set()

    async def _forward(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_report.wait(), BEAT_S)
            self._has_report.clear()
            await self._send()

    def _beat(self) -> Beat:
        host, address = self._spec.host
        processes = dict(self._processes)  # reaping changes it in another thread
        return Beat(self._spec.node_id, host, address, self._pulses.take(processes))

    async def _count_memory_kills(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_S)
            self._memory_kills.append(memory_kills())

    async def _send(self) -> None:
        """Deliver what has been reported; to the next controller when this one dies or is replaced."""
        batch = list(self._reports)
        while (controller := self._controller) is None or not await self._reaches(controller, batch):
            await asyncio.sleep(AGAIN_S)
        for _ in batch:
            self._reports.popleft()

    async def _reaches(self, controller: ActorHandle, batch: list[Report]) -> bool:
        self._has_another.clear()
        answer = asyncio.ensure_future(controller.report.remote(self._term, batch, self._beat()))
        another = asyncio.ensure_future(self._has_another.wait())
        await asyncio.wait((answer, another), return_when=asyncio.FIRST_COMPLETED)
        another.cancel()
        if not answer.done():  # that one stands still
            answer.cancel()
            return False
        try:
            self._acknowledged = answer.result()
        except RayActorError:
            return False  # dead, or being restarted
        except RayError as error:
            # whose reports do not arrive trains for nobody: to end is an ordinary loss of its workers
            print(f"node agent cannot report and ends: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        self._heard_at = time.monotonic()
        return True

    async def _end_when_orphaned(self) -> None:
        while time.monotonic() - self._heard_at < self._spec.orphan_s:
            await asyncio.sleep(min(MEMORY_S, self._spec.orphan_s / 10))
        print(f"no controller for {self._spec.orphan_s:g} s: the workers of this node end", file=sys.stderr, flush=True)
        await asyncio.to_thread(self._end_everything)

    def _kill(self, workers: list[Worker]) -> None:
        for worker in workers:
            process = self._processes.pop(worker, None)
            if process is not None:
                kill_all([process], signal.SIGKILL)
            kill_all(with_mark(MARK, mark_of(self._spec.run_mark, worker)), signal.SIGKILL)

    def _end_everything(self) -> None:
        self._kill(list(self._groups))
        for group in self._groups.values():
            remove_placement_group(group)
        os._exit(0)


def _end_with(task: asyncio.Task[None]) -> None:
    """An agent that does half of its work is worse than none: the loss of its workers is an ordinary one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"internal error in the node agent, which ends: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


async def _can_connect(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def agent_name(run_name: str, node_id: str) -> str:
    """The actor's name in Ray."""
    return f"agent:{run_name}:{node_id[:12]}"


def make_agent(run_name: str, spec: AgentSpec) -> ActorHandle:
    """Start the agent of a node, or find it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    handle: ActorHandle = (
        ray.remote(NodeAgent)
        .options(
            name=agent_name(run_name, spec.node_id),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
        )
        .remote(spec)
    )
    return handle
