"""The control machine of a run: `handle(event, now) -> effects`, for every change of membership one path.

A change goes: the group leaves (aborted after a fault, parked at a step boundary otherwise), the machine waits until a
generation can be formed, forms it, and runs. Events may come twice, late, or in another order: each says something
about one worker in one incarnation or generation, and what does not fit the present is ignored.

Pure: time comes in as `now` (seconds, any origin, never going back). Scenarios: tests/scenarios/.
"""

from __future__ import annotations

from typing import Any, assert_never

from elastic_trainer.control import (
    draining,
    hysteresis,
    laws,
    membership,
    quorum,
    recovery,
    rollback,
    rules,
    saving,
    scaling,
    stragglers,
    suspicion,
)
from elastic_trainer.control import events as e
from elastic_trainer.control.effects import (
    AbortGeneration,
    Effect,
    KillWorker,
    ParkGeneration,
    RecordResumption,
    SettleSave,
    StartStore,
    Tell,
)
from elastic_trainer.control.membership import end, fault
from elastic_trainer.control.state import ENDED, MEMBER, Limits, Phase, State, WorkerState
from elastic_trainer.vocabulary import NO_GENERATION, RunStatus, Stage, Token, Worker


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
        self.limits, more = scaling.scheduled(self.state, self.limits, now)
        effects += more
        while self.state.phase not in ENDED:
            next_effects = self._next(now)
            if next_effects is None:
                break
            effects += next_effects
        return effects

    def _next(self, now: float) -> list[Effect] | None:
        for rule in rules.RULES:
            effects = rule(self.state, self.limits, now)
            if effects is not None:
                return effects
        return None

    def next_deadline(self) -> float | None:
        """When `TimePassed` must be handled at the latest; None when only another event can change anything."""
        state = self.state
        if state.phase in ENDED:
            return None
        gone = [s.start_at for i, s in state.workers.items() if s.stage is Stage.GONE and i < state.slots]
        is_stopping = state.phase is Phase.STOPPING or state.stop_by
        times: list[float | None] = [] if is_stopping else [*gone]
        times += [state.place_until, state.form_until, state.leave_until, state.stop_until]
        times.append(suspicion.next_deadline(state, self._now))
        times.append(hysteresis.next_deadline(state, self._now))
        if state.phase is Phase.RUNNING:
            times.append(stragglers.next_deadline(state, self.limits, self._now))
        if state.save is not None and (state.is_ending or not state.save.is_committing):
            times.append(state.save.until)
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
                return self._warm(event, now)
            case e.WorkerLost():
                return membership.lost(self.state, self.limits, event, now)
            case e.NodeRefused():
                if not self.state.has_begun and self._of(event.worker) is not None:
                    return end(self.state, RunStatus.FAILED, event.detail)
                return membership.lost(self.state, self.limits, e.WorkerLost(event.worker, event.detail), now)
            case e.GroupFormed():
                if (each := self._member(event.worker, event.token)) is not None:
                    each.formed = True
            case e.GenerationJoined():
                return self._joined(event, now)
            case e.GroupLeft():
                return self._left(event, now)
            case e.StepsDone():
                if self._member(event.worker, event.token) is not None:
                    self._progress(event.worker, event.steps)
            case e.StepsSkipped():
                return rollback.begin(self.state, self.limits, event, now)
            case e.TaskFailed():
                return self._task_failed(event, now)
            case e.WorkerFinished():
                if (each := self._member(event.worker, event.token)) is not None:
                    each.stage = Stage.DONE
            case e.SaveBegan():
                return saving.began(self.state, self.limits, event, now)
            case e.PiecesWritten():
                effects = self._copied(event, now)
                saving.written(self.state, event)
                return effects
            case e.PiecesFailed():
                return self._copied(event, now) + saving.failed(self.state, self.limits, event)
            case e.SaveFailed():
                return saving.failed(self.state, self.limits, event)
            case e.StepSaved():
                return saving.stands(self.state, event)
            case e.StoreReady():
                self.state.store = (event.host, event.port)
            case e.StoreLost():
                self.state.store = None
                return [StartStore(f"the rendezvous store is gone ({event.cause}); the group goes on without it")]
            case e.StopRequested():
                return self._stop(event, now)
            case e.Beat():
                return suspicion.heard(self.state, event, now)
            case e.HostsProbed():
                return suspicion.probed(self.state, self.limits, event, now)
            case e.ScaleRequested():
                self.limits, effects = scaling.change(self.state, self.limits, event, now)
                return effects
            case e.NodesDraining():
                return draining.announced(self.state, event, now)
            case e.TimePassed():
                return self._time_passed(now)
            case e.HeldUp():
                suspicion.excuse(self.state, event.seconds)
            case _:
                assert_never(event)
        return []

    def _copied(self, event: e.PiecesWritten | e.PiecesFailed, now: float) -> list[Effect]:
        """Who tells of its part has a copy, though the report of that may come later: another thread sends it."""
        return saving.began(self.state, self.limits, e.SaveBegan(event.worker, event.token, event.steps), now)

    def _begin(self, event: e.RunBegan, now: float) -> list[Effect]:
        state = self.state
        if state.workers:
            return []
        state.capacity, state.generation, state.saved = event.capacity, event.generation, list(event.saved)
        state.rollback = event.rollback
        state.done = max((each.steps for each in event.saved), default=0)
        if event.saved:
            state.why = f"resumes after step {event.saved[-1].steps}"
        self.limits, _ = scaling.scheduled(state, self.limits, now)
        scaling.begin(state, self.limits, now)
        effects = self._take_over(event.found, now)
        if not state.has_begun:
            state.place_until = now + self.limits.place_s
        return effects if event.has_store else [StartStore("first start"), *effects]

    def _take_over(self, found: tuple[e.FoundWorker, ...], now: float) -> list[Effect]:
        """Workers of an earlier term go on: they park at their next step boundary and form this term's generation."""
        state = self.state
        state.settled = (Token(state.term, 0), 0)
        token = max((each.token for each in found if each.stage in MEMBER), default=NO_GENERATION)
        old = [each.worker for each in found if each.stage in MEMBER and each.token < token]
        for each in found:
            stage = Stage.STARTING if each.worker in old else each.stage
            state.workers[each.worker.worker_id] = WorkerState(
                each.worker, stage, each.attempt, each.holds, start_at=now, has_trained=each.token > NO_GENERATION
            )
            state.done = max(state.done, each.holds or 0)
        state.generation = max([state.generation, *(each.token.generation for each in found)])
        living = tuple(each.worker for each in found if each.stage is not Stage.GONE)
        effects: list[Effect] = [KillWorker(worker, f"is not in generation {token}") for worker in old]
        if living:
            state.has_begun = True
            state.why = f"term {state.term} takes over"
            effects.append(SettleSave(0, Token(state.term, 0), living, "what was being saved is given up"))
        group = sorted((each.rank, each.worker) for each in found if each.stage in MEMBER and each.token == token)
        if group:
            state.token, state.group = token, [worker for _, worker in group]
            state.leave_until = now + self.limits.leave_s
            if membership.all_done(state) and not saving.is_saved(state, state.done):
                # the last save went down with the controller; where the group comes together again it is made
                state.phase = Phase.ABORTING
                effects.append(AbortGeneration(token, tuple(state.group), state.why))
            else:
                state.phase = Phase.PARKING
                effects.append(ParkGeneration(token, tuple(state.group), state.why))
        if any(each.is_stopping for each in found):
            state.stop_by = "an earlier request"
        return effects

    def _warm(self, event: e.WorkerWarm, now: float) -> list[Effect]:
        each = self._of(event.worker)
        if each is None or each.stage not in (Stage.STARTING, Stage.PLACING) or event.attempt < each.attempt:
            return []
        each.stage, each.attempt, each.holds = Stage.WARM, event.attempt, event.holds
        if self.state.gather_until is None and len(quorum.ready_workers(self.state)) >= self.limits.min_workers:
            self.state.gather_until = now + self.limits.gather_s
        return hysteresis.came(self.state, self.limits, each, now)

    def _joined(self, event: e.GenerationJoined, now: float) -> list[Effect]:
        each, state = self._member(event.worker, event.token), self.state
        if each is None or each.stage is not Stage.JOINING:
            return []
        each.joined_at = each.joined_at if each.has_trained else now
        each.stage, each.formed, each.holds, each.has_trained = Stage.TRAINING, True, event.steps, True
        state.done = max(state.done, event.steps)
        if not state.goes_back:
            return []
        state.goes_back = False
        saving.forget_beyond(state, event.steps)
        rolled_back = state.rollback if state.rolls_back else None
        state.rolls_back = False
        reason = f"the run goes on after step {event.steps}"
        return [RecordResumption(state.token, event.steps, reason, rolled_back)]

    def _left(self, event: e.GroupLeft, now: float) -> list[Effect]:
        each = self._member(event.worker, event.token)
        if each is None:
            return []
        each.stage, each.formed = Stage.WARM, False
        each.holds = event.holds
        if event.holds is not None:
            self._progress(event.worker, event.holds)
        if event.cause is e.Left.NOT_RESTORED:
            return self._not_restored(event, now)
        if event.cause is e.Left.COLLECTIVE_FAILED:
            self.state.failed_forms += self.state.phase is Phase.FORMING
            why = f"{event.worker} met a failed collective: {event.detail}"
            return fault(self.state, self.limits, why, now, is_symptom=True)
        return []

    def _not_restored(self, event: e.GroupLeft, now: float) -> list[Effect]:
        tries = recovery.record_try(self.state, recovery.RESTORE, f"generation {event.token}")
        if tries < self.limits.tries:
            why = (
                f"{event.worker} could not restore any saved step (try {tries} of {self.limits.tries}): {event.detail}"
            )
            return fault(self.state, self.limits, why, now)
        return end(
            self.state,
            RunStatus.FAILED,
            f"no saved step can be restored, and the run does not start over by itself: {event.detail}. Mend the "
            "storage and run the name again, or start under another name.",
        )

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
            return end(
                self.state,
                RunStatus.FAILED,
                f"the task raised the same exception {tries} times without a step done in between, last on {where}. "
                f"First on {self.state.first_failure}",
            )
        if recovery.failed_everywhere_at_first(self.state):
            return end(
                self.state,
                RunStatus.FAILED,
                f"the task raised on every worker at first start. First on {self.state.first_failure}",
            )
        why = f"{event.failure.kind} in the task on {where} (try {tries} of {self.limits.tries})"
        return fault(self.state, self.limits, why, now) if was_member else [Tell(why)]

    def _where(self, event: e.TaskFailed) -> str:
        if event.token is None or event.worker not in self.state.group:
            return f"worker {event.worker} ({event.failure.phase.value})"
        rank = self.state.group.index(event.worker)
        return f"rank {rank} (worker {event.worker}) at step {event.steps} ({event.failure.phase.value})"

    def _stop(self, event: e.StopRequested, now: float) -> list[Effect]:
        state = self.state
        if event.at_once or not state.has_begun:
            return end(state, RunStatus.STOPPED, f"stopped by {event.by}")
        if not state.stop_by:
            state.stop_by, state.stop_until = event.by, now + self.limits.leave_s + self.limits.save_s
        return []

    def _time_passed(self, now: float) -> list[Effect]:
        state, limits = self.state, self.limits
        if state.stop_until is not None and now >= state.stop_until:
            return end(state, RunStatus.STOPPED, f"stopped by {state.stop_by}; the step did not end in time")
        if effects := saving.time_passed(state, limits, now):
            return effects
        if state.form_until is not None and now >= state.form_until:
            late = [w for w in state.group if not membership.has_formed(state, w)]
            names = ", ".join(map(str, late))
            kills: list[Effect] = [
                KillWorker(w, f"did not form generation {state.generation} within {limits.form_s:g} s") for w in late
            ]
            why = f"generation {state.generation} was not formed in {limits.form_s:g} s by {names}"
            state.failed_forms += 1
            return kills + fault(state, limits, why, now)
        if state.leave_until is not None and now >= state.leave_until:
            if state.phase is Phase.STOPPING and membership.members(state):
                return end(state, RunStatus.STOPPED, f"{state.why}; the step did not end in {limits.leave_s:g} s")
            state.leave_until = now + limits.leave_s
            if state.phase in (Phase.PARKING, Phase.STOPPING):
                return []  # a long step or evaluation, or the save behind it; nobody is late who goes on training
            late = list(membership.members(state))
            return [KillWorker(w, "did not leave its group in time") for w in late]
        return []

    def _of(self, worker: Worker) -> WorkerState | None:
        return membership.of(self.state, worker)

    def _member(self, worker: Worker, token: object) -> WorkerState | None:
        return membership.member(self.state, worker, token)

    def _move(self, worker: Worker, before: Stage, after: Stage) -> None:
        each = self._of(worker)
        if each is not None and each.stage is before:
            each.stage = after
