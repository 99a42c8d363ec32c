"""The actors of a run: node agents, workers and their placement groups; started, found again, watched and ended.

All of them are detached and named, so that they outlive a controller and the next one finds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_trainer.cluster import placement
from elastic_trainer.cluster.node_agent import AgentSpec, agent_name, make_agent
from elastic_trainer.cluster.places import Places
from elastic_trainer.cluster.worker import MARK, WorkerActor, WorkerSpec, mark_of
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import NAMESPACE, Stage, Worker

ATTACH_S = 10.0  # for the agents' look at the storage; a healthy one answers in milliseconds
LOGS_S = 5.0  # for what workers printed to reach the storage, at the end of a run
REAP_S = 10.0  # killing takes milliseconds
PROBE_S = 2.0  # a connection that is possible stands in milliseconds, or after one repetition


@dataclass(frozen=True)
class UnitSpec:
    """What every unit of a run is made of; `task` is opened by workers only."""

    run_name: str
    run_mark: str  # marks the processes of this run, whatever other run has its name
    settings: TrainSettings
    resources: dict[str, float]
    task: bytes
    import_paths: tuple[str, ...]
    versions: dict[str, str]
    fence_after_s: float
    orphan_s: float


@dataclass
class Unit:
    """A worker's actor and what watches over it; `life` is the call that fails when its process dies."""

    actor: ActorHandle
    agent: ActorHandle
    life: ray.ObjectRef


class StorageNotShared(Exception):
    """A node cannot use the run's storage; the message names it."""


class Units:
    """The actors, for the controller of one term.

    Args:
        spec: Of the run.
        term: Of the controller.
        controller: Its handle.
        marker: A file in the store that every node must see.
        put: Takes events.
        spawn: Runs a coroutine beside the controller's others.
    """

    def __init__(
        self,
        spec: UnitSpec,
        term: int,
        controller: ActorHandle,
        marker: tuple[str, bytes],
        put: Callable[[e.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._spec = spec
        self._term = term
        self._controller = controller
        self._marker = marker
        self._put = put
        self._spawn = spawn
        self.places = Places(spec.run_name, spec.resources, spawn)
        self._agents: dict[str, ActorHandle] = {}  # by name
        self.living: dict[Worker, Unit] = {}
        self._given_up: dict[Worker, Unit] = {}  # until they are known to be killed
        self.is_ending = False

    # ---- an earlier term's

    async def find(self) -> tuple[e.FoundWorker, ...]:
        """Attach to the agents of an earlier term and watch their workers."""
        names = await asyncio.to_thread(actor_names, self._spec.run_name)
        agents = [name for name in names if name.startswith("agent:")]
        found = [each for group in await asyncio.gather(*map(self._attach_found, agents)) for each in group]
        known = {each.worker for each in found}
        for name in names:
            # without its agent, or unknown to it, a worker cannot be ordered: it makes room for the next incarnation
            if name.startswith("worker:") and (worker := _worker_of(name)) not in known:
                await _kill_by_name(name)
                found.append(e.FoundWorker(worker, Stage.GONE))
        await self.places.take_stock()
        return tuple(sorted(found, key=lambda each: each.worker))

    async def _attach_found(self, name: str) -> list[e.FoundWorker]:
        try:
            agent = ray.get_actor(name, namespace=NAMESPACE)
            found, groups = await asyncio.wait_for(agent.attach.remote(self._term, self._controller), ATTACH_S)
        except (RayError, ValueError, TimeoutError):
            return []
        self._agents[name] = agent
        self._spawn(self._watch_agent(name, agent))
        return [await self._adopted(each, agent, groups) for each in found]

    async def _adopted(
        self, found: e.FoundWorker, agent: ActorHandle, groups: dict[Worker, PlacementGroup]
    ) -> e.FoundWorker:
        worker = found.worker
        try:
            actor = ray.get_actor(_worker_name(self._spec.run_name, worker), namespace=NAMESPACE)
        except ValueError:  # it died while nobody watched; its place goes to another incarnation
            await self._reap(worker, agent)
            return e.FoundWorker(worker, Stage.GONE)
        self.places.adopt(worker, groups[worker])
        unit = self.living[worker] = Unit(actor, agent, actor.ended.remote())
        self._spawn(self._watch(worker, unit))
        return found

    def start_router(self) -> None:
        """Start Ray Data's part, or find that of an earlier term."""
        from elastic_trainer.data.router import RouterSpec, start_router  # it takes a second to import

        spec, settings = self._spec, self._spec.settings
        assert settings.routing is not None
        start_router(
            RouterSpec(
                spec.run_name,
                settings.plan.order,
                settings.train_data,
                settings.data_options,
                spec.task,
                spec.import_paths,
                settings.routing,
            )
        )

    # ---- new ones

    async def start(self, worker: Worker) -> None:
        """Place and start a worker; its life is told by events."""
        try:
            await self._place_and_start(worker)
        except StorageNotShared as problem:
            self._put(e.NodeRefused(worker, str(problem)))
        except placement.GroupGone as problem:
            self._put(e.WorkerLost(worker, f"its place was taken away: {problem}"))
        except RayError as error:  # such as a node agent that died just now
            self._put(e.WorkerLost(worker, f"it could not be started: {error!r}"))

    async def _place_and_start(self, worker: Worker) -> None:
        group = await self.places.reserve(worker)
        if group is None:
            return
        self._put(e.WorkerPlaced(worker))
        node_id = await self.places.node_of(group)
        if node_id is None:
            return
        agent = await self._agent_of(node_id)
        await agent.adopt.remote(self._term, worker, group)
        if self.is_ending:
            return
        actor = self._make_actor(worker, group)
        unit = self.living[worker] = Unit(actor, agent, actor.run.remote(agent, self._worker_spec(worker)))
        self._spawn(self._watch(worker, unit))

    def _worker_spec(self, worker: Worker) -> WorkerSpec:
        spec = self._spec
        threads = max(1, int(spec.resources.get("CPU", 1)))
        return WorkerSpec(
            spec.run_name,
            worker,
            spec.task,
            spec.settings,
            spec.import_paths,
            threads,
            spec.fence_after_s,
            spec.versions,
        )

    def _make_actor(self, worker: Worker, group: PlacementGroup) -> ActorHandle:
        spec = self._spec
        others = {name: amount for name, amount in spec.resources.items() if name not in ("CPU", "GPU", "memory")}
        handle: ActorHandle = (
            ray.remote(WorkerActor)
            .options(
                name=_worker_name(spec.run_name, worker),
                namespace=NAMESPACE,
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

    async def _agent_of(self, node_id: str) -> ActorHandle:
        name = self._agent_name(node_id)
        agent = self._agents.get(name)
        if agent is None:
            spec = self._spec
            host = await asyncio.to_thread(placement.host_of, node_id)
            agent = make_agent(spec.run_name, AgentSpec(spec.run_mark, node_id, host, spec.settings, spec.orphan_s))
            await agent.attach.remote(self._term, self._controller)
            if problem := await agent.look_at_storage.remote(self._marker):
                raise StorageNotShared(
                    f"node {host[0]} ({host[1]}) {problem}. Use a file system that all nodes share, or s3://…"
                )
            self._agents[name] = agent
            self._spawn(self._watch_agent(name, agent))
        return agent

    def _agent_name(self, node_id: str) -> str:
        return agent_name(self._spec.run_name, node_id)

    # ---- watching

    async def _watch_agent(self, name: str, agent: ActorHandle) -> None:
        try:
            await agent.ended.remote()
        except RayActorError:
            self.places.forget(lambda node_id: self._agent_name(node_id) == name)
            if self._agents.get(name) is agent:
                del self._agents[name]  # its workers end by themselves; the next one to start there makes another

    async def _watch(self, worker: Worker, unit: Unit) -> None:
        cause, out_of_memory = "its process ended", False
        try:
            await unit.life
        except RayTaskError as error:  # our own code in the worker raised
            cause = f"internal error: {error}"
            ray.kill(unit.actor)
        except RayError as error:
            cause = "its process died"
            if isinstance(error, RayActorError) and error.actor_init_failed:
                cause = f"it could not begin: {str(error).strip().splitlines()[-1]}"
            out_of_memory = "running low on memory" in str(error) or await self._ran_out_of_memory(unit.agent)
        self._given_up.pop(worker, None)  # nothing of it is left to be killed when its node is back
        if not self.is_ending:
            self._put(e.WorkerLost(worker, cause, out_of_memory))
            self.living.pop(worker, None)
            await self._reap(worker, unit.agent)

    async def _ran_out_of_memory(self, agent: ActorHandle) -> bool:
        try:
            return bool(await asyncio.wait_for(agent.ran_out_of_memory.remote(), 0.1))
        except (RayError, TimeoutError):
            return False  # no evidence, and recovery must not wait for it

    # ---- orders and the end

    def send(self, workers: Iterable[Worker], order: f.Order) -> None:
        """Give an order to living workers, one message a node."""
        by_agent: dict[ActorHandle, list[tuple[Worker, f.Order]]] = {}
        for worker in workers:
            if (unit := self.living.get(worker)) is not None:
                by_agent.setdefault(unit.agent, []).append((worker, order))
        for agent, orders in by_agent.items():
            agent.deliver.remote(self._term, orders)

    async def kill(self, worker: Worker, *, with_stacks: bool = False) -> str:
        """End a worker's process and its children; returns what its threads were doing, if that was asked for."""
        if (unit := self.living.pop(worker, None)) is not None:
            self._given_up[worker] = unit
        elif (unit := self._given_up.get(worker)) is None:
            return ""
        self.places.leave(worker)
        stacks = await self._reap(worker, unit.agent, with_stacks)
        if stacks is None:  # its node does not answer; when it is back the worker is killed again
            return ""
        self._given_up.pop(worker, None)
        return stacks

    async def retire(self, worker: Worker) -> None:
        """End a worker and give its place back."""
        await self.kill(worker)
        await self.places.give_back(worker)

    async def _reap(self, worker: Worker, agent: ActorHandle, with_stacks: bool = False) -> str | None:
        try:
            return str(await asyncio.wait_for(agent.reap.remote(self._term, worker, with_stacks), REAP_S))
        except (RayError, TimeoutError):
            return None  # its workers end without it

    async def probe(self, nodes: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Which pairs of these nodes cannot reach each other, by their agents' word.

        A pair counts when both fail to connect, or one of them does twice: a single packet may get lost.
        """
        where = await asyncio.to_thread(placement.listening, nodes)
        asked = [node for node in nodes if self._agent_name(node) in self._agents and node in where]
        first = await self._try({node: [other for other in asked if other != node] for node in asked}, where)
        again: dict[str, list[str]] = {}
        for node, other in first:
            if (other, node) not in first:
                again.setdefault(node, []).append(other)
        second = await self._try(again, where) if again else set()
        return tuple(sorted({(min(a, b), max(a, b)) for a, b in first if (b, a) in first or (a, b) in second}))

    async def _try(self, others: dict[str, list[str]], where: dict[str, tuple[str, int]]) -> set[tuple[str, str]]:
        """Which of these connections fail, each as (from, to)."""

        async def ask(node: str) -> list[str]:
            targets = {other: where[other] for other in others[node]}
            try:
                return list(await asyncio.wait_for(self._agents[self._agent_name(node)].reach.remote(targets), PROBE_S))
            except (RayError, TimeoutError, KeyError):
                return []  # a silent node is another matter

        answers = await asyncio.gather(*map(ask, others))
        return {(node, other) for node, failed in zip(others, answers, strict=True) for other in failed}

    async def end_all(self, order: f.EndRun, own_words_s: float) -> list[Worker]:
        """End every actor and placement group; returns the workers that did not return by themselves in time."""
        self.is_ending = self.places.is_ending = True
        units = dict(self.living)
        self.send(units, order)
        lives = {asyncio.ensure_future(_settled(unit.life)): worker for worker, unit in units.items()}
        _, pending = await asyncio.wait(lives, timeout=own_words_s) if lives else ((), ())
        for unit in units.values():
            ray.kill(unit.actor)
        await asyncio.gather(*(self._reap(worker, unit.agent) for worker, unit in units.items()))
        await self.places.release_all()
        await self._await_logs({unit.agent for unit in units.values()})
        # by name: what was being started just now is known to nobody yet
        for name in await asyncio.to_thread(actor_names, self._spec.run_name):
            if not name.startswith("controller:"):
                await _kill_by_name(name)
        return sorted(lives[life] for life in pending)

    @staticmethod
    async def _await_logs(agents: set[ActorHandle]) -> None:
        uploads = [asyncio.ensure_future(_settled(agent.kept_logs.remote())) for agent in agents]
        if uploads:
            await asyncio.wait(uploads, timeout=LOGS_S)


async def _settled(life: ray.ObjectRef) -> None:
    try:
        await life
    except RayError:
        pass


async def _kill_by_name(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return  # gone already


def _worker_name(run_name: str, worker: Worker) -> str:
    return f"worker:{run_name}:{worker}"


def _worker_of(name: str) -> Worker:
    worker_id, _, incarnation = name.rpartition(":")[2].removeprefix("w").partition(".")
    return Worker(int(worker_id), int(incarnation))


def actor_names(run_name: str) -> list[str]:
    """The names of a run's living actors: `agent:…`, `worker:…`, `store:…`, `controller:…`."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.split(":")[1:2] == [run_name])
