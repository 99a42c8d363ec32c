"""Where a worker's main thread is, as another thread sees it."""

from __future__ import annotations

import time

from elastic_trainer.control.events import TaskPhase
from elastic_trainer.training.position import KEPT, PACE_OVER, Position


def test_every_stay_counts_even_in_the_same_phase() -> None:
    position = Position()
    before = position.look()
    assert before.phase is TaskPhase.BUILD
    position.enter(TaskPhase.EVALUATE)
    first = position.look()
    position.enter(TaskPhase.EVALUATE)
    second = position.look()
    assert before.mark < first.mark < second.mark
    assert (first.stays, second.stays) == (0, 1)


def test_the_longest_of_the_last_stays_is_told_and_what_was_slow_once_is_forgotten() -> None:
    position = Position()
    position.enter(TaskPhase.LOSS, 7)
    time.sleep(0.05)
    position.enter(TaskPhase.REDUCE)
    assert position.look().stays == 0
    position.enter(TaskPhase.LOSS)
    found = position.look()
    assert (found.phase, found.steps, found.stays) == (TaskPhase.LOSS, 7, 1)
    assert found.longest_s >= 0.05
    for _ in range(KEPT):
        position.enter(TaskPhase.REDUCE)
        position.enter(TaskPhase.LOSS)
    found = position.look()
    assert found.stays == KEPT
    assert found.longest_s < 0.05


def test_the_pace_is_known_after_some_micro_batches_and_follows() -> None:
    position = Position()
    for _ in range(PACE_OVER):
        assert position.look().pace_s == 0
        position.enter(TaskPhase.LOSS)
        time.sleep(0.002)
        position.enter(TaskPhase.REDUCE)
    assert 0.002 <= position.look().pace_s < 0.2
