"""Pretended workers for the control machine: they obey orders after random delays, and die or raise at random."""

from __future__ import annotations

import heapq
import itertools
import random

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import ENDED, Phase
from elastic_trainer.vocabulary import RunStatus, Token, Worker

LIMIT_S = 100_000.0


class Pretence:
    """A world of events in virtual time. Nothing is promised about the order in which reports arrive."""

    def __init__(
        self, machine: Machine, chooser: random.Random, *, last_step: int, kill_each_step: bool = False
    ) -> None:
        self.machine = machine
        self.chooser = chooser
        self.last_step = last_step
        self.kill_each_step = kill_each_step
        self.now = 0.0
        self.step_s = 8.0 if kill_each_step else 0.05  # so long that a replacement is there before the next step
        self.kills = 0
        self.status: RunStatus | None = None
        self.reason = ""
        self.all_state_died = False
        self._queue: list[tuple[float, int, e.Event]] = []
        self._count = itertools.count()
        self._holds: dict[Worker, int | None] = {}  # of living workers
        self._group: tuple[Worker, ...] = ()
        self._token = Token(0, 0)
        self._aborted = Token(0, 0)
        self._parked = Token(0, 0)
        self._joined: set[Worker] = set()
        self._next_step_at = 0.0

    def run(self) -> None:
        """Until the run ends, or time runs out."""
        self._decide(e.RunBegan())
        while self.machine.state.phase not in ENDED and self.now < LIMIT_S:
            due = self.machine.next_deadline()
            arrives = self._queue[0][0] if self._queue else None
            steps = self._next_step_at if self._is_stepping() else None
            self.now = max(self.now, min(t for t in (due, arrives, steps, self.now + 50.0) if t is not None))
            if arrives is not None and arrives <= self.now:
                self._decide(heapq.heappop(self._queue)[2])
            elif steps is not None and steps <= self.now:
                self._step()
            else:
                self._decide(e.TimePassed())

    def _decide(self, event: e.Event) -> None:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        for effect in effects:
            self._obey(effect)

    def _later(self, event: e.Event, within_s: float = 0.2) -> None:
        for _ in range(self.chooser.choice([1, 1, 1, 2])):  # some reports arrive twice
            heapq.heappush(self._queue, (self.now + self.chooser.random() * within_s, next(self._count), event))

    def _obey(self, effect: f.Effect) -> None:
        match effect:
            case f.StartWorker():
                self._holds[effect.worker] = None
                self._later(e.WorkerPlaced(effect.worker))
                self._later(e.WorkerWarm(effect.worker, 0, None), 5.0)
                if self.chooser.random() < 0.05:
                    self._later(e.WorkerLost(effect.worker, "killed while starting"), 5.0)
                    self._holds.pop(effect.worker)
            case f.StartStore():
                self._later(e.StoreReady("10.0.0.1", 4000))
            case f.FormGeneration():
                self._form(effect)
            case f.AbortGeneration():
                self._aborted = max(self._aborted, effect.token)
                for worker in effect.workers:
                    self._leave(worker, effect.token, e.Left.ORDERED)
            case f.ParkGeneration():
                self._parked = max(self._parked, effect.token)
            case f.RunTaskAgain():
                attempt = self.machine.state.workers[effect.worker.worker_id].attempt
                self._later(e.WorkerWarm(effect.worker, attempt, self._holds.get(effect.worker)), 1.0)
            case f.KillWorker():
                self._die(effect.worker)
            case f.EndRun():
                self.status, self.reason = effect.status, effect.reason
            case f.StopGeneration() | f.Tell():
                pass

    def _form(self, order: f.FormGeneration) -> None:
        self._token, self._group, self._joined = order.token, order.ranks, set()
        living = [worker for worker in order.ranks if worker in self._holds]
        held = [self._holds[worker] for worker in living if self._holds[worker] is not None]
        assert order.is_fresh or held, "formed without state"
        if len(living) < len(order.ranks) or self.chooser.random() < 0.05:
            for worker in living:
                self._leave(worker, order.token, e.Left.COLLECTIVE_FAILED)
            return
        steps = max((h for h in held if h is not None), default=0)
        for worker in living:
            self._holds[worker] = steps
            self._joined.add(worker)
            self._later(e.GroupFormed(worker, order.token))
            self._later(e.GenerationJoined(worker, order.token, steps))
        self._next_step_at = self.now + self.step_s

    def _is_stepping(self) -> bool:
        return bool(self._joined) and self._token > self._aborted

    def _step(self) -> None:
        self._next_step_at = self.now + self.step_s
        if any(worker not in self._holds for worker in self._group):
            for worker in sorted(self._joined):
                self._leave(worker, self._token, e.Left.COLLECTIVE_FAILED)
            return
        steps = max(self._holds[worker] or 0 for worker in self._group)
        if steps >= self.last_step:
            for worker in sorted(self._joined):
                self._later(e.WorkerFinished(worker, self._token))
            self._joined = set()
            return
        skewed = self.chooser.random() < 0.3  # a fault in mid-step may find some ranks one step ahead
        for worker in self._group:
            self._holds[worker] = steps + 1
        self._later(e.StepsDone(self._group[0], self._token, steps + 1))
        if self._parked >= self._token:
            for worker in sorted(self._joined):
                self._leave(worker, self._token, e.Left.PARKED)
        elif (len(self._group) > 1) if self.kill_each_step else (self.chooser.random() < 0.04):
            if skewed:
                self._holds[self._group[-1]] = steps
            self._misfortune(steps + 1)

    def _misfortune(self, steps: int) -> None:
        victim = self.chooser.choice(self._group)
        if not self.kill_each_step and self.chooser.random() < 0.4:
            failure = e.Failure(e.TaskPhase.LOSS, "ValueError", f"task.py:{self.chooser.random()}", "ValueError: x")
            attempt = self.machine.state.workers[victim.worker_id].attempt
            self._joined.discard(victim)
            self._later(e.TaskFailed(victim, attempt, self._token, steps, self._holds[victim], failure))
        else:
            self._die(victim)

    def _die(self, worker: Worker) -> None:
        if worker not in self._holds:
            return
        self.kills += 1
        had_state = self._holds.pop(worker) is not None
        self._joined.discard(worker)
        self._later(e.WorkerLost(worker, "killed"))
        others = [held for held in self._holds.values() if held is not None]
        self.all_state_died = self.all_state_died or (had_state and not others)

    def _leave(self, worker: Worker, token: Token, cause: e.Left) -> None:
        if worker in self._holds:
            self._joined.discard(worker)
            self._later(e.GroupLeft(worker, token, cause, self._holds[worker]))

    @property
    def phase(self) -> Phase:
        """Of the machine."""
        return self.machine.state.phase
