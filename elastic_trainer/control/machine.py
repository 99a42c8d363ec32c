"""The control machine of a run: `handle(event, now) -> effects`, for every change of membership one path.

A change goes: the group leaves (aborted after a fault, parked at a step boundary otherwise), the machine waits until a
generation can be formed, forms it, and runs. Events may come twice, late, or in another order: each says something
about one worker in one incarnation or generation, and what does not fit the present is ignored.

Pure: time comes in as `now` (seconds, any origin, never going back). Scenarios: tests/scenarios/.
"""

from __future__ import annotations

from typing import Any, assert_never

from elastic_trainer.control import events as e
from elastic_trainer.control import laws, quorum, ranks, recovery
from elastic_trainer.control.effects import (
    AbortGeneration,
    Effect,
    EndRun,
    FormGeneration,
    KillWorker,
    ParkGeneration,
    RunTaskAgain,
    StartStore,
    StartWorker,
    StopGeneration,
    Tell,
)
from elastic_trainer.control.state import ENDED, MEMBER, Limits, Phase, Stage, State, WorkerState
from elastic_trainer.vocabulary import RunStatus, Worker

_END_PHASE = {
    RunStatus.FINISHED: Phase.FINISHED,
    RunStatus.STOPPED: Phase.STOPPED,
    RunStatus.FAILED: Phase.FAILED,
}


class Machine:
    """Decides for one term of a run."""

    def __init__(self, limits: Limits, *, term: int = 1, state: State | None = None) -> None:
        self.limits = limits
        self.state = state or State(term=term)
        self._now = 0.0  # of the last event: what was due by then has been done

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON-able data; `Machine(limits, state=State.from_dict(...))` goes on from it."""
        return self.state.to_dict()

    def handle(self, event: e.Event, now: float) -> list[Effect]:
        """What follows from `event`."""
        if self.state.phase in ENDED:
            return []
        self._now = now
        effects = self._take(event, now)
        while self.state.phase not in ENDED:
            more = self._next(now)
            if more is None:
                break
            effects.extend(more)
        return effects

    def next_deadline(self) -> float | None:
        """When `TimePassed` must be handled at the latest; None when only another event can change anything."""
        state = self.state
        if state.phase in ENDED:
            return None
        gone = [each.start_at for each in state.workers.values() if each.stage is Stage.GONE]
        times: list[float | None] = [] if state.phase is Phase.STOPPING else [*gone]
        times += [state.place_until, state.form_until, state.leave_until]
        times += [s.start_at for s in state.workers.values() if s.stage is Stage.FAULTY and s.start_at > self._now]
        if state.phase is Phase.WAITING:
            # once past, these no longer hold anything up, and what does has a deadline of its own or is an event
            times += [time for time in (state.quiet_until, state.gather_until) if time is not None and time > self._now]
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Our own laws; tests call it after every event."""
        laws.check(self.state, self.limits)

    # ---- what each event changes

    def _take(self, event: e.Event, now: float) -> list[Effect]:
        match event:
            case e.RunBegan():
                return self._begin(event, now)
            case e.WorkerPlaced():
                self._move(event.worker, Stage.PLACING, Stage.STARTING)
            case e.WorkerWarm():
                self._warm(event, now)
            case e.WorkerLost():
                return self._lost(event, now)
            case e.GroupFormed():
                if (each := self._member(event.worker, event.token)) is not None:
                    each.formed = True
            case e.GenerationJoined():
                self._joined(event)
            case e.GroupLeft():
                return self._left(event, now)
            case e.StepsDone():
                if self._member(event.worker, event.token) is not None:
                    self._progress(event.worker, event.steps)
            case e.TaskFailed():
                return self._task_failed(event, now)
            case e.WorkerFinished():
                if (each := self._member(event.worker, event.token)) is not None:
                    each.stage = Stage.DONE
            case e.StoreReady():
                self.state.store = (event.host, event.port)
            case e.StoreLost():
                self.state.store = None
                return [StartStore(f"the rendezvous store is gone ({event.cause}); the group goes on without it")]
            case e.StopRequested():
                return self._stop(event, now)
            case e.TimePassed():
                return self._time_passed(now)
            case _:
                assert_never(event)
        return []

    def _begin(self, event: e.RunBegan, now: float) -> list[Effect]:
        if self.state.workers:
            return []
        self.state.capacity = event.capacity
        self.state.place_until = now + self.limits.place_s
        for worker_id in range(self.limits.max_workers):
            self.state.workers[worker_id] = WorkerState(Worker(worker_id, -1), start_at=now)
        return [StartStore("first start")]

    def _warm(self, event: e.WorkerWarm, now: float) -> None:
        each = self._of(event.worker)
        if each is None or each.stage not in (Stage.STARTING, Stage.PLACING) or event.attempt < each.attempt:
            return
        each.stage, each.attempt, each.holds = Stage.WARM, event.attempt, event.holds
        if self.state.gather_until is None and len(quorum.ready_workers(self.state)) >= self.limits.min_workers:
            self.state.gather_until = now + self.limits.gather_s

    def _lost(self, event: e.WorkerLost, now: float) -> list[Effect]:
        each = self._of(event.worker)
        if each is None or each.stage is Stage.GONE:
            return []
        was_member, stage = each.stage in MEMBER, each.stage
        each.stage, each.holds, each.formed = Stage.GONE, None, False
        delay = recovery.delay_before_restart(each.deaths, self.limits)
        each.deaths += 1
        each.start_at = now + delay
        why = f"{event.worker} lost while {stage.value}: {event.cause}"
        if event.out_of_memory:
            tries = recovery.record_try(self.state, recovery.OUT_OF_MEMORY, f"death of {event.worker}")
            if tries >= self.limits.tries:
                return self._end(
                    RunStatus.FAILED,
                    f"memory ran out {tries} times without a step done in between; last: {why}. "
                    "Use a smaller micro_batch, fewer workers a machine, or machines with more memory.",
                )
        if was_member:
            return self._fault(why, now)
        return [Tell(f"{why}; starting another in {delay:.0f} s" if delay else f"{why}; starting another")]

    def _joined(self, event: e.GenerationJoined) -> None:
        each = self._member(event.worker, event.token)
        if each is None or each.stage is not Stage.JOINING:
            return
        each.stage, each.formed, each.holds = Stage.TRAINING, True, event.steps
        self.state.done = max(self.state.done, event.steps)

    def _left(self, event: e.GroupLeft, now: float) -> list[Effect]:
        each = self._member(event.worker, event.token)
        if each is None:
            return []
        each.stage, each.formed = Stage.WARM, False
        each.holds = event.holds
        if event.holds is not None:
            self._progress(event.worker, event.holds)
        if event.cause is e.Left.COLLECTIVE_FAILED:
            self.state.failed_forms += self.state.phase is Phase.FORMING
            return self._fault(f"{event.worker} met a failed collective: {event.detail}", now, is_symptom=True)
        return []

    def _progress(self, worker: Worker, steps: int) -> None:
        if (each := self._of(worker)) is not None and each.holds is not None:
            each.holds = max(each.holds, steps)
        if steps > self.state.done:
            self.state.done = steps
            self.state.first_failure = ""
            self.state.failed_forms = 0
            for other in self.state.workers.values():
                if other.worker in self.state.group:
                    other.deaths = 0

    def _task_failed(self, event: e.TaskFailed, now: float) -> list[Effect]:
        each = self._of(event.worker)
        stale = each is None or each.stage in (Stage.FAULTY, Stage.GONE) or event.attempt < each.attempt
        if each is None or stale or (event.token is not None and event.token != self.state.token):
            return []
        was_member = each.stage in MEMBER
        if event.holds is not None:
            self.state.done = max(self.state.done, event.holds)
        each.stage, each.attempt, each.holds, each.formed = Stage.FAULTY, event.attempt, event.holds, False
        each.start_at = now + recovery.delay_before_restart(event.attempt, self.limits)
        tries = recovery.record_try(self.state, event.failure.signature, recovery.round_of(event))
        where = self._where(event)
        self.state.first_failure = self.state.first_failure or f"{where}:\n{event.failure.text}"
        if tries >= self.limits.tries:
            return self._end(
                RunStatus.FAILED,
                f"the task raised the same exception {tries} times without a step done in between, last on {where}. "
                f"First on {self.state.first_failure}",
            )
        if recovery.failed_everywhere_at_first(self.state):
            return self._end(
                RunStatus.FAILED,
                f"the task raised on every worker at first start. First on {self.state.first_failure}",
            )
        why = f"{event.failure.kind} in the task on {where} (try {tries} of {self.limits.tries})"
        return self._fault(why, now) if was_member else [Tell(why)]

    def _where(self, event: e.TaskFailed) -> str:
        if event.token is None or event.worker not in self.state.group:
            return f"worker {event.worker} ({event.failure.phase.value})"
        rank = self.state.group.index(event.worker)
        return f"rank {rank} (worker {event.worker}) at step {event.steps} ({event.failure.phase.value})"

    def _stop(self, event: e.StopRequested, now: float) -> list[Effect]:
        why = f"stopped by {event.by}"
        if event.at_once or self.state.phase not in (Phase.RUNNING, Phase.PARKING, Phase.STOPPING):
            return self._end(RunStatus.STOPPED, why)
        if self.state.phase is Phase.STOPPING:
            return []
        self.state.phase, self.state.why = Phase.STOPPING, why
        self.state.leave_until = now + self.limits.leave_s
        return [StopGeneration(self.state.token, tuple(self.state.group), why)]

    def _time_passed(self, now: float) -> list[Effect]:
        state = self.state
        if state.form_until is not None and now >= state.form_until:
            late = [w for w in state.group if not self._formed(w)]
            names = ", ".join(map(str, late))
            kills: list[Effect] = [
                KillWorker(w, f"did not form generation {state.generation} within {self.limits.form_s:g} s")
                for w in late
            ]
            fault = f"generation {state.generation} was not formed in {self.limits.form_s:g} s by {names}"
            state.failed_forms += 1
            return kills + self._fault(fault, now)
        if state.leave_until is not None and now >= state.leave_until:
            if state.phase is Phase.STOPPING:
                return self._end(RunStatus.STOPPED, f"{state.why}; the step did not end in {self.limits.leave_s:g} s")
            state.leave_until = now + self.limits.leave_s
            if state.phase is Phase.PARKING:
                return []  # a long step or evaluation; nobody is late who goes on training
            late = [w for w in state.group if self._stage(w) in MEMBER]
            return [KillWorker(w, f"did not leave its group within {self.limits.leave_s:g} s") for w in late]
        return []

    # ---- what the present state calls for, one thing at a time, until nothing is left to do

    def _next(self, now: float) -> list[Effect] | None:
        for rule in (self._end_placing, self._settle, self._run_again, self._form, self._park, self._start_due):
            effects = rule(now)
            if effects is not None:
                return effects
        return None

    def _start_due(self, now: float) -> list[Effect] | None:
        if self.state.phase is Phase.STOPPING:
            return None
        due = [s for s in self.state.workers.values() if s.stage is Stage.GONE and s.start_at <= now]
        for each in due:
            each.worker = Worker(each.worker.worker_id, each.worker.incarnation + 1)
            each.stage, each.attempt, each.holds = Stage.PLACING, 0, None
        reason = "first start" if self.state.generation == 0 else "replaces a lost worker"
        return [StartWorker(each.worker, reason) for each in due] or None

    def _end_placing(self, now: float) -> list[Effect] | None:
        if self.state.place_until is None:
            return None
        placed = sum(s.stage not in (Stage.GONE, Stage.PLACING) for s in self.state.workers.values())
        if placed >= self.limits.min_workers:
            self.state.place_until = None
            return []
        if now < self.state.place_until:
            return None
        return self._end(
            RunStatus.FAILED,
            f"only {placed} of at least {self.limits.min_workers} workers found their resources within "
            f"{self.limits.place_s:g} s; {self.state.capacity}",
        )

    def _settle(self, now: float) -> list[Effect] | None:
        """Ends a phase whose last report has come."""
        state = self.state
        stages = [self._stage(worker) for worker in state.group]
        match state.phase:
            case Phase.FORMING | Phase.RUNNING | Phase.PARKING | Phase.STOPPING if self._all_done():
                return self._end(RunStatus.FINISHED, "every worker has done the last step")
            case Phase.FORMING if all(stage in (Stage.TRAINING, Stage.DONE) for stage in stages):
                state.phase, state.form_until, state.failed_forms = Phase.RUNNING, None, 0
                return []
            case Phase.FORMING if state.form_until is not None and all(self._formed(w) for w in state.group):
                state.form_until = None  # how long the state takes to arrive depends on its size
                return []
            case Phase.STOPPING if not any(stage in MEMBER for stage in stages):
                return self._end(RunStatus.STOPPED, state.why)
            case Phase.PARKING | Phase.ABORTING if not any(stage in MEMBER for stage in stages):
                state.phase, state.leave_until = Phase.WAITING, None
                state.last_group, state.group = state.group, []
                return []
        return None

    def _run_again(self, now: float) -> list[Effect] | None:
        state = self.state
        stages = [each.stage for each in state.workers.values()]
        if state.phase not in (Phase.WAITING, Phase.RUNNING) or now < state.quiet_until:
            return None
        if state.generation == 0 and Stage.STARTING in stages:
            return None  # at first start it matters whether the others meet the same exception
        faulty = [s for s in state.workers.values() if s.stage is Stage.FAULTY and s.start_at <= now]
        for each in faulty:
            each.stage, each.attempt = Stage.STARTING, each.attempt + 1
        return [RunTaskAgain(each.worker, "the task raised; trying again") for each in faulty] or None

    def _form(self, now: float) -> list[Effect] | None:
        state = self.state
        if state.phase is not Phase.WAITING:
            return None
        if quorum.state_is_lost(state):
            first = f" First on {state.first_failure}" if state.first_failure else ""
            return self._end(
                RunStatus.FAILED,
                f"{state.why}. No worker with complete state is left, so the {state.done} done steps cannot be "
                f"continued. Start the run anew under another name.{first}",
            )
        missing = quorum.waits_for(state, self.limits, now)
        if missing is not None:
            if missing.kind == state.told or missing.kind == "quiet":
                return None
            state.told = missing.kind
            return [Tell(missing.reason)]
        state.told = ""
        state.why_is_symptom = False
        state.generation += 1
        state.group = list(ranks.assign(state.last_group, quorum.ready_workers(state), self.limits.max_workers))
        for worker in state.group:
            state.workers[worker.worker_id].stage = Stage.JOINING
        state.phase = Phase.FORMING
        state.form_until = now + self.limits.form_s
        assert state.store is not None
        is_fresh = quorum.most_advanced(state) is None
        return [FormGeneration(state.token, tuple(state.group), state.store, is_fresh, state.why)]

    def _park(self, now: float) -> list[Effect] | None:
        state = self.state
        room = self.limits.max_workers - len(state.group)
        newcomers = quorum.ready_workers(state)[: max(0, room)]
        if state.phase is not Phase.RUNNING or not newcomers:
            return None
        state.why = f"{', '.join(map(str, newcomers))} joins"
        state.phase, state.leave_until = Phase.PARKING, now + self.limits.leave_s
        return [ParkGeneration(state.token, tuple(state.group), state.why)]

    # ---- shared by several events

    def _fault(self, why: str, now: float, *, is_symptom: bool = False) -> list[Effect]:
        state = self.state
        if state.phase in (Phase.WAITING, Phase.ABORTING):
            if state.why_is_symptom and not is_symptom:  # a failed collective was noticed before what made it fail
                state.why, state.why_is_symptom = why, False
            return [] if is_symptom else [Tell(why)]
        if self._all_done():
            return []  # nothing is missing from the run any more
        members = tuple(worker for worker in state.group if self._stage(worker) in MEMBER)
        if state.phase is Phase.STOPPING:
            return [AbortGeneration(state.token, members, why)] if members else []
        # who neither forms nor leaves hangs where nothing takes long
        bound = self.limits.form_s if state.phase is Phase.FORMING else self.limits.leave_s
        state.phase, state.why, state.form_until = Phase.ABORTING, why, None
        state.why_is_symptom = is_symptom
        state.quiet_until = now + recovery.delay_before_forming(state.failed_forms, self.limits)
        state.leave_until = now + bound
        return [AbortGeneration(state.token, members, why)]

    def _end(self, status: RunStatus, reason: str) -> list[Effect]:
        state = self.state
        state.phase = _END_PHASE[status]
        state.form_until = state.leave_until = state.place_until = None
        return [EndRun(status, reason)]

    def _of(self, worker: Worker) -> WorkerState | None:
        each = self.state.workers.get(worker.worker_id)
        return each if each is not None and each.worker == worker else None

    def _member(self, worker: Worker, token: object) -> WorkerState | None:
        each = self._of(worker)
        return each if each is not None and each.stage in MEMBER and token == self.state.token else None

    def _move(self, worker: Worker, before: Stage, after: Stage) -> None:
        each = self._of(worker)
        if each is not None and each.stage is before:
            each.stage = after

    def _stage(self, worker: Worker) -> Stage:
        each = self._of(worker)
        return Stage.GONE if each is None else each.stage

    def _formed(self, worker: Worker) -> bool:
        each = self._of(worker)
        return each is not None and each.formed

    def _all_done(self) -> bool:
        living = [stage for stage in map(self._stage, self.state.group) if stage is not Stage.GONE]
        return len(living) > 0 and all(stage is Stage.DONE for stage in living)
