"""The node agent: the one actor a node whose workers talk to it, and through it to the controller.

It passes reports on at once and orders back by long poll, knows its workers' processes, and reaps what they leave. When
the controller is gone it ends its workers and their placement groups and then itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastic_trainer.cluster.messages import Orders, Report
from elastic_trainer.cluster.processes import ProcessId, kill_all, memory_kills, with_mark
from elastic_trainer.cluster.worker import MARK, mark_of
from elastic_trainer.control.effects import Order
from elastic_trainer.vocabulary import Worker

BEAT_S = 1.0  # how late workers without rank 0 learn which of their lines are safe
POLL_S = 0.2  # how long an exchange waits for an order; bounds how old a worker's unsent lines get


class NodeAgent:
    """Async Ray actor, one a node and run."""

    def __init__(self, run_mark: str, controller: ActorHandle) -> None:
        self._run_mark = run_mark
        self._controller = controller
        self._reports: deque[Report] = deque()
        self._has_report = asyncio.Event()
        self._orders: dict[Worker, list[Order]] = {}
        self._has_order: dict[Worker, asyncio.Event] = {}
        self._processes: dict[Worker, ProcessId] = {}
        self._groups: dict[Worker, PlacementGroup] = {}
        self._acknowledged = 0
        self._memory_kills = deque([memory_kills()], maxlen=3)  # at the last beats
        self._running = [asyncio.ensure_future(self._forward()), asyncio.ensure_future(self._end_with_controller())]

    async def adopt(self, worker: Worker, group: PlacementGroup) -> None:
        """A worker in this placement group will report here."""
        self._groups[worker] = group

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
        return Orders(tuple(self._orders.pop(report.worker, ())), self._acknowledged)

    async def deliver(self, orders: list[tuple[Worker, Order]]) -> None:
        """Hand orders to workers of this node."""
        for worker, order in orders:
            self._orders.setdefault(worker, []).append(order)
            self._has_order.setdefault(worker, asyncio.Event()).set()

    async def reap(self, worker: Worker) -> None:
        """Kill what is left of a worker: its process and every process that descends from it."""
        await asyncio.to_thread(self._kill, [worker])
        self._orders.pop(worker, None)
        self._has_order.pop(worker, None)

    async def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this machine for want of memory in the last seconds."""
        return memory_kills() > self._memory_kills[0]

    async def ended(self) -> None:
        """The controller's tripwire: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()

    def _take(self, report: Report) -> None:
        if report.process is not None:
            self._processes[report.worker] = report.process
        if report.lines or report.events or report.process:
            self._reports.append(report)
            self._has_report.set()

    async def _forward(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._has_report.wait(), BEAT_S)
            except TimeoutError:
                self._memory_kills.append(memory_kills())
            self._has_report.clear()
            batch = list(self._reports)
            self._reports.clear()
            try:
                self._acknowledged = await self._controller.report.remote(batch)
            except RayActorError:
                return  # the tripwire ends this process
            except Exception as error:
                # whose reports do not arrive trains for nobody: to end is an ordinary loss of its workers
                print(f"node agent cannot report and ends: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)

    async def _end_with_controller(self) -> None:
        try:
            await self._controller.ended.remote()
        except RayActorError:
            await asyncio.to_thread(self._end_everything)

    def _kill(self, workers: list[Worker]) -> None:
        for worker in workers:
            process = self._processes.pop(worker, None)
            if process is not None:
                kill_all([process], signal.SIGKILL)
            kill_all(with_mark(MARK, mark_of(self._run_mark, worker)), signal.SIGKILL)

    def _end_everything(self) -> None:
        self._kill(list(self._groups))
        for group in self._groups.values():
            remove_placement_group(group)
        os._exit(0)


def agent_name(run_name: str, node_id: str) -> str:
    """The actor's name in Ray."""
    return f"agent:{run_name}:{node_id[:12]}"


def make_agent(run_name: str, run_mark: str, node_id: str, controller: ActorHandle) -> ActorHandle:
    """Start the agent of a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    handle: ActorHandle = (
        ray.remote(NodeAgent)
        .options(
            name=agent_name(run_name, node_id),
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(run_mark, controller)
    )
    return handle
