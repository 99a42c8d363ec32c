from __future__ import annotations

import pytest

from elastic_trainer.errors import TaskError
from elastic_trainer.training.rider import Rider

MAX = (1 << 64) - 1


def rider(**fields: float) -> Rider:
    values = {"weight": 2.0, "loss_sum": 3.0, "steps": 7, "samples": 2, "digest": 5, "park": 0, "stop": 0}
    return Rider(**{**values, "changed_buffers": 0, "save": 0, "busy": 0, **fields})  # type: ignore[arg-type]


def test_digests_add_up_exactly_over_thousands_of_ranks() -> None:
    one = rider(digest=MAX).to_tensor()

    assert Rider.from_tensor(one * 4096).digest == (MAX * 4096) % (1 << 64)


def test_the_sum_of_two_ranks() -> None:
    total = Rider.from_tensor(rider(park=1).to_tensor() + rider(weight=4.0, digest=MAX).to_tensor())

    assert total == Rider(6.0, 6.0, 14, 4, 4, 1, 0, 0, 0, 0)
    assert total.scale(7) == 1 / 6
    total.check_steps(7, 2)


def test_ranks_in_different_steps_are_found() -> None:
    with pytest.raises(AssertionError, match="different steps"):
        Rider.from_tensor(rider(steps=7).to_tensor() + rider(steps=8).to_tensor()).check_steps(7, 2)


def test_a_step_without_weight_is_told() -> None:
    with pytest.raises(TaskError, match="the weights of step 7 sum to 0; they must be positive"):
        rider(weight=0.0).scale(7)
