from __future__ import annotations

from elastic_trainer.control.events import Failure, TaskFailed, TaskPhase
from elastic_trainer.control.recovery import (
    delay_before_forming,
    delay_before_restart,
    failed_everywhere_at_first,
    record_try,
    round_of,
)
from elastic_trainer.control.state import Limits, Stage, State, WorkerState
from elastic_trainer.vocabulary import Token, Worker

LIMITS = Limits(1, 3, place_s=1, form_s=1, leave_s=1)
SIGNATURE = ("loss", "ValueError", "task.py:1")


def test_ranks_that_fail_in_one_generation_count_once() -> None:
    state = State(term=1)

    assert [record_try(state, SIGNATURE, name) for name in ("g1", "g1", "g2", "g3")] == [1, 1, 2, 3]


def test_another_line_is_another_failure() -> None:
    state = State(term=1)
    record_try(state, SIGNATURE, "g1")

    assert record_try(state, ("loss", "ValueError", "task.py:2"), "g2") == 1


def test_progress_forgives() -> None:
    state = State(term=1)
    record_try(state, SIGNATURE, "g1")
    record_try(state, SIGNATURE, "g2")
    state.done = 1

    assert record_try(state, SIGNATURE, "g3") == 1


def test_a_round_is_a_generation_or_an_attempt_to_build() -> None:
    failure = Failure(TaskPhase.BUILD, "ValueError", "task.py:1", "")
    first, second = (TaskFailed(Worker(i, 0), 0, None, 0, None, failure) for i in (0, 1))
    training = TaskFailed(Worker(0, 0), 0, Token(1, 4), 0, None, failure)

    assert round_of(first) == round_of(second)
    assert round_of(training) == "generation 1-4"


def test_everywhere_means_every_worker_that_has_a_process() -> None:
    state = State(term=1)
    state.workers = {0: WorkerState(Worker(0, 0), Stage.FAULTY), 1: WorkerState(Worker(1, 0), Stage.PLACING)}
    assert failed_everywhere_at_first(state)

    state.workers[1].stage = Stage.STARTING
    assert not failed_everywhere_at_first(state)

    state.workers[1].stage, state.done = Stage.FAULTY, 1
    assert not failed_everywhere_at_first(state)


def test_delays_grow_to_a_bound() -> None:
    delays = [delay_before_restart(deaths, LIMITS) for deaths in range(20)]

    assert delays[0] == 0.0
    assert delays == sorted(delays)
    assert delays[-1] == 30.0
    assert delay_before_forming(0, LIMITS) == LIMITS.coalesce_s
