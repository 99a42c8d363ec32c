"""Workers that are much slower than the others, step after step: named, because everybody waits for them.

Pure. What is compared is the time of a micro-batch's forward and backward, so it does not matter how many a worker has.
Where that is wanted they get fewer logical ranks at the next step boundary, in proportion; what is trained and in which
order does not depend on who carries which.
"""

from __future__ import annotations

from statistics import median

from elastic_trainer.control import membership, ranks
from elastic_trainer.control.effects import Effect, ParkGeneration, Tell
from elastic_trainer.control.state import Limits, Phase, State
from elastic_trainer.control.watched import Seen
from elastic_trainer.vocabulary import Worker

TIMES = 1.8  # as long as the others: what a neighbour on the same core or a throttled clock costs, and noise does not
AGAIN = 1.3  # as long, and less: one that was named is as fast as the others again
STEPS = 5  # in a row
PAUSE_S = 60.0  # between two times that logical ranks are dealt anew, each of which costs a tenth of a second


def name(state: State) -> list[Effect]:
    """Say once of each that has been slow for so many steps."""
    if state.phase is not Phase.RUNNING:
        return []
    members = [s for _, s in sorted(state.seen.items()) if membership.member(state, s.worker, state.token) is not None]
    paced = [seen for seen in members if seen.where is not None and seen.where.pace_s > 0]
    told: list[Effect] = []
    for seen in paced:
        others = [other.where.pace_s for other in paced if other is not seen and other.where is not None]
        if others and _is_slow(seen, median(others)):
            told.append(Tell(_words(state, seen, median(others))))
        elif others and _is_fast_again(seen, median(others)):
            told.append(Tell(f"{seen.worker} is as fast as the others again"))
    return told


def relieve(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Deal the logical ranks anew when other members are slow than when they were dealt."""
    if not limits.rebalances or state.phase is not Phase.RUNNING or membership.all_done(state):
        return None
    slow = _slow(state)
    if slow == state.relieved or now < state.rebalance_at:
        return None
    names = ", ".join(map(str, slow))
    state.why = f"{names} is slow and gets fewer logical ranks" if slow else "nobody is slow any more"
    state.phase, state.leave_until = Phase.PARKING, now + limits.leave_s
    return [ParkGeneration(state.token, tuple(state.group), state.why)]


def shares(state: State, limits: Limits, now: float) -> tuple[int, ...]:
    """How many logical ranks each rank of the group that forms carries; empty: as even as can be."""
    state.relieved = _slow(state) if limits.rebalances else []
    if not state.relieved:
        return ()
    state.rebalance_at = now + PAUSE_S
    slowness = [state.seen[w.worker_id].slowness if w in state.relieved else 1.0 for w in state.group]
    return ranks.shares(slowness, limits.logical_ranks)


def next_deadline(state: State, limits: Limits, now: float) -> float | None:
    """When logical ranks may be dealt anew, if they are to be."""
    is_due = limits.rebalances and _slow(state) != state.relieved and state.rebalance_at > now
    return state.rebalance_at if is_due else None


def _slow(state: State) -> list[Worker]:
    seen = {each.worker for each in state.seen.values() if each.is_named}
    return [worker for worker in state.group if worker in seen]


def _is_slow(seen: Seen, others_s: float) -> bool:
    """Whether it has just become so for long enough."""
    assert seen.where is not None
    if seen.where.pace_s < TIMES * others_s:
        seen.slow_since = None
        return False
    if seen.slow_since is None:
        seen.slow_since = seen.where.steps
    if seen.is_named or seen.where.steps - seen.slow_since < STEPS:
        return False
    seen.is_named, seen.fast_since = True, None
    seen.slowness = seen.where.pace_s / others_s
    return True


def _is_fast_again(seen: Seen, others_s: float) -> bool:
    """Whether one that was named has just been so for long enough."""
    assert seen.where is not None
    if not seen.is_named or seen.where.pace_s >= AGAIN * others_s:
        seen.fast_since = None
        return False
    if seen.fast_since is None:
        seen.fast_since = seen.where.steps
    if seen.where.steps - seen.fast_since < STEPS:
        return False
    seen.is_named, seen.slow_since, seen.slowness = False, None, 1.0
    return True


def _words(state: State, seen: Seen, others_s: float) -> str:
    assert seen.where is not None
    mine_ms, others_ms = 1000 * seen.where.pace_s, 1000 * others_s
    return (
        f"{seen.worker} on host {state.hosts[seen.node].name} is slow: a micro-batch takes it {mine_ms:.0f} ms, the "
        f"others {others_ms:.0f} ms, and they wait for it. Look for another process on its cores, a throttled clock or "
        "a slow device"
    )
