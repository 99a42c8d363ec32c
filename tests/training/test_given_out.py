from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.errors import CollectiveFailed, StepAborted, TaskError
from elastic_trainer.training.given_out import GivenOut


def step(number: int, *, arrived: bool = True, complete: bool = True, known: bool = False) -> Any:
    return SimpleNamespace(
        number=number,
        has_arrived=arrived,
        settle=lambda: complete,
        total=object() if known else None,
        is_mixed=False,
        host_part={"schedule": number},
    )


class Held:
    def __init__(self) -> None:
        self.restored: Any = None
        self.is_lost = False
        self.registered = SimpleNamespace(restore_host_part=lambda kept: setattr(self, "restored", kept))

    def lose(self) -> None:
        self.is_lost = True


def given(*steps: Any) -> tuple[GivenOut, list[int]]:
    done: list[int] = []
    out = GivenOut(lambda each: done.append(each.number), bound_s=0.2)
    for each in steps:
        out.add(each)
    return out, done


def never() -> None:
    """Nothing is to be given up."""


def test_steps_are_done_in_order_and_only_so_many_are_waited_for() -> None:
    out, done = given(step(0), step(1), step(2, arrived=False))
    out.settle(2, never)
    assert done == [0]
    out.settle(1, never)
    assert done == [0, 1]
    assert len(out) == 1


def test_a_step_that_the_host_knows_brings_those_before_it() -> None:
    _, done = given(step(0), step(1), step(2, known=True))
    assert done == [0, 1, 2]


def test_a_wait_can_be_given_up() -> None:
    def check() -> None:
        raise StepAborted("ordered")

    out, done = given(step(0, arrived=False))
    with pytest.raises(StepAborted):
        out.settle(0, check)
    assert done == []


def test_a_device_that_never_comes_to_it_is_not_waited_for_for_ever() -> None:
    out, _ = given(step(3, arrived=False))
    with pytest.raises(CollectiveFailed, match="did not come to the end of step 3"):
        out.settle(0, never)


@pytest.mark.parametrize(("problem", "is_lost"), [(TaskError("no weight"), False), (AssertionError("astray"), True)])
def test_a_step_whose_end_is_a_problem_stays_one(problem: Exception, is_lost: bool) -> None:
    held: Any = Held()
    astray = step(4)

    def settle() -> bool:
        raise problem

    out, done = given(astray)
    astray.settle = settle
    for _ in range(2):
        with pytest.raises(type(problem)):
            out.settle(0, never)
    out.give_up(held)
    assert (done, held.is_lost, held.restored) == ([], is_lost, {"schedule": 4})


def test_a_step_that_is_not_complete_fails_and_none_behind_it_counts() -> None:
    out, done = given(step(0), step(1, complete=False), step(2))
    with pytest.raises(CollectiveFailed, match="step 1 did not arrive whole"):
        out.settle(0, never)
    out.settle_arrived()
    assert done == [0]


def test_what_the_host_changed_for_steps_that_are_not_done_goes_back() -> None:
    held: Any = Held()
    out, _ = given(step(4, complete=False), step(5, complete=False))
    out.settle_arrived()
    out.give_up(held)
    assert held.restored == {"schedule": 4}
    assert not held.is_lost
    assert len(out) == 0


def test_state_that_the_task_changed_behind_an_update_that_was_none_is_lost() -> None:
    held: Any = Held()
    out, _ = given(step(4, complete=False))
    out.mix()
    out.give_up(held)
    assert held.is_lost
