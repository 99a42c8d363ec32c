from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.control.laws import check
from elastic_trainer.control.state import Limits, Phase, Stage, State, WorkerState
from elastic_trainer.vocabulary import Worker

LIMITS = Limits(2, 3, place_s=1, form_s=1, leave_s=1)
A, B = Worker(0, 0), Worker(1, 0)


def running(**fields: Any) -> State:
    state = State(term=1, phase=Phase.RUNNING, generation=1, group=[A, B])
    state.workers = {w.worker_id: WorkerState(w, Stage.TRAINING, holds=3, formed=True) for w in (A, B)}
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def test_a_sound_state_passes() -> None:
    check(running(), LIMITS)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"group": [A, A]}, "two ranks"),
        ({"group": [A]}, "outside the group|below the minimum"),
        ({"phase": Phase.WAITING}, "a group without a generation"),
        ({"phase": Phase.PARKING}, "leaving without a bound"),
        ({"leave_until": 5.0}, "leaving without a bound"),
        ({"form_until": 5.0}, "forming without a bound"),
        ({"workers": {0: WorkerState(A, Stage.TRAINING), 1: WorkerState(B, Stage.WARM)}}, "a member missing"),
    ],
)
def test_a_broken_law_is_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check(running(**fields), LIMITS)


def test_waiting_for_resources_without_a_bound_is_a_broken_law() -> None:
    state = State(term=1)
    state.workers = {i: WorkerState(Worker(i, 0), Stage.PLACING) for i in range(3)}

    with pytest.raises(AssertionError, match="placing without a bound"):
        check(state, LIMITS)
    state.place_until = 30.0
    check(state, LIMITS)
