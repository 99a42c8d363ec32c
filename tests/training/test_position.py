"""Where a worker's main thread is, as another thread sees it."""

from __future__ import annotations

import time

import pytest

from elastic_trainer.control import stragglers
from elastic_trainer.control.events import TaskPhase
from elastic_trainer.training import position as position_module
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


def test_one_that_becomes_slow_shows_it_soon_enough_to_be_named_within_ten_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one micro-batch a step; the judge wants several steps in a row besides."""
    now = 0.0
    monkeypatch.setattr(position_module.time, "monotonic", lambda: now)
    position = Position()

    def step(seconds: float) -> float:
        nonlocal now
        position.enter(TaskPhase.LOSS)
        now += seconds
        position.enter(TaskPhase.REDUCE)
        return position.look().pace_s

    for _ in range(30):
        step(0.010)
    slow = 1
    while step(0.020) < stragglers.TIMES * 0.010:
        slow += 1
    assert slow + stragglers.STEPS <= 10


def test_the_pace_is_known_after_some_micro_batches_and_follows() -> None:
    position = Position()
    for _ in range(PACE_OVER):
        assert position.look().pace_s == 0
        position.enter(TaskPhase.LOSS)
        time.sleep(0.002)
        position.enter(TaskPhase.REDUCE)
    assert 0.002 <= position.look().pace_s < 0.2
