"""What is kept: the last, every n-th, the best; never is the newest given up."""

from __future__ import annotations

from elastic_trainer.checkpoint.retention import Retention, needless
from elastic_trainer.vocabulary import SavedStep

SAVED = [SavedStep(steps, f"steps/{steps}", "") for steps in range(10, 101, 10)]
VALUES = {f"steps/{steps}": {"accuracy": value} for steps, value in ((20, 0.5), (40, 0.9), (70, 0.7))}


def kept(policy: Retention) -> list[int]:
    gone = needless(SAVED, VALUES, policy)
    return [each.steps for each in SAVED if each not in gone]


def test_the_last_ones_are_kept() -> None:
    assert kept(Retention(3)) == [80, 90, 100]
    assert kept(Retention(0)) == [100]


def test_every_nth_is_kept_besides() -> None:
    assert kept(Retention(1, keep_every=30)) == [30, 60, 90, 100]


def test_the_best_is_kept_besides() -> None:
    assert kept(Retention(1, keep_best="accuracy")) == [40, 100]
    assert kept(Retention(1, keep_best="-accuracy")) == [20, 100]
    assert kept(Retention(1, keep_best="something else")) == [100]
