"""What the present state calls for, one thing at a time: each rule says what is to be done now, or None for nothing.

Pure functions over the state; `machine.py` asks them in turn after every event until none has anything left to do.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_trainer.control import (
    draining,
    hysteresis,
    membership,
    quorum,
    ranks,
    rollback,
    saving,
    scaling,
    stragglers,
    suspicion,
)
from elastic_trainer.control.effects import (
    Effect,
    FormGeneration,
    KillWorker,
    ParkGeneration,
    RunTaskAgain,
    StartWorker,
    StopGeneration,
    Tell,
)
from elastic_trainer.control.membership import end, has_formed, stage_of
from elastic_trainer.control.state import MEMBER, Limits, Phase, State
from elastic_trainer.vocabulary import RunStatus, Stage, Token, Worker

Rule = Callable[[State, Limits, float], list[Effect] | None]


def end_placing(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """The minimum has found its resources, or did not in time."""
    if state.place_until is None:
        return None
    placed = sum(s.stage not in (Stage.GONE, Stage.PLACING) for s in state.workers.values())
    if placed >= limits.min_workers:
        state.place_until = None
        return []
    if now < state.place_until:
        return None
    return end(
        state,
        RunStatus.FAILED,
        f"only {placed} of at least {limits.min_workers} workers found their resources within "
        f"{limits.place_s:g} s; {state.capacity}",
    )


def save(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """The save in flight goes on."""
    return saving.next_effects(state)


def settle(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Ends a phase whose last report has come."""
    stages = [stage_of(state, worker) for worker in state.group]
    has_left = not any(stage in MEMBER for stage in stages)
    match state.phase:
        case Phase.FORMING | Phase.RUNNING | Phase.PARKING | Phase.STOPPING if _is_through(state):
            return end(state, RunStatus.FINISHED, f"every worker has done the last step{_saved(state)}")
        case Phase.FORMING if all(stage in (Stage.TRAINING, Stage.DONE) for stage in stages):
            state.phase, state.form_until, state.failed_forms = Phase.RUNNING, None, 0
            return []
        case Phase.FORMING if state.form_until is not None and all(has_formed(state, w) for w in state.group):
            state.form_until = None  # how long the state takes to arrive depends on its size
            return []
        case Phase.STOPPING if has_left and state.save is None:
            return end(state, RunStatus.STOPPED, state.why + _saved(state))
        case Phase.PARKING | Phase.ABORTING if has_left:
            state.phase, state.leave_until = Phase.WAITING, None
            state.last_group, state.group = state.group, []
            return []
    return None


def run_again(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """A task that raised is entered again."""
    stages = [each.stage for each in state.workers.values()]
    if state.phase not in (Phase.WAITING, Phase.RUNNING) or now < state.quiet_until:
        return None
    if not state.has_begun and Stage.STARTING in stages:
        return None  # at first start it matters whether the others meet the same exception
    faulty = [s for s in state.workers.values() if s.stage is Stage.FAULTY and s.start_at <= now]
    for each in faulty:
        each.stage, each.attempt = Stage.STARTING, each.attempt + 1
    return [RunTaskAgain(each.worker, "the task raised; trying again") for each in faulty] or None


def form(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """A generation is formed as soon as it can be."""
    if state.phase is not Phase.WAITING:
        return None
    best = quorum.most_advanced(state)
    sources = rollback.sources(state) if state.rolls_back else saving.sources(state, best)
    missing = quorum.waits_for(state, limits, now)
    if missing is not None:
        if missing.kind == "workers" and state.stop_by:
            return end(state, RunStatus.STOPPED, f"stopped by {state.stop_by}; {missing.reason}{_saved(state)}")
        if missing.kind == state.told or missing.kind in ("quiet", "reach"):
            return None
        state.told = missing.kind
        return [Tell(missing.reason)]
    if best is None and not sources and (used := _used(state)):
        return used
    effects: list[Effect] = rollback.void_state(state) if state.rolls_back else []
    if best is None and state.has_begun and state.done > 0 and not state.rolls_back:
        where = f"step {sources[0].steps}, the newest that was saved" if sources else "the beginning: nothing was saved"
        effects.append(Tell(f"no worker that holds the {state.done} done steps is left; going back to {where}"))
    state.told = ""
    state.why_is_symptom = False
    state.generation += 1
    state.token = Token(state.term, state.generation)
    if state.rolls_back and state.rollback is not None:
        state.rollback = state.rollback._replace(since=state.token)
    chosen = hysteresis.steady(state, limits, draining.staying(state, limits, scaling.wanted(state, limits)), now)
    state.group = list(ranks.assign(state.last_group, chosen, limits.max_workers))
    for worker in state.group:
        state.workers[worker.worker_id].stage = Stage.JOINING
    state.phase, state.formed_with = Phase.FORMING, (limits.min_workers, limits.max_workers)
    state.form_until = now + limits.form_s
    # what was done beyond, by ranks that are all gone, is void; nobody may take its lines for history
    state.goes_back = (best or 0) < state.done or (best is None and state.term > 1)
    state.has_begun = True
    assert state.store is not None
    is_fresh = best is None and not sources
    shares = stragglers.shares(state, limits, now)
    group = tuple(state.group)
    order = FormGeneration(state.token, group, state.store, is_fresh, state.why, sources, state.rollback, shares)
    return [*effects, order]


def stop(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """A stop that was asked for during a change of membership comes after it."""
    if not state.stop_by or state.phase is not Phase.RUNNING:
        return None
    state.phase, state.why = Phase.STOPPING, f"stopped by {state.stop_by}"
    state.leave_until = now + limits.leave_s
    return [StopGeneration(state.token, membership.members(state), state.why)]


def park(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """A newcomer is let in at a step boundary."""
    room = limits.max_workers - len(state.group)
    newcomers = hysteresis.settled(state, quorum.newcomers(state), now)[: max(0, room)]
    if quorum.untried(state, [*state.group, *newcomers]):
        return None
    if state.phase is not Phase.RUNNING or not newcomers or membership.all_done(state):
        return None
    state.why = f"{', '.join(map(str, newcomers))} joins"
    state.phase, state.leave_until = Phase.PARKING, now + limits.leave_s
    return [ParkGeneration(state.token, tuple(state.group), state.why)]


def start_due(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """A worker that is gone is replaced when its delay is over."""
    if state.phase is Phase.STOPPING or state.stop_by:
        return None
    due = [s for i, s in state.workers.items() if s.stage is Stage.GONE and s.start_at <= now and i < state.slots]
    for each in due:
        each.worker = Worker(each.worker.worker_id, each.worker.incarnation + 1)
        each.stage, each.attempt, each.holds, each.has_trained = Stage.PLACING, 0, None, False
    reason = "replaces a lost worker" if state.has_begun else "first start"
    return [StartWorker(each.worker, reason) for each in due] or None


RULES: tuple[Rule, ...] = (
    end_placing,
    save,
    suspicion.suspect,
    settle,
    run_again,
    form,
    stop,
    draining.leave,
    draining.move,
    scaling.leave,
    scaling.retire,
    park,
    stragglers.relieve,
    start_due,
)


def _is_through(state: State) -> bool:
    return membership.all_done(state) and state.save is None


def _used(state: State) -> list[Effect]:
    """Ready workers whose model is neither what the task built nor a state of the run; a fresh start needs new ones."""
    used = [each for each in state.workers.values() if each.stage is Stage.WARM and each.has_trained]
    for each in used:
        each.stage = Stage.STARTING  # until its death is reported
    return [KillWorker(each.worker, "its state is incomplete, and the run begins anew") for each in used]


def _saved(state: State) -> str:
    if not state.saved:
        return "; nothing was saved"
    return f"; saved after step {state.saved[-1].steps}"
