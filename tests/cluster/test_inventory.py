from __future__ import annotations

from elastic_trainer.cluster.inventory import Inventory
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.observability.lines import StepLine
from elastic_trainer.vocabulary import Stage, Token, Worker

W = Worker(1, 0)
TOKEN = Token(1, 4)


def line(step: int) -> StepLine:
    return StepLine(step, TOKEN, 24, 0, 0.0, 2, 0.0, 0.0, 0.0)


def test_a_workers_life_as_its_agent_sees_it() -> None:
    inventory = Inventory()
    inventory.began(W)
    inventory.reported(W, e.WorkerWarm(W, 0, None))
    assert inventory.workers() == (e.FoundWorker(W, Stage.WARM),)

    inventory.ordered(W, f.FormGeneration(TOKEN, (Worker(0, 0), W), ("h", 1), True, ""))
    assert inventory.workers() == (e.FoundWorker(W, Stage.JOINING, token=TOKEN, rank=1),)

    inventory.reported(W, e.GenerationJoined(W, TOKEN, 7))
    inventory.recorded(W, line(7))
    inventory.recorded(W, line(8))
    assert inventory.workers() == (e.FoundWorker(W, Stage.TRAINING, holds=9, token=TOKEN, rank=1),)

    inventory.ordered(W, f.StopGeneration(TOKEN, (W,), ""))
    inventory.reported(W, e.GroupLeft(W, TOKEN, e.Left.STOPPED, 10))
    (found,) = inventory.workers()
    assert (found.stage, found.holds, found.is_stopping) == (Stage.WARM, 10, True)

    inventory.forget(W)
    inventory.reported(W, e.WorkerFinished(W, TOKEN))
    assert inventory.workers() == ()


def test_a_task_that_raised_waits_for_an_order() -> None:
    inventory = Inventory()
    inventory.began(W)
    failure = e.Failure(e.TaskPhase.LOSS, "ValueError", "x:1", "")
    inventory.reported(W, e.TaskFailed(W, 2, TOKEN, 5, 5, failure))
    assert inventory.workers()[0] == e.FoundWorker(W, Stage.FAULTY, attempt=2, holds=5)

    inventory.ordered(W, f.RunTaskAgain(W, ""))
    assert inventory.workers()[0].stage is Stage.STARTING
