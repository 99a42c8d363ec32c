"""Warm workers on top of the most that train: when they are taken, and when they are not."""

from __future__ import annotations

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits, Phase
from elastic_trainer.vocabulary import Token, Worker

W = [Worker(number, 0) for number in range(3)]
FIRST, SECOND = Token(1, 1), Token(1, 2)


class Run:
    """Two that train and one spare."""

    def __init__(self) -> None:
        self.machine = Machine(Limits(1, 2, place_s=30.0, form_s=20.0, leave_s=300.0, spares=1))
        self.now = 0.0
        started = self.take(e.RunBegan())
        assert [each.worker for each in started if isinstance(each, f.StartWorker)] == W
        self.take(e.StoreReady("10.0.0.9", 4000))

    def take(self, event: e.Event, after_s: float = 0.0) -> list[f.Effect]:
        self.now += after_s
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        return effects


def formed(effects: list[f.Effect]) -> tuple[Worker, ...] | None:
    return next((each.ranks for each in effects if isinstance(each, f.FormGeneration)), None)


def test_the_first_generation_does_not_wait_for_a_spare() -> None:
    run = Run()
    for w in W:
        run.take(e.WorkerPlaced(w))
    assert formed(run.take(e.WorkerWarm(W[0], 0, None))) is None
    assert formed(run.take(e.WorkerWarm(W[2], 0, None))) == (W[0], W[2])  # whoever is ready first


def test_a_spare_takes_over_in_the_next_generation_and_another_is_started() -> None:
    run = Run()
    for w in W:
        run.take(e.WorkerPlaced(w))
    for w in W[:2]:
        run.take(e.WorkerWarm(w, 0, None))
    for w in W[:2]:
        run.take(e.GenerationJoined(w, FIRST, 0))
    assert run.take(e.WorkerWarm(W[2], 0, None)) == []  # nobody is parked for a spare
    assert run.machine.state.phase is Phase.RUNNING

    lost = run.take(e.WorkerLost(W[0], "killed"))
    assert Worker(0, 1) in [each.worker for each in lost if isinstance(each, f.StartWorker)]
    left = run.take(e.GroupLeft(W[1], FIRST, e.Left.COLLECTIVE_FAILED, 7), 0.02)
    assert formed(left or []) is None  # for the quiet time
    assert formed(run.take(e.TimePassed(), 0.1)) == (W[1], W[2])

    for w in W[1:]:
        run.take(e.GenerationJoined(w, SECOND, 7))
    run.take(e.WorkerPlaced(Worker(0, 1)))
    assert run.take(e.WorkerWarm(Worker(0, 1), 0, None)) == []  # it is the spare now
