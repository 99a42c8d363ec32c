"""Workers that come and go: each time that one is lost soon after it joined, it waits longer before it may join again.

Pure. A loss costs every other member about a second, and a newcomer a tenth more: in a group of eight a place that is
lost again within some ten seconds has cost more than it brought. Where the others are too few without it, it joins at
once.
"""

from __future__ import annotations

from elastic_trainer.control import quorum
from elastic_trainer.control.effects import Effect, Tell
from elastic_trainer.control.state import Limits, State, WorkerState
from elastic_trainer.vocabulary import Worker

SHORT_S = 2.0  # for each member of the group; with room for what a host costs that says nothing any more


def count(state: State, each: WorkerState, now: float) -> None:
    """A member is lost."""
    is_short = each.has_trained and now - each.joined_at < SHORT_S * len(state.group)
    each.short_stays = each.short_stays + 1 if is_short else 0


def came(state: State, limits: Limits, each: WorkerState, now: float) -> list[Effect]:
    """A worker is ready; from when on it may join."""
    if each.has_trained and now - each.joined_at >= SHORT_S * len(state.group):
        each.short_stays = 0
    each.settled_at = now + limits.settle_s[min(each.short_stays, len(limits.settle_s) - 1)]
    if each.settled_at <= now:
        return []
    return [
        Tell(
            f"{each.worker} is ready and joins in {each.settled_at - now:.0f} s at the earliest: its place was lost "
            f"{each.short_stays} times in a row soon after it had joined"
        )
    ]


def settled(state: State, workers: list[Worker], now: float) -> list[Worker]:
    """Those that may join."""
    return [worker for worker in workers if state.workers[worker.worker_id].settled_at <= now]


def steady(state: State, limits: Limits, ready: list[Worker], now: float) -> list[Worker]:
    """Of those that could form a generation the ones that may, if they are enough and have the state."""
    return quorum.if_enough(state, limits, settled(state, ready, now), ready)


def next_deadline(state: State, now: float) -> float | None:
    """When the next one may join."""
    times = [state.workers[w.worker_id].settled_at for w in quorum.ready_workers(state)]
    return min((time for time in times if time > now), default=None)
