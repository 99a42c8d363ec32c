"""Hosts that are being taken away: their workers leave at a step boundary, and others are started elsewhere.

Pure.
"""

from __future__ import annotations

from elastic_trainer.control import quorum
from elastic_trainer.control.effects import Effect, KillWorker, ParkGeneration, SaveGeneration, Tell
from elastic_trainer.control.events import NodesDraining
from elastic_trainer.control.state import Limits, Phase, State
from elastic_trainer.vocabulary import Stage, Worker, counted


def announced(state: State, event: NodesDraining, now: float) -> list[Effect]:
    """Which hosts are being taken away now, and which are not any more."""
    new = [node for node, _ in event.nodes if node not in state.draining]
    state.draining = [node for node, _ in event.nodes]
    left_s = dict(event.nodes)
    state.drain_is_told = state.drain_is_told and not new
    return [Tell(f"host {_name(state, node)} is being taken away{_when(left_s[node])}") for node in new]


def leave(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Members on such hosts leave, if enough others stay; if not, what they hold is saved."""
    going = [worker for worker in state.group if quorum.is_going(state, worker)]
    if state.phase is not Phase.RUNNING or not going:
        return None
    hosts = ", ".join(sorted({_name(state, quorum.node_of(state, worker)) for worker in going}))
    staying = len(state.group) - len(going) + sum(not quorum.is_going(state, w) for w in quorum.newcomers(state))
    if staying >= limits.min_workers:
        state.phase, state.why = Phase.PARKING, f"host {hosts} is being taken away"
        state.leave_until = now + limits.leave_s
        return [ParkGeneration(state.token, tuple(state.group), state.why)]
    if state.drain_is_told:
        return None
    state.drain_is_told = True
    least = counted(limits.min_workers, "worker")
    told: list[Effect] = [Tell(f"host {hosts} is being taken away, and the run needs {least}: it trains on there")]
    if len(going) == len(state.group):
        told.append(SaveGeneration(state.token, tuple(state.group), "no host that stays has the state"))
    return told


def move(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Workers on such hosts that no generation needs are started elsewhere."""
    if state.phase not in (Phase.FORMING, Phase.RUNNING):
        return None
    moved: list[Effect] = []
    for each in state.workers.values():
        is_idle = each.stage in (Stage.STARTING, Stage.WARM, Stage.FAULTY) and each.worker not in state.group
        if is_idle and quorum.is_going(state, each.worker):
            each.stage, each.holds, each.formed, each.start_at = Stage.GONE, None, False, now
            moved.append(KillWorker(each.worker, "its host is being taken away; another is started elsewhere"))
    return moved or None


def _name(state: State, node: str) -> str:
    return state.hosts[node].name if node in state.hosts else node[:12]


def _when(left_s: float) -> str:
    return f" in {left_s:.0f} s" if left_s > 0 else ""


def staying(state: State, limits: Limits, ready: list[Worker]) -> list[Worker]:
    """Of those that could form a generation the ones on hosts that stay, if they are enough and have the state."""
    kept = [worker for worker in ready if not quorum.is_going(state, worker)]
    return quorum.if_enough(state, limits, kept, ready)
