from __future__ import annotations

from elastic_trainer.checkpoint.history import History
from elastic_trainer.observability.account import Account, Generation
from elastic_trainer.reports.record import RunRecord
from elastic_trainer.reports.story import spans_of_workers, story_of

PHASES = {"detect": 0.011, "free": 0.02, "plan": 0.05, "form": 0.03, "state": 0.01, "first step": 1.5}
GENERATIONS = [
    Generation(
        1, 1, 2, 0, "first start", 100.0, ["w0.0", "w1.0"], {"form": 0.1, "state": 0.2, "first step": 0.3}, 129.0
    ),
    Generation(2, 1, 1, 40, "w1.0 lost while training: its process died", 130.0, ["w0.0"], PHASES, 139.5),
    Generation(3, 1, 2, 55, "w1.1 joins", 140.0, ["w0.0", "w1.1"], {}, 148.0),
]


def record(generations: list[Generation]) -> RunRecord:
    account = Account(began_at=90.0, at=150.0, active_s=60.0, productive_s=45.0, generations=generations)
    losses = {step: 2.0 / step for step in range(1, 61)}
    return RunRecord("first", History(term=1, ended="finished", reason="done"), account, losses, {60: {"loss": 0.1}})


def test_each_generation_is_told_with_its_reason_and_its_cost() -> None:
    text = "\n".join(story_of(record(GENERATIONS)))

    assert "run first: finished: done" in text
    assert "60 steps, 3 generations over 1 term, 1 min 0 s in all, 75 % of it in steps" in text
    assert "1 worker (w0.0) from step 40" in text
    assert "why:  w1.0 lost while training: its process died" in text
    assert (
        "cost: 1.62 s = detect 11 ms + free 20 ms + plan 50 ms + form 30 ms + state 10 ms + first step 1.50 s" in text
    )
    assert "cost: not known: no step was done in it" in text
    assert "detect: from the last done step to the first sign" in text


def test_a_worker_is_a_member_until_the_next_generation_without_it() -> None:
    assert spans_of_workers(GENERATIONS, 150.0) == {
        "w0.0": [(100.0, 129.0, 1), (130.0, 139.5, 2), (140.0, 148.0, 3)],
        "w1.0": [(100.0, 129.0, 1)],
        "w1.1": [(140.0, 148.0, 3)],
    }
    assert spans_of_workers([], 150.0) == {}
