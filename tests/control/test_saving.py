"""How saves go in unlucky orders: nobody keeps a copy for ever, and no end comes without its last save."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits, Phase
from elastic_trainer.vocabulary import SavedStep, Stage, Token, Worker

A, B, C = Worker(0, 0), Worker(1, 0), Worker(2, 0)
FIRST = Token(1, 1)
BOUNDS = {"place_s": 30.0, "form_s": 20.0, "leave_s": 300.0}


def play(machine: Machine, events: Sequence[e.Event], now: float = 100.0) -> list[f.Effect]:
    found = []
    for event in events:
        found += machine.handle(event, now)
        machine.check()
    return found


def training(*workers: Worker) -> Machine:
    """These train in generation 1-1."""
    machine = Machine(Limits(1, len(workers), **BOUNDS))
    play(machine, [e.RunBegan(), e.StoreReady("10.0.0.1", 4000)], 0.0)
    play(machine, [e.WorkerPlaced(each) for each in workers], 0.0)
    play(machine, [e.WorkerWarm(each, 0, None) for each in workers], 0.1)
    play(machine, [e.GroupFormed(each, FIRST) for each in workers], 0.2)
    play(machine, [e.GenerationJoined(each, FIRST, 0) for each in workers], 0.3)
    assert machine.state.phase is Phase.RUNNING
    return machine


def found(worker: Worker, stage: Stage, rank: int = -1, holds: int | None = 100) -> e.FoundWorker:
    return e.FoundWorker(worker, stage, token=FIRST, rank=rank, holds=holds)


def of(effects: Sequence[f.Effect], kind: type[f.Effect]) -> list[f.Effect]:
    return [each for each in effects if isinstance(each, kind)]


def test_a_copy_that_comes_after_its_save_was_given_up_is_freed() -> None:
    machine = training(A, B)
    play(machine, [e.SaveBegan(A, FIRST, 10), e.PiecesFailed(A, FIRST, 10, 0, "disk full")])

    effects = play(machine, [e.SaveBegan(B, FIRST, 10)])

    assert [each.workers for each in of(effects, f.SettleSave)] == [(B,)]  # type: ignore[attr-defined]


def test_who_is_done_is_not_waited_for_to_copy() -> None:
    """A has done the last step and copied it; B dies, C comes up to A and saves in the next generation."""
    machine = training(A, B, C)
    play(machine, [e.SaveBegan(A, FIRST, 100), e.WorkerLost(B, "its process died")])
    play(machine, [e.GroupLeft(C, FIRST, e.Left.COLLECTIVE_FAILED, 99), e.GroupLeft(A, FIRST, e.Left.ORDERED, 100)])
    play(machine, [e.TimePassed()], 101.0)
    second = machine.state.token
    assert second > FIRST
    play(machine, [e.GroupFormed(A, second), e.GroupFormed(C, second)], 101.0)
    play(machine, [e.GenerationJoined(A, second, 100), e.GenerationJoined(C, second, 100)], 101.0)
    play(machine, [e.WorkerFinished(A, second), e.SaveBegan(C, second, 100), e.WorkerFinished(C, second)], 101.1)

    # A's part goes to C, the only one with a copy of this save
    assert machine.state.save is not None
    assert machine.state.save.writers == [C]
    attempt = machine.state.save.attempt
    effects = play(machine, [e.PiecesWritten(C, second, 100, attempt, "{}")], 101.2)
    assert of(effects, f.CommitSave)


def test_a_controller_that_dies_in_the_last_save_is_followed_by_one_that_saves() -> None:
    machine = Machine(Limits(1, 2, **BOUNDS), term=2)
    workers = (found(A, Stage.DONE, 0), found(B, Stage.DONE, 1))

    effects = play(machine, [e.RunBegan(generation=1, saved=(SavedStep(50, "x", ""),), found=workers, has_store=True)])

    assert not of(effects, f.EndRun), "the last steps are not saved"
    assert of(effects, f.AbortGeneration)
    play(machine, [e.StoreReady("10.0.0.1", 4000)])
    left = [e.GroupLeft(each, FIRST, e.Left.ORDERED, 100) for each in (A, B)]
    effects = play(machine, [*left, e.TimePassed()], 101.0)
    assert of(effects, f.FormGeneration)


def test_a_save_of_which_a_new_controller_knows_nothing_is_not_committed() -> None:
    machine = Machine(Limits(1, 2, **BOUNDS), term=2)
    workers = (found(A, Stage.WARM, holds=10), found(B, Stage.WARM, holds=10))
    play(machine, [e.RunBegan(generation=1, found=workers, has_store=True)])

    effects = play(machine, [e.SaveBegan(A, FIRST, 10), e.PiecesWritten(A, FIRST, 10, 0, "{}")])

    assert not of(effects, f.CommitSave)
    assert of(effects, f.SettleSave)


def test_members_killed_together_for_want_of_memory_are_one_try() -> None:
    machine = training(A, B, C)

    effects = play(machine, [e.WorkerLost(each, "its process died", out_of_memory=True) for each in (A, B, C)])

    assert not of(effects, f.EndRun)
