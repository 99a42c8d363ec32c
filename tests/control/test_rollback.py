"""Steps that are not finite, again and again: the run goes back once, and nothing from before comes along."""

from __future__ import annotations

import json

import pytest

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Phase, State
from elastic_trainer.vocabulary import Rollback, RunStatus, SavedStep, Token
from tests.control.test_saving import FIRST, A, B, C, of, play, training

TEN, TWENTY = SavedStep(10, "steps/10", "aa"), SavedStep(20, "steps/20", "bb")
FAILURE = e.Failure(e.TaskPhase.LOSS, "ValueError", "task.py:3", "ValueError: x")


def with_saved(*saved: SavedStep, after: int = 25) -> Machine:
    machine = training(A, B, C)
    play(machine, [e.StepSaved(FIRST, each) for each in saved])
    play(machine, [e.StepsDone(each, FIRST, after) for each in (A, B, C)])
    return machine


def skipped(*steps: int, token: Token = FIRST) -> e.StepsSkipped:
    return e.StepsSkipped(token, steps)


def test_three_in_a_row_go_back_to_what_was_saved_before_them() -> None:
    machine = with_saved(TEN, TWENTY, after=25)
    assert not play(machine, [skipped(19, 20)])

    (abort,) = play(machine, [skipped(19, 20, 21)])
    assert isinstance(abort, f.AbortGeneration)
    assert "not finite in steps 19, 20, 21: back to step 10" in abort.reason
    play(machine, [e.GroupLeft(each, FIRST, e.Left.ORDERED, 25) for each in (A, B, C)])
    (form,) = of(play(machine, [e.TimePassed()], 101.0), f.FormGeneration)

    assert isinstance(form, f.FormGeneration)
    assert form.sources == (TEN,), "step 20 was saved after the first of them"
    assert form.rollback == Rollback("steps/10", 10, Token(1, 2), (19, 20, 21))
    joined = play(machine, [e.GenerationJoined(A, Token(1, 2), 10), e.GenerationJoined(B, Token(1, 2), 10)], 101.1)
    assert [each.rollback for each in of(joined, f.RecordResumption)] == [form.rollback]  # type: ignore[attr-defined]
    assert machine.state.saved == [TEN]


def test_state_from_before_does_not_come_back_by_another_way() -> None:
    """A's task raises meanwhile, and would go on with what it held; then the forming fails before anyone has joined."""
    machine = with_saved(TEN)
    play(machine, [skipped(19, 20, 21), e.TaskFailed(A, 0, FIRST, 24, 25, FAILURE)])
    play(machine, [e.GroupLeft(each, FIRST, e.Left.ORDERED, 25) for each in (B, C)])

    effects = play(machine, [e.TimePassed()], 101.0)
    assert [each.worker for each in of(effects, f.KillWorker)] == [A]  # type: ignore[attr-defined]
    play(machine, [e.GroupLeft(each, Token(1, 2), e.Left.COLLECTIVE_FAILED, 25) for each in (B, C)], 101.1)
    (form,) = of(play(machine, [e.TimePassed()], 110.0), f.FormGeneration)

    assert isinstance(form, f.FormGeneration)
    assert form.sources == (TEN,)
    assert form.rollback is not None
    assert form.rollback.since == Token(1, 3)


def test_a_second_time_to_the_same_step_ends_the_run_and_to_a_newer_one_does_not() -> None:
    for newer in (False, True):
        machine = with_saved(TEN)
        play(machine, [skipped(19, 20, 21), *(e.GroupLeft(w, FIRST, e.Left.ORDERED, 25) for w in (A, B, C))])
        play(machine, [e.TimePassed()], 101.0)
        second = Token(1, 2)
        play(machine, [e.GroupFormed(w, second) for w in (A, B, C)], 101.1)
        play(machine, [e.GenerationJoined(w, second, 10) for w in (A, B, C)], 101.2)
        assert machine.state.phase is Phase.RUNNING
        if newer:
            play(machine, [e.StepSaved(second, SavedStep(22, "steps/22", "cc"))], 102.0)

        effects = play(machine, [skipped(23, 24, 25, token=second)], 103.0)

        ends = of(effects, f.EndRun)
        if newer:
            assert not ends
            assert machine.state.rollback is not None
            assert machine.state.rollback.skipped == (19, 20, 21, 23, 24, 25)
        else:
            (end,) = ends
            assert isinstance(end, f.EndRun)
            assert end.status is RunStatus.FAILED
            assert (
                "in steps 23, 24, 25, although the run had gone back to step 10 and left steps 19, 20, 21" in end.reason
            )


def test_a_term_knows_what_the_one_before_went_back_for() -> None:
    machine = with_saved(TEN)
    play(machine, [skipped(19, 20, 21)])
    again = State.from_dict(json.loads(json.dumps(machine.snapshot())))
    assert again == machine.state

    rollback = Rollback("steps/10", 10, Token(1, 2), (19, 20, 21))
    other = Machine(machine.limits, term=2)
    play(other, [e.RunBegan(generation=2, saved=(TEN,), rollback=rollback), e.StoreReady("10.0.0.1", 4000)], 0.0)
    play(other, [e.WorkerPlaced(each) for each in (A, B, C)], 0.0)
    effects = play(other, [e.WorkerWarm(each, 0, None) for each in (A, B, C)], 0.1)

    (form,) = of(effects, f.FormGeneration)
    assert isinstance(form, f.FormGeneration)
    assert form.rollback == rollback


@pytest.mark.parametrize("token", [Token(1, 0), Token(1, 2)])
def test_what_another_generation_skipped_is_no_reason(token: Token) -> None:
    assert not play(with_saved(TEN), [skipped(19, 20, 21, token=token)])
