"""How many workers there shall be, changed while the run goes on.

Pure. Worker ids below `state.slots` are wanted; those at or above it leave at a step boundary. A new minimum counts
from the next generation on.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.control import quorum
from elastic_trainer.control.effects import Effect, ParkGeneration, RetireWorker, Tell
from elastic_trainer.control.events import ScaleRequested
from elastic_trainer.control.state import MEMBER, Limits, Phase, State, WorkerState
from elastic_trainer.vocabulary import Stage, Worker


def begin(state: State, limits: Limits, now: float) -> None:
    """The workers that the run may have, to be started."""
    state.slots = limits.max_workers + limits.spares
    for worker_id in range(state.slots):
        each = state.workers.setdefault(worker_id, WorkerState(Worker(worker_id, -1)))
        if each.stage is Stage.GONE:
            each.start_at = now


def change(state: State, limits: Limits, event: ScaleRequested, now: float) -> tuple[Limits, list[Effect]]:
    """The limits from now on."""
    changed = replace(limits, min_workers=event.least, max_workers=event.most, schedule=())  # it comes before that
    if changed == limits:
        return limits, []
    begin(state, changed, now)
    return changed, [Tell(f"{event.least} to {event.most} workers from now on, wanted by {event.by}")]


def scheduled(state: State, limits: Limits, now: float) -> tuple[Limits, list[Effect]]:
    """The limits after so many done steps."""
    due = [most for steps, most in limits.schedule if steps <= state.done]
    if not due or due[-1] == limits.max_workers:
        return limits, []
    changed = replace(limits, max_workers=due[-1])
    begin(state, changed, now)
    return changed, [Tell(f"at most {due[-1]} workers from step {state.done} on, by the schedule")]


def leave(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Members that are too many leave, or that have no place any more, if enough others have the state and one."""
    if state.phase is not Phase.RUNNING:
        return None
    kept = [worker for worker in state.group if worker.worker_id < state.slots]
    enough = len(kept) > 0 and len(kept) + len(quorum.newcomers(state)) >= limits.min_workers
    if len(state.group) <= limits.max_workers and not (len(kept) < len(state.group) and enough):
        return None
    state.phase, state.why = Phase.PARKING, f"at most {limits.max_workers} are wanted"
    state.leave_until = now + limits.leave_s
    return [ParkGeneration(state.token, tuple(state.group), state.why)]


def retire(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Workers outside the group that are not wanted any more end, as soon as a generation has their state."""
    if state.phase not in (Phase.FORMING, Phase.RUNNING):
        return None
    retired: list[Effect] = []
    for worker_id, each in state.workers.items():
        if worker_id >= state.slots and each.stage is not Stage.GONE and each.stage not in MEMBER:
            each.stage, each.holds, each.formed = Stage.GONE, None, False
            retired.append(RetireWorker(each.worker, "fewer workers are wanted"))
    return retired or None


def wanted(state: State, limits: Limits) -> list[Worker]:
    """Of the workers that could form a generation those that are wanted, if they have the state."""
    ready = quorum.ready_workers(state)
    kept = [worker for worker in ready if worker.worker_id < state.slots]
    return quorum.if_enough(state, limits, kept, ready)
