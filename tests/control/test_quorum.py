from __future__ import annotations

import pytest

from elastic_trainer.control.quorum import most_advanced, ready_workers, waits_for
from elastic_trainer.control.state import Limits, State, WorkerState
from elastic_trainer.vocabulary import Stage, Worker

LIMITS = Limits(2, 3, place_s=1, form_s=1, leave_s=1)


STARTING = ((Stage.WARM, None), (Stage.WARM, None), (Stage.STARTING, None))


def state_with(*stages: tuple[Stage, int | None], **fields: object) -> State:
    state = State(term=1, store=("10.0.0.1", 1), generation=1, has_begun=True)
    state.workers = {i: WorkerState(Worker(i, 0), stage, holds=holds) for i, (stage, holds) in enumerate(stages)}
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def test_warm_workers_are_ready() -> None:
    state = state_with((Stage.WARM, 1), (Stage.STARTING, None), (Stage.WARM, None))

    assert ready_workers(state) == [Worker(0, 0), Worker(2, 0)]
    assert waits_for(state, LIMITS, 5.0) is None


def test_the_one_that_has_the_state_is_ready_before_others_that_it_cannot_reach() -> None:
    state = state_with((Stage.WARM, None), (Stage.WARM, None), (Stage.WARM, 7))
    state.apart = [("w0.0", "w2.0"), ("w1.0", "w2.0")]  # not heard of yet: they are named for themselves

    assert ready_workers(state) == [Worker(2, 0)]


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (state_with((Stage.WARM, 1), (Stage.STARTING, None)), "workers"),
        (state_with((Stage.WARM, 1), (Stage.WARM, 1), store=None), "store"),
        (state_with((Stage.WARM, 1), (Stage.WARM, 1), (Stage.FAULTY, 2)), "state"),
        (state_with((Stage.WARM, 1), (Stage.WARM, 1), quiet_until=6.0), "quiet"),
        (
            state_with(
                (Stage.WARM, None), (Stage.WARM, None), (Stage.STARTING, None), has_begun=False, gather_until=9.0
            ),
            "start",
        ),
    ],
)
def test_what_is_missing_is_named(state: State, kind: str) -> None:
    missing = waits_for(state, LIMITS, 5.0)

    assert missing is not None
    assert missing.kind == kind


def test_the_slow_are_not_waited_for_beyond_their_time() -> None:
    assert waits_for(state_with(*STARTING, has_begun=False, gather_until=4.0), LIMITS, 5.0) is None


def test_the_most_advanced_is_the_one_with_the_most_steps() -> None:
    assert most_advanced(state_with((Stage.WARM, None))) is None
    assert most_advanced(state_with((Stage.WARM, 2), (Stage.WARM, 3))) == 3
