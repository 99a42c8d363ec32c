"""Workers that are much slower than the others, step after step: named, because everybody waits for them.

Pure. What is compared is the time of a micro-batch's forward and backward, so it does not matter how many a worker has.
"""

from __future__ import annotations

from statistics import median

from elastic_trainer.control import membership
from elastic_trainer.control.effects import Effect, Tell
from elastic_trainer.control.state import Phase, State
from elastic_trainer.control.watched import Seen

TIMES = 1.8  # as long as the others: what a neighbour on the same core or a throttled clock costs, and noise does not
STEPS = 5  # in a row


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
    return told


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
    seen.is_named = True
    return True


def _words(state: State, seen: Seen, others_s: float) -> str:
    assert seen.where is not None
    mine_ms, others_ms = 1000 * seen.where.pace_s, 1000 * others_s
    return (
        f"{seen.worker} on host {state.hosts[seen.node].name} is slow: a micro-batch takes it {mine_ms:.0f} ms, the "
        f"others {others_ms:.0f} ms, and they wait for it. Look for another process on its cores, a throttled clock or "
        "a slow device"
    )
