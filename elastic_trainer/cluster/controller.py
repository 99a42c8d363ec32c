"""The controller: the one named actor of a run that lets the control machine decide and carries its effects out.

It holds no rank and no state of the model. Everything here is asynchronous: Ray calls that block run in threads, files
are written by the journal's thread, and no step of training waits for this process unless membership changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, assert_never

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_trainer.cluster import placement
from elastic_trainer.cluster.chronicle import Chronicle
from elastic_trainer.cluster.messages import Report
from elastic_trainer.cluster.node_agent import make_agent
from elastic_trainer.cluster.rendezvous import make_store
from elastic_trainer.cluster.worker import MARK, WorkerActor, WorkerSpec, mark_of
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits
from elastic_trainer.observability.standing import Standing
from elastic_trainer.storage.run_folder import RunFolder
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import RunStatus, Worker

END_S = 60.0  # for a finished task's own last words, such as writing its model; measured runs need milliseconds
LET_GO_S = 30.0  # for actors and placement groups; a second or two was seen
ABANDON_S = 1.0  # for a run that failed or was stopped: its workers have only to return
PLACE_POLL_S = 1.0  # one look at a placement group; the machine bounds the whole wait


@dataclass(frozen=True)
class ControllerSpec:
    """All that the controller of a run needs to begin; `task` is opened by workers only."""

    run_name: str
    run_path: str
    run_mark: str  # marks the processes of this run, whatever other run has its name
    limits: Limits
    settings: TrainSettings
    resources: dict[str, float]
    task: bytes
    import_paths: tuple[str, ...]
    capacity: str


@dataclass
class _Unit:
    """A worker's actor and what watches over it."""

    actor: ActorHandle
    agent: ActorHandle
    run: ray.ObjectRef


class Controller:
    """Async Ray actor; methods are for the driver and the node agents."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec = spec
        self._me = ray.get_runtime_context().current_actor
        self._machine = Machine(spec.limits)
        self._chronicle = Chronicle(spec.settings, RunFolder(spec.run_path), self._machine.state)
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._groups: dict[int, PlacementGroup] = {}
        self._agents: dict[str, ActorHandle] = {}
        self._units: dict[Worker, _Unit] = {}
        self._store: ActorHandle | None = None
        self._stores = 0
        self._has_ended = asyncio.Event()
        self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._decide())

    # ---- for the driver

    async def stop(self, by: str, at_once: bool) -> None:
        """End the run at the next step boundary, or at once."""
        await self._events.put(e.StopRequested(by, at_once))

    async def watch(self, cursor: int) -> Standing:
        """How the run stands and the news since `cursor`; waits a little when there is none."""
        await self._chronicle.await_news(cursor, timeout_s=0.25)
        pids = {str(w): p.pid for w, p in self._chronicle.processes.items() if w in self._units}
        return self._chronicle.snapshot(cursor, pids, has_ended=self._has_ended.is_set())

    async def summary(self) -> dict[str, Any]:
        """What `summary.json` says; waits for the end of the run."""
        await self._has_ended.wait()
        return self._chronicle.summary

    # ---- for the node agents and the store

    async def report(self, reports: list[Report]) -> int:
        """Take what workers of a node report; returns below which step all lines are safe."""
        for report in reports:
            if report.process is not None:
                self._chronicle.processes[report.worker] = report.process
            steps = self._chronicle.record(report.lines)
            if steps is not None:
                await self._events.put(e.StepsDone(report.worker, *steps))
            for event in report.events:
                await self._events.put(event)
        return self._chronicle.acknowledged

    async def ended(self) -> None:
        """The tripwire of agents and store: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()

    # ---- deciding and carrying out

    async def _decide(self) -> None:
        self._handle(e.RunBegan(self._spec.capacity))
        while not self._is_ending:
            deadline = self._machine.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = await asyncio.wait_for(self._events.get(), timeout)
            except TimeoutError:
                event = e.TimePassed()
            self._handle(event)

    def _handle(self, event: e.Event) -> None:
        self._chronicle.saw(event)
        for effect in self._machine.handle(event, time.monotonic()):
            self._chronicle.decided(effect)
            self._carry_out(effect)

    def _carry_out(self, effect: f.Effect) -> None:
        match effect:
            case f.StartWorker():
                self._spawn(self._start_worker(effect.worker))
            case f.KillWorker():
                self._spawn(self._kill(effect.worker))
            case f.FormGeneration():
                self._send(effect.ranks, effect)
            case f.AbortGeneration() | f.ParkGeneration() | f.StopGeneration():
                self._send(effect.workers, effect)
            case f.RunTaskAgain():
                self._send((effect.worker,), effect)
            case f.StartStore():
                self._spawn(self._start_store())
            case f.Tell():
                pass  # the chronicle has told it
            case f.EndRun():
                self._is_ending = True
                self._spawn(self._end(effect))
            case _:
                assert_never(effect)

    def _send(self, workers: tuple[Worker, ...], order: f.Order) -> None:
        by_agent: dict[ActorHandle, list[tuple[Worker, f.Order]]] = {}
        for worker in workers:
            if (unit := self._units.get(worker)) is not None:
                by_agent.setdefault(unit.agent, []).append((worker, order))
        for agent, orders in by_agent.items():
            agent.deliver.remote(orders)

    async def _start_store(self) -> None:
        self._stores += 1
        store = self._store = make_store(self._spec.run_name, self._stores, self._me)
        try:
            host, port = await store.address.remote()
            await self._events.put(e.StoreReady(host, port))
            await store.ended.remote()
        except RayActorError:
            if not self._is_ending:
                await self._events.put(e.StoreLost("its process died"))

    async def _start_worker(self, worker: Worker) -> None:
        try:
            await self._place_and_start(worker)
        except RayError as error:  # such as a node agent that died just now
            await self._events.put(e.WorkerLost(worker, f"it could not be started: {error!r}"))

    async def _place_and_start(self, worker: Worker) -> None:
        spec = self._spec
        group = self._groups.get(worker.worker_id)
        if group is None:
            name = f"unit:{spec.run_name}:{worker.worker_id}"
            group = self._groups[worker.worker_id] = placement.reserve(name, spec.resources)
        while not await asyncio.to_thread(placement.is_reserved, group, PLACE_POLL_S):
            if self._is_ending:
                return
        node_id = await asyncio.to_thread(placement.node_of, group)
        agent = self._agent_of(node_id)
        try:
            await agent.adopt.remote(worker, group)
        except RayActorError:
            self._agents.pop(node_id, None)
            raise
        if self._is_ending:
            return
        actor = self._make_actor(worker, group)
        run = actor.run.remote(agent, self._worker_spec(worker))
        self._units[worker] = _Unit(actor, agent, run)
        await self._events.put(e.WorkerPlaced(worker))
        self._spawn(self._watch_worker(worker, self._units[worker]))

    def _worker_spec(self, worker: Worker) -> WorkerSpec:
        spec = self._spec
        threads = max(1, int(spec.resources.get("CPU", 1)))
        return WorkerSpec(spec.run_name, worker, spec.task, spec.settings, spec.import_paths, threads)

    def _make_actor(self, worker: Worker, group: PlacementGroup) -> ActorHandle:
        spec = self._spec
        others = {name: amount for name, amount in spec.resources.items() if name not in ("CPU", "GPU", "memory")}
        handle: ActorHandle = (
            ray.remote(WorkerActor)
            .options(
                name=f"worker:{spec.run_name}:{worker}",
                lifetime="detached",
                max_restarts=0,
                num_cpus=spec.resources.get("CPU", 0),
                num_gpus=spec.resources.get("GPU", 0),
                memory=spec.resources.get("memory"),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                runtime_env={"env_vars": {MARK: mark_of(spec.run_mark, worker)}},
            )
            .remote()
        )
        return handle

    async def _watch_worker(self, worker: Worker, unit: _Unit) -> None:
        cause, out_of_memory = "its process ended", False
        try:
            await unit.run
        except RayTaskError as error:  # our own code in the worker raised
            cause = f"internal error: {error}"
            ray.kill(unit.actor)
        except RayError as error:
            cause = "its process died"
            out_of_memory = "running low on memory" in str(error) or await self._ran_out_of_memory(unit.agent)
        if not self._is_ending:
            await self._events.put(e.WorkerLost(worker, cause, out_of_memory))
            self._units.pop(worker, None)
            await self._reap(worker, unit)

    async def _ran_out_of_memory(self, agent: ActorHandle) -> bool:
        try:
            return bool(await asyncio.wait_for(agent.ran_out_of_memory.remote(), 0.1))
        except (RayError, TimeoutError):
            return False  # no evidence, and recovery must not wait for it

    async def _kill(self, worker: Worker) -> None:
        if (unit := self._units.get(worker)) is not None:
            await self._reap(worker, unit)

    async def _reap(self, worker: Worker, unit: _Unit) -> None:
        try:
            await unit.agent.reap.remote(worker)
        except RayError:
            pass  # its workers end without it

    def _agent_of(self, node_id: str) -> ActorHandle:
        if node_id not in self._agents:
            agent = self._agents[node_id] = make_agent(self._spec.run_name, self._spec.run_mark, node_id, self._me)
            self._spawn(self._watch_agent(node_id, agent))
        return self._agents[node_id]

    async def _watch_agent(self, node_id: str, agent: ActorHandle) -> None:
        try:
            await agent.ended.remote()
        except RayActorError:
            if self._agents.get(node_id) is agent:
                del self._agents[node_id]  # its workers end by themselves; the next one to start there makes another

    async def _end(self, effect: f.EndRun) -> None:
        status, reason = effect.status, effect.reason
        try:
            late = await asyncio.wait_for(self._let_go(effect), END_S + LET_GO_S)
            if late:
                reason += f"; {', '.join(map(str, late))} did not return within {END_S:g} s and were ended"
        except Exception as error:  # the summary must be written and the driver told, whatever went wrong
            reason += f"; while ending: {error!r}"
        if status is RunStatus.FINISHED and (failed := self._failed_at_the_end()) is not None:
            status = RunStatus.FAILED
            reason = (
                f"training finished, but the task raised on worker {failed.worker} after it:\n{failed.failure.text}"
            )
        await asyncio.to_thread(self._chronicle.close, status, reason)
        self._has_ended.set()

    async def _let_go(self, effect: f.EndRun) -> list[Worker]:
        """End every actor and placement group; returns the workers that should have returned by themselves."""
        units = dict(self._units)
        self._send(tuple(units), effect)
        runs = {asyncio.ensure_future(_settled(unit.run)): worker for worker, unit in units.items()}
        is_finished = effect.status is RunStatus.FINISHED
        _, pending = await asyncio.wait(runs, timeout=END_S if is_finished else ABANDON_S) if runs else ((), ())
        for worker, unit in units.items():
            ray.kill(unit.actor)
            await self._reap(worker, unit)
        for group in self._groups.values():
            await asyncio.to_thread(remove_placement_group, group)
        for actor in [*self._agents.values(), *([self._store] if self._store is not None else [])]:
            ray.kill(actor)
        return sorted(runs[run] for run in pending) if is_finished else []

    def _failed_at_the_end(self) -> e.TaskFailed | None:
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, e.TaskFailed):
                return event
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._is_ending:
            # an error of ours must end the run with its words and not leave it waiting
            self._carry_out(f.EndRun(RunStatus.FAILED, f"internal error in the controller: {error!r}"))


async def _settled(run: ray.ObjectRef) -> None:
    try:
        await run
    except RayError:
        pass


def controller_name(run_name: str) -> str:
    """The actor's name in Ray."""
    return f"controller:{run_name}"


def make_controller(spec: ControllerSpec) -> ActorHandle:
    """Start the controller of a run on the driver's node."""
    handle: ActorHandle = (
        ray.remote(Controller)
        .options(
            name=controller_name(spec.run_name),
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            max_concurrency=1000,
        )
        .remote(spec)
    )
    return handle
