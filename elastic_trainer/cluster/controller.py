"""The controller: the one named actor of a run that lets the control machine decide and carries its effects out.

It holds no rank and no state of the model, and it may die: Ray starts it again, or another submission does, and the
next term takes over from log, manifests and living workers. Everything here is asynchronous: calls that block run in
threads, and no step of training waits for this process unless membership changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
import warnings
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, assert_never

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.cluster import placement
from elastic_trainer.cluster.chronicle import Chronicle
from elastic_trainer.cluster.lag import Lag
from elastic_trainer.cluster.messages import Acknowledged, Report
from elastic_trainer.cluster.records import Records, open_records
from elastic_trainer.cluster.rendezvous import make_store
from elastic_trainer.cluster.units import Units, UnitSpec, actor_names
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits
from elastic_trainer.errors import Damaged, ElasticTrainerError, Fenced, StorageError
from elastic_trainer.observability.standing import Standing
from elastic_trainer.vocabulary import NAMESPACE, RunStatus

END_S = 60.0  # for a finished task's own last words, such as writing its model; measured runs need milliseconds
LET_GO_S = 30.0  # for actors and placement groups; a second or two was seen
ABANDON_S = 1.0  # for a run that failed or was stopped: its workers have only to return
FLUSH_S = 5.0  # what a killed controller may cost a reader of the run's files
LINGER_S = 10.0  # an ended run's controller waits so long for somebody who wants to hear of the end
QUIET_S = 0.5  # who watches asks several times a second
WATCH_S = 0.25  # one answer to a watcher when there is no news
AGAIN_S = 1.0  # between tries to begin while the storage refuses


@dataclass(frozen=True)
class ControllerSpec:
    """All that the controller of a run needs to begin."""

    unit: UnitSpec
    limits: Limits
    retention: Retention
    config: dict[str, Any]  # as resolved; never holds credentials
    changed: dict[str, Any]
    code: str  # digest of the task's source
    after_term: int  # the run's newest term before this controller
    capacity: str


class Controller:
    """Async Ray actor; methods are for drivers and node agents."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec = spec
        self._run_name = spec.unit.run_name
        context = ray.get_runtime_context()
        self._me = context.current_actor
        with warnings.catch_warnings():  # Ray's property calls another one that Ray deprecates
            warnings.simplefilter("ignore")
            self._is_restart = bool(context.was_current_actor_reconstructed)
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._is_ready = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._is_ending = False
        self._asked_at = 0.0
        self._problem = ""  # why the run could not begin
        self._store: ActorHandle | None = None
        self._store_numbers = itertools.count(1)
        self._machine: Machine
        self._records: Records
        self._chronicle: Chronicle
        self._units: Units
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._live())

    # ---- for drivers

    async def describe(self) -> dict[str, Any]:
        """Who controls the run, and with what configuration; waits until it has begun or could not."""
        await self._is_ready.wait()
        return {
            "owner": self._spec.unit.run_mark,
            "config": self._spec.config,
            "code": self._spec.code,
            "folder": self._spec.unit.settings.run_url,
            "problem": self._problem,
            "has_ended": self._has_ended.is_set(),
        }

    async def stop(self, by: str, at_once: bool) -> None:
        """End the run after the step that is under way, saved, or at once."""
        await self._events.put(e.StopRequested(by, at_once))

    async def scale(self, least: int, most: int, by: str) -> str:
        """Have at least and at most so many workers from now on; returns what is wrong with that, in words."""
        await self._is_ready.wait()
        if self._problem or self._is_ending:
            return f"the run does not go on: {self._problem or 'it is ending'}"
        ranks = self._spec.unit.settings.plan.order.logical_ranks
        if not 1 <= least <= most:
            return f"{least}:{most} is not a range of workers. Write LEAST:MOST, such as 2:6."
        if most > ranks:
            return f"at most {ranks} workers have something to do: the run has {ranks} logical ranks, not {most}."
        await self._records.scaled(least, most, self._spec.unit.run_mark, self._chronicle)
        await self._events.put(e.ScaleRequested(least, most, by))
        return ""

    async def watch(self, cursor: int) -> Standing:
        """How the run stands and the news since `cursor`; waits a little when there is none."""
        await self._is_ready.wait()
        self._asked_at = time.monotonic()
        await self._chronicle.await_news(cursor, timeout_s=WATCH_S)
        pids = {str(w): p.pid for w, p in self._chronicle.processes.items() if w in self._units.living}
        return self._chronicle.snapshot(cursor, pids, has_ended=self._has_ended.is_set())

    async def summary(self) -> dict[str, Any]:
        """What `summary.json` says; waits for the end of the run."""
        await self._has_ended.wait()
        return self._chronicle.summary

    async def leave(self) -> None:
        """Somebody has heard of the end: nothing is left to do here, once all who watch have."""
        while self._has_ended.is_set() and time.monotonic() - self._asked_at < QUIET_S:
            await asyncio.sleep(QUIET_S / 4)
        if self._has_ended.is_set() or self._problem:
            self._exit()

    # ---- for the node agents

    async def report(self, term: int, reports: list[Report], beat: e.Beat) -> Acknowledged:
        """Take what workers of a node report, and how they are; returns which lines stand in files."""
        await self._is_ready.wait()
        if self._problem:
            await asyncio.Event().wait()  # this controller ends; the agents keep what they have for the next one
        self._units.places.heard(beat)
        await self._events.put(beat)  # first: it tells on which node the workers are
        for report in reports:
            if report.process is not None:
                self._chronicle.processes[report.worker] = report.process
            steps = self._chronicle.record(report.lines)
            if steps is not None:
                await self._events.put(e.StepsDone(report.worker, *steps))
                if skipped := self._chronicle.skipped_in_a_row:
                    await self._events.put(e.StepsSkipped(steps[0], skipped))
            for event in report.events:
                await self._events.put(event)
        return self._chronicle.acknowledged

    # ---- beginning

    async def _live(self) -> None:
        try:
            began = await self._begin_at_last()
        except Exception as error:
            is_ours = isinstance(error, ElasticTrainerError)
            self._problem = f"{error}" if is_ours else f"internal error in the controller: {error!r}"
            self._is_ending = True
            self._is_ready.set()
            await asyncio.sleep(LINGER_S)
            self._exit()
            return
        self._is_ready.set()
        self._spawn(self._flush_again_and_again())
        self._handle(began)
        if self._store is not None:
            self._spawn(self._watch_store(self._store))
        loop = asyncio.get_running_loop()

        def tell(nodes: dict[str, float]) -> None:
            loop.call_soon_threadsafe(self._drains, nodes)

        placement.watch_drains(tell)
        lag = Lag()
        self._spawn(lag.watch())
        while not self._is_ending:
            deadline = self._machine.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            event: e.Event | None = None
            if self._events.empty():
                with contextlib.suppress(TimeoutError):
                    event = await asyncio.wait_for(self._events.get(), timeout)
            else:
                event = self._events.get_nowait()
            if late_s := lag.take():
                self._handle(e.HeldUp(late_s))
            if event is not None:
                self._handle(event)
            elif not late_s:  # else what has come meanwhile is heard before time passes
                self._handle(e.TimePassed())

    def _drains(self, nodes: dict[str, float]) -> None:
        self._units.places.draining = set(nodes)
        self._events.put_nowait(e.NodesDraining(tuple(sorted(nodes.items()))))

    async def _begin_at_last(self) -> e.RunBegan:
        """Begin; where training goes on already, a storage that refuses is asked again as long as workers live."""
        deadline = time.monotonic() + self._spec.unit.orphan_s
        while True:
            try:
                return await self._begin()
            except (Fenced, Damaged):
                raise
            except StorageError as error:
                if not self._is_restart or time.monotonic() > deadline:
                    raise
                print(f"controller: the storage refuses, asking again: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(AGAIN_S)

    async def _begin(self) -> e.RunBegan:
        spec = self._spec
        values = {"owner": spec.unit.run_mark, "config": spec.config, "code": spec.code, "changed": spec.changed}
        self._records, audit, account = await asyncio.to_thread(
            open_records,
            spec.unit.settings,
            spec.retention,
            values,
            after_term=spec.after_term,
            is_restart=self._is_restart,
        )
        history = self._records.history
        limits = spec.limits
        if history.scaling is not None and history.scaling[0] == spec.unit.run_mark:
            _, least, most = history.scaling  # an earlier term was told so
            limits = replace(limits, min_workers=least, max_workers=most, schedule=())
        self._machine = Machine(limits, term=history.term)
        self._chronicle = Chronicle(spec.unit.settings, self._records.store, self._machine.state, audit, account)
        self._units = Units(
            spec.unit, history.term, self._me, self._records.marker, self._events.put_nowait, self._spawn
        )
        found = await self._units.find()
        if spec.unit.settings.routing is not None:
            await asyncio.to_thread(self._units.start_router)
        await self._find_store()
        if history.term > 1:
            self._chronicle.tell(f"term {history.term} of the run begins")
        return e.RunBegan(
            spec.capacity,
            history.generation,
            tuple(history.saved),
            found,
            has_store=self._store is not None,
            rollback=history.rollback,
        )

    async def _find_store(self) -> None:
        for name in await asyncio.to_thread(actor_names, self._run_name):
            if name.startswith("store:"):
                number = int(name.rpartition(":")[2])
                self._store_numbers = itertools.count(number + 1)
                try:
                    self._store = ray.get_actor(name, namespace=NAMESPACE)
                except ValueError:
                    continue  # it died just now

    # ---- deciding and carrying out

    def _handle(self, event: e.Event) -> None:
        if isinstance(event, e.PiecesWritten):
            self._records.take(event)
        self._chronicle.saw(event)
        for effect in self._machine.handle(event, time.monotonic()):
            self._chronicle.decided(effect)
            self._carry_out(effect)
        if self._chronicle.has_new_generation and not self._is_ending:
            self._chronicle.has_new_generation = False
            self._spawn(self._flush())  # the next controller must know of it

    async def _flush(self) -> None:
        await self._chronicle.flush()

    def _carry_out(self, effect: f.Effect) -> None:
        match effect:
            case f.StartWorker():
                self._spawn(self._units.start(effect.worker))
            case f.KillWorker():
                self._spawn(self._kill(effect))
            case f.RetireWorker():
                self._spawn(self._units.retire(effect.worker))
            case f.ProbeHosts():
                self._spawn(self._probe(effect))
            case f.FormGeneration():
                self._units.send(effect.ranks, effect)
            case f.AbortGeneration() | f.ParkGeneration() | f.SaveGeneration() | f.StopGeneration() | f.SettleSave():
                self._units.send(effect.workers, effect)
            case f.WritePieces():
                self._units.send(effect.writers, effect)
            case f.RunTaskAgain():
                self._units.send((effect.worker,), effect)
            case f.CommitSave():
                self._spawn(self._commit(effect))
            case f.RecordResumption():
                self._spawn(self._records.resumed(effect, self._chronicle))
            case f.StartStore():
                self._spawn(self._start_store())
            case f.Tell():
                pass  # the chronicle has told it
            case f.EndRun():
                self._is_ending = True
                self._spawn(self._end(effect))
            case _:
                assert_never(effect)

    async def _commit(self, effect: f.CommitSave) -> None:
        outcome = await self._records.commit(effect, self._chronicle)
        await self._events.put(outcome)
        if isinstance(outcome, e.StepSaved):
            await self._records.tidy(self._chronicle)

    async def _kill(self, effect: f.KillWorker) -> None:
        if stacks := await self._units.kill(effect.worker, with_stacks=effect.is_hung):
            self._chronicle.tell(f"{effect.worker} was doing:\n{stacks}")

    async def _probe(self, effect: f.ProbeHosts) -> None:
        try:
            answer = e.HostsProbed(effect.nodes, await self._units.probe(effect.nodes))
        except Exception as error:  # Ray's head does not answer, and nothing has been learned: it is asked again
            print(f"controller: hosts could not be probed: {error!r}", file=sys.stderr, flush=True)
            answer = e.HostsProbed((), ())
        await self._events.put(answer)

    async def _start_store(self) -> None:
        number = next(self._store_numbers)
        self._store = make_store(self._run_name, number, self._spec.unit.orphan_s)
        await self._watch_store(self._store)

    async def _watch_store(self, store: ActorHandle) -> None:
        try:
            await self._events.put(e.StoreReady(*await store.touch.remote()))
            await store.ended.remote()
        except RayActorError:
            if not self._is_ending:
                await self._events.put(e.StoreLost("its process died"))

    async def _flush_again_and_again(self) -> None:
        while not self._is_ending:
            await asyncio.sleep(FLUSH_S)
            await self._chronicle.flush()
            if self._store is not None:
                self._store.touch.remote()

    # ---- the end

    async def _end(self, effect: f.EndRun) -> None:
        status, reason = effect.status, effect.reason
        is_finished = status is RunStatus.FINISHED
        try:
            late = await asyncio.wait_for(
                self._units.end_all(effect, END_S if is_finished else ABANDON_S), END_S + LET_GO_S
            )
            if late and is_finished:
                reason += f"; {', '.join(map(str, late))} did not return within {END_S:g} s and were ended"
        except Exception as error:  # the summary must be written and drivers told, whatever went wrong
            reason += f"; while ending: {error!r}"
        if is_finished and (failed := self._failed_at_the_end()) is not None:
            status = RunStatus.FAILED
            reason = (
                f"training finished, but the task raised on worker {failed.worker} after it:\n{failed.failure.text}"
            )
        await self._close(status, reason)
        await asyncio.sleep(LINGER_S)
        self._exit()

    async def _close(self, status: RunStatus, reason: str) -> None:
        try:
            reason += await self._records.ended(status, reason)
            await self._records.remove_marker()
            await self._chronicle.close(status, reason)
        except Fenced as error:  # what follows is another controller's to write
            self._chronicle.summary = {**self._chronicle.facts(RunStatus.FAILED, str(error)), "path": ""}
        self._has_ended.set()

    def _failed_at_the_end(self) -> e.TaskFailed | None:
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, e.TaskFailed):
                return event
        return None

    def _exit(self) -> None:
        ray.kill(self._me)  # without a restart

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._is_ending:
            return
        # an error of ours must end the run with its words and not leave it waiting; one who was fenced only stops
        is_expected = isinstance(error, ElasticTrainerError | RayError)
        words = f"{error}" if is_expected else f"internal error in the controller: {error!r}"
        self._carry_out(f.EndRun(RunStatus.FAILED, words))
