"""Pretended workers for the control machine: they obey orders after random delays, and die or raise at random."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import ENDED
from elastic_trainer.vocabulary import NO_GENERATION, RunStatus, SavedStep, Stage, Token, Worker

LIMIT_S = 100_000.0
SAVE_EVERY = 7  # steps


@dataclass
class Pretended:
    """What is true of a living worker, whatever the machine believes."""

    holds: int | None = None
    stage: Stage = Stage.STARTING
    attempt: int = 0
    token: Token = NO_GENERATION
    rank: int = 0
    copy: tuple[int, Token] | None = None  # of a save that is not settled


class Pretence:
    """A world of events in virtual time. Nothing is promised about the order in which reports arrive.

    Workers and the log are the truth; a machine may be lost at any moment and another takes over from them.
    """

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
        self.log: list[SavedStep] = []  # what stands, oldest first
        self.highest = 0  # done by anybody
        self.workers: dict[Worker, Pretended] = {}  # the living
        self._queue: list[tuple[float, int, e.Event]] = []
        self._count = itertools.count()
        self._group: tuple[Worker, ...] = ()
        self._token = NO_GENERATION
        self._aborted = NO_GENERATION
        self._parked = NO_GENERATION
        self._stopped = NO_GENERATION
        self._next_step_at = 0.0

    def begin(self) -> None:
        """The first event of the present machine."""
        found = [
            e.FoundWorker(worker, each.stage, each.attempt, each.holds, each.token, each.rank, self._is_stopping(each))
            for worker, each in sorted(self.workers.items())
        ]
        self._decide(e.RunBegan("", self._token.generation, tuple(self.log), tuple(found)))

    def next_term(self) -> None:
        """The controller dies, and with it what was on its way to it; another takes over."""
        self._queue.clear()
        self.machine = Machine(self.machine.limits, term=self.machine.state.term + 1)
        self.begin()

    def advance(self) -> None:
        """Until the next thing happens."""
        due = self.machine.next_deadline()
        arrives = self._queue[0][0] if self._queue else None
        steps = self._next_step_at if self._is_stepping() else None
        self.now = max(self.now, min(t for t in (due, arrives, steps, self.now + 50.0) if t is not None))
        if arrives is not None and arrives <= self.now:
            self._decide(heapq.heappop(self._queue)[2])
        elif steps is not None and steps <= self.now:
            self.step()
        else:
            self._decide(e.TimePassed())

    def run(self) -> None:
        """Until the run ends, or time runs out."""
        self.begin()
        while self.machine.state.phase not in ENDED and self.now < LIMIT_S:
            if not self.kill_each_step and self.chooser.random() < 0.001:
                self.next_term()
            self.advance()

    def decide(self, event: e.Event) -> None:
        """Let something happen to the machine now."""
        self._decide(event)

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
                assert effect.worker not in self.workers, "a living worker was started again"
                self.workers[effect.worker] = Pretended(stage=Stage.WARM)
                self._later(e.WorkerPlaced(effect.worker))
                self._later(e.WorkerWarm(effect.worker, 0, None), 5.0)
                if self.chooser.random() < 0.05:
                    self.die(effect.worker)
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
            case f.StopGeneration():
                self._stopped = max(self._stopped, effect.token)
            case f.RunTaskAgain() if effect.worker in self.workers:
                each = self.workers[effect.worker]
                each.attempt, each.stage = each.attempt + 1, Stage.WARM
                self._later(e.WorkerWarm(effect.worker, each.attempt, each.holds), 1.0)
            case f.KillWorker():
                self.die(effect.worker)
            case f.WritePieces():
                for worker in effect.writers:
                    if worker in self.workers and self.workers[worker].copy == (effect.steps, effect.token):
                        self._write(worker, effect.steps, effect.token, effect.attempt)
            case f.CommitSave():
                self._commit(effect)
            case f.SettleSave():
                for worker in effect.workers:
                    each = self.workers.get(worker, Pretended())
                    if each.copy is not None and (each.copy[1], each.copy[0]) <= (effect.token, effect.steps):
                        each.copy = None
            case f.RecordResumption():
                self.log = [saved for saved in self.log if saved.steps <= effect.steps]
            case f.EndRun():
                self.status, self.reason = effect.status, effect.reason
            case f.Tell() | f.RunTaskAgain():
                pass

    def _form(self, order: f.FormGeneration) -> None:
        assert order.token > self._token, "generations only grow"
        self._token, self._group = order.token, order.ranks
        living = [worker for worker in order.ranks if worker in self.workers]
        for worker in living:
            self.workers[worker].token, self.workers[worker].rank = order.token, order.ranks.index(worker)
        held = [h for worker in living if (h := self.workers[worker].holds) is not None]
        is_whole = len(living) == len(order.ranks)  # else it fails before anybody asks for state
        assert order.is_fresh or held or order.sources or not is_whole, "formed without state"
        assert not order.is_fresh or not self.log, "began anew although there are saved steps"
        if len(living) < len(order.ranks) or self.chooser.random() < 0.05:
            for worker in living:
                self.workers[worker].stage = Stage.JOINING
                self._leave(worker, order.token, e.Left.COLLECTIVE_FAILED)
            return
        restored = [saved.steps for saved in order.sources if self.chooser.random() < 0.98][:1]
        if not held and order.sources and not restored:
            for worker in living:
                self.workers[worker].stage = Stage.JOINING
                self._leave(worker, order.token, e.Left.NOT_RESTORED)
            return
        assert not held or max(held) >= max([s.steps for s in self.log], default=0) or order.sources, (
            "went too far back"
        )
        steps = max(held + restored, default=0)
        for worker in living:
            each = self.workers[worker]
            each.holds, each.stage = steps, Stage.TRAINING
            self._later(e.GroupFormed(worker, order.token))
            self._later(e.GenerationJoined(worker, order.token, steps))
        self._next_step_at = self.now + self.step_s

    def _members(self) -> list[Worker]:
        stages = (Stage.TRAINING, Stage.DONE)
        return [w for w in self._group if w in self.workers and self.workers[w].stage in stages]

    def _is_stepping(self) -> bool:
        members = [w for w in self._members() if self.workers[w].stage is Stage.TRAINING]
        return bool(members) and self._token > self._aborted

    def step(self) -> None:
        """The present generation does a step, or finds that it cannot."""
        self._next_step_at = self.now + self.step_s
        if not self._is_stepping():
            return
        if len(self._members()) < len(self._group):
            for worker in self._members():
                self._leave(worker, self._token, e.Left.COLLECTIVE_FAILED)
            return
        steps = max(self.workers[worker].holds or 0 for worker in self._group)
        if steps >= self.last_step:
            self._save(steps)
            for worker in self._members():
                self.workers[worker].stage = Stage.DONE
                self._later(e.WorkerFinished(worker, self._token), 0.3)
            return
        skewed = self.chooser.random() < 0.3  # a fault in mid-step may find some ranks one step ahead
        for worker in self._group:
            self.workers[worker].holds = steps + 1
        self.highest = max(self.highest, steps + 1)
        self._later(e.StepsDone(self._group[0], self._token, steps + 1))
        is_stopped = self._stopped >= self._token
        if is_stopped or (steps + 1) % SAVE_EVERY == 0:
            self._save(steps + 1)
        if is_stopped or self._parked >= self._token:
            for worker in self._members():
                self._leave(worker, self._token, e.Left.STOPPED if is_stopped else e.Left.PARKED)
        elif (len(self._group) > 1) if self.kill_each_step else (self.chooser.random() < 0.04):
            if skewed:
                self.workers[self._group[-1]].holds = steps
            self._misfortune(steps + 1)

    def _save(self, steps: int) -> None:
        if any(self.workers[worker].copy is not None for worker in self._members()):
            return
        for worker in self._members():
            self.workers[worker].copy = (steps, self._token)
            self._later(e.SaveBegan(worker, self._token, steps), 0.05)
            self._write(worker, steps, self._token, 0)

    def _write(self, worker: Worker, steps: int, token: Token, attempt: int) -> None:
        if self.chooser.random() < 0.1:
            self._later(e.PiecesFailed(worker, token, steps, attempt, "the store refuses"), 2.0)
        else:
            self._later(e.PiecesWritten(worker, token, steps, attempt), 2.0)

    def _commit(self, effect: f.CommitSave) -> None:
        """The outcome of the storage calls may be good, bad, or unknown for long: then they are repeated."""
        outcome = self.chooser.choice(["good", "good", "good", "bad", "unknown"])
        if outcome == "bad":
            self._later(e.SaveFailed(effect.token, effect.steps, "the store refuses"), 1.0)
            return
        assert not self.log or self.log[-1].steps <= effect.steps, "an older step was saved after a newer one"
        saved = SavedStep(effect.steps, f"steps/{effect.steps}.{effect.token}.{effect.attempt}", "0")
        self.log = [each for each in self.log if each.path != saved.path] + [saved]
        self._later(e.StepSaved(effect.token, saved), 1.0 if outcome == "good" else 20.0)

    def _misfortune(self, steps: int) -> None:
        victim = self.chooser.choice(self._group)
        if not self.kill_each_step and self.chooser.random() < 0.4:
            self.fail(victim, steps)
        else:
            self.die(victim)

    def fail(self, victim: Worker, steps: int) -> None:
        """The task raises on a worker."""
        failure = e.Failure(e.TaskPhase.LOSS, "ValueError", f"task.py:{self.chooser.random()}", "ValueError: x")
        each = self.workers[victim]
        each.stage = Stage.FAULTY
        self._later(e.TaskFailed(victim, each.attempt, self._token, steps, each.holds, failure))

    def die(self, worker: Worker) -> None:
        """A worker's process is gone."""
        if worker not in self.workers:
            return
        self.kills += 1
        del self.workers[worker]
        self._later(e.WorkerLost(worker, "killed"))

    def _leave(self, worker: Worker, token: Token, cause: e.Left) -> None:
        each = self.workers.get(worker)
        if each is not None and each.token == token and each.stage in (Stage.JOINING, Stage.TRAINING, Stage.DONE):
            each.stage = Stage.WARM
            self._later(e.GroupLeft(worker, token, cause, each.holds))

    def _is_stopping(self, each: Pretended) -> bool:
        return each.token > NO_GENERATION and self._stopped >= each.token
