"""Whether a generation can be formed now, or what it waits for.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from elastic_trainer.control import reachability
from elastic_trainer.control.state import Limits, State
from elastic_trainer.vocabulary import Stage, Worker


def ready_workers(state: State) -> list[Worker]:
    """Workers that could be in a generation together now, by id."""
    warm = [each.worker for _, each in sorted(state.workers.items()) if each.stage is Stage.WARM]
    if not state.apart:
        return warm
    nodes: dict[str, list[int]] = {}
    for worker in warm:
        nodes.setdefault(node_of(state, worker), []).append(worker.worker_id)
    chosen = reachability.largest(nodes, state.apart, {node_of(state, worker) for worker in with_state(state, warm)})
    return [worker for worker in warm if node_of(state, worker) in chosen]


def newcomers(state: State) -> list[Worker]:
    """Workers that could join the present members, by id."""
    present = {node_of(state, worker) for worker in state.group}
    barred = {a for a, b in state.apart if b in present} | {b for a, b in state.apart if a in present}
    barred |= set(state.draining)
    return [w for w in ready_workers(state) if node_of(state, w) not in barred and w.worker_id < state.slots]


def node_of(state: State, worker: Worker) -> str:
    """The node of a worker; of one that has not been heard of, a name for itself."""
    seen = state.seen.get(worker.worker_id)
    return seen.node if seen is not None and seen.worker == worker else str(worker)


def is_going(state: State, worker: Worker) -> bool:
    """Whether a worker's host is being taken away."""
    return node_of(state, worker) in state.draining


def untried(state: State, workers: Iterable[Worker]) -> tuple[str, ...]:
    """The nodes of these workers, when it is not known of all of them who can reach whom."""
    nodes = {node_of(state, worker) for worker in workers} & set(state.hosts)
    return tuple(sorted(nodes)) if len(nodes) > 1 and not nodes <= set(state.reached) else ()


def most_advanced(state: State) -> int | None:
    """The highest number of done steps in the state of any living worker; None when nobody has state that counts."""
    if state.rolls_back:
        return None
    return max((each.holds for each in state.workers.values() if each.holds is not None), default=None)


def with_state(state: State, workers: Iterable[Worker]) -> list[Worker]:
    """Those of these workers whose state is the most advanced; all when nobody has state that counts."""
    best = most_advanced(state)
    return [worker for worker in workers if best is None or state.workers[worker.worker_id].holds == best]


def if_enough(state: State, limits: Limits, kept: list[Worker], ready: list[Worker]) -> list[Worker]:
    """Of those that could form a generation the kept ones, if they are enough and have the state; else all."""
    return kept if with_state(state, kept) and len(kept) >= limits.min_workers else ready


class Missing(NamedTuple):
    """What a generation waits for. A kind is told once, however its numbers change."""

    kind: str
    reason: str


def waits_for(state: State, limits: Limits, now: float) -> Missing | None:
    """What keeps a generation from being formed now; None when nothing does."""
    ready = ready_workers(state)
    if len(ready) < limits.min_workers:
        return Missing("workers", f"waiting for workers: {len(ready)} of at least {limits.min_workers} ready")
    if state.store is None:
        return Missing("store", "waiting for the rendezvous store")
    best = most_advanced(state)
    if not with_state(state, ready):
        return Missing("state", f"waiting for the worker that has done {best} steps")
    unheard = [steps for _, steps in state.unknown if best is None or steps > best]
    if unheard:
        return Missing("save", f"waiting to hear from the store whether step {max(unheard)} is saved")
    if untried(state, ready):
        return Missing("reach", "waiting to hear which hosts can reach each other")
    if now < state.quiet_until:
        return Missing("quiet", "waiting for further reports of the same fault")
    is_gathering = state.gather_until is not None and now < state.gather_until
    if not state.has_begun and is_gathering and len(ready) < limits.max_workers:
        late = [each for each in state.workers.values() if each.stage in (Stage.STARTING, Stage.FAULTY)]
        if late:
            return Missing("start", "waiting for workers that are still starting")
    return None
