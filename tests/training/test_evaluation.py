from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.conftest import make_dataset
from tests.harness import Harness, settings_for
from tests.tasks import NetTask


class CountingTask(NetTask):
    """Evaluates to figures that can be checked by hand."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how

    def evaluate(self, model: Any, batch: Any) -> Any:
        assert not model.training
        if self.how == "list":
            return [1, 2]
        if self.how == "number":
            return {"x": 3.0}
        if self.how == "names" and self.run.rank == 1:
            return {"other": (1.0, 1.0)}
        return {"mean": (batch["number"].sum(), batch.rows), "rows": (batch.rows, 1e-9)}

    def train(self, run: Any) -> None:
        self.run = run
        super().train(run)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 101])
def test_every_row_counts_once(workers: int, rows: int, dataset: str, tmp_path: Any) -> None:
    held_out = make_dataset(tmp_path / "test", rows)
    settings = settings_for(dataset, steps=4, evaluation=held_out, evaluate_every=3)

    outcome = Harness(CountingTask, settings, workers=workers).run()

    assert outcome.status == "finished", outcome.reason
    assert set(outcome.evaluations) == {3, 4}
    assert outcome.evaluations[4]["mean"] == pytest.approx((rows - 1) / 2)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("list", "evaluate() returned [1, 2]. Return a dict of pairs"),
        ("number", "evaluate() returned {'x': 3.0}. Return a dict of pairs"),
        ("names", "evaluate() returned other names on other ranks"),
    ],
)
def test_what_evaluate_may_return_is_told(how: str, told: str, dataset: str, held_out: str) -> None:
    settings = settings_for(dataset, steps=2, evaluation=held_out)

    outcome = Harness(functools.partial(CountingTask, how), settings, workers=2, least=2).run()

    assert outcome.status == "failed"
    assert told in outcome.reason
