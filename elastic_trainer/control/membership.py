"""Who belongs to the present generation, and the two ways out of it: a fault, and the end of the run.

Pure functions over the state; they change it and return what is to be done.
"""

from __future__ import annotations

from elastic_trainer.control import hysteresis, recovery
from elastic_trainer.control.effects import AbortGeneration, Effect, EndRun, Tell
from elastic_trainer.control.events import WorkerLost
from elastic_trainer.control.state import MEMBER, Limits, Phase, State, WorkerState
from elastic_trainer.vocabulary import RunStatus, Stage, Worker

_END_PHASE = {
    RunStatus.FINISHED: Phase.FINISHED,
    RunStatus.STOPPED: Phase.STOPPED,
    RunStatus.FAILED: Phase.FAILED,
}


def of(state: State, worker: Worker) -> WorkerState | None:
    """What is known of a worker, None when it is an incarnation of the past."""
    each = state.workers.get(worker.worker_id)
    return each if each is not None and each.worker == worker else None


def member(state: State, worker: Worker, token: object) -> WorkerState | None:
    """The same, of a member of the present generation only."""
    each = of(state, worker)
    return each if each is not None and each.stage in MEMBER and token == state.token else None


def stage_of(state: State, worker: Worker) -> Stage:
    """Where a worker stands; an incarnation of the past is gone."""
    each = of(state, worker)
    return Stage.GONE if each is None else each.stage


def has_formed(state: State, worker: Worker) -> bool:
    """Whether a member's process group stands."""
    each = of(state, worker)
    return each is not None and each.formed


def members(state: State) -> tuple[Worker, ...]:
    """Those of the present group that have not left it."""
    return tuple(worker for worker in state.group if stage_of(state, worker) in MEMBER)


def all_done(state: State) -> bool:
    """Whether every living member has done the last step."""
    living = [stage for stage in (stage_of(state, worker) for worker in state.group) if stage is not Stage.GONE]
    return len(living) > 0 and all(stage is Stage.DONE for stage in living)


def fault(state: State, limits: Limits, why: str, now: float, *, is_symptom: bool = False) -> list[Effect]:
    """Something made the present generation impossible: everybody leaves it.

    `is_symptom`: it tells that something happened and not what, which another report will.
    """
    if state.phase in (Phase.WAITING, Phase.ABORTING):
        if state.why_is_symptom and not is_symptom:  # a failed collective was noticed before what made it fail
            state.why, state.why_is_symptom = why, False
        return [] if is_symptom else [Tell(why)]
    if all_done(state):
        return []  # nothing is missing from the run any more
    # who neither forms nor leaves hangs where nothing takes long
    bound = limits.leave_s
    if state.phase is Phase.FORMING:
        bound, state.reached = limits.form_s, []  # it may be that some do not reach each other any more
    left = members(state)
    state.phase, state.why, state.form_until = Phase.ABORTING, why, None
    state.why_is_symptom = is_symptom
    state.quiet_until = now + recovery.delay_before_forming(state.failed_forms, limits)
    state.leave_until = now + bound
    return [AbortGeneration(state.token, left, why)]


def lost(state: State, limits: Limits, event: WorkerLost, now: float) -> list[Effect]:
    """A worker's process is gone, or is taken to be."""
    each = of(state, event.worker)
    if each is None or each.stage is Stage.GONE:
        return []
    was_member, stage = each.stage in MEMBER, each.stage
    if was_member:
        hysteresis.count(state, each, now)
    each.stage, each.holds, each.formed = Stage.GONE, None, False
    delay = recovery.delay_before_restart(each.deaths, limits)
    each.deaths += 1
    each.start_at = now + delay
    why = f"{event.worker} lost while {stage.value}: {event.cause}"
    if event.out_of_memory:
        # one shortage may take several members at once, which is one try
        where = f"generation {state.token}" if was_member else f"death of {event.worker}"
        tries = recovery.record_try(state, recovery.OUT_OF_MEMORY, where)
        if tries >= limits.tries:
            return end(
                state,
                RunStatus.FAILED,
                f"memory ran out {tries} times without a step done in between; last: {why}. "
                "Use a smaller micro_batch, fewer workers a machine, or machines with more memory.",
            )
    if was_member:
        return fault(state, limits, why, now)
    return [Tell(f"{why}; starting another in {delay:.0f} s" if delay else f"{why}; starting another")]


def end(state: State, status: RunStatus, reason: str) -> list[Effect]:
    """The run ends."""
    state.phase = _END_PHASE[status]
    state.form_until = state.leave_until = state.place_until = None
    return [EndRun(status, reason)]
