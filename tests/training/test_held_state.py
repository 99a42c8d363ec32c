from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from elastic_trainer.control.effects import FormGeneration
from elastic_trainer.training.device import Host
from elastic_trainer.training.held_state import CarriedState, HeldState
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.saver import Saver
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.state import RegisteredState
from elastic_trainer.vocabulary import NO_GENERATION, Rollback, SavedStep, Token, Worker

W = Worker(0, 0)
ROLLBACK = Rollback("x", 10, Token(1, 4), (19, 20, 21))


def parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def held(carried: CarriedState | None = None) -> tuple[HeldState, nn.Module]:
    mine, made = HeldState(carried), parts()
    mine.register(RegisteredState(made))
    return mine, made["model"]


def changed(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight.add_(1.0)


def test_what_was_only_built_does_not_count() -> None:
    mine, _ = held()

    assert mine.holds is None
    assert mine.carry() is None


def test_a_step_that_stops_half_applied_costs_the_state_or_goes_back_to_its_copy() -> None:
    for has_copy in (False, True):
        start = CarriedState(RegisteredState(parts()).collect(), 5, 0, NO_GENERATION)
        mine, model = held(start)
        before = model.weight.detach().clone()
        if has_copy:
            mine.take_snapshot()
        mine.begin_update()
        changed(model)

        mine.undo()

        assert mine.holds == (5 if has_copy else None)
        assert torch.equal(model.weight, before) == has_copy


def test_a_whole_step_counts_and_is_carried_over_by_a_copy() -> None:
    mine, model = held(CarriedState(RegisteredState(parts()).collect(), 5, 3, NO_GENERATION))
    mine.begin_update()
    changed(model)
    mine.end_update()
    mine.complete_step()
    mine.undo()
    carried = mine.carry()
    assert carried is not None
    assert (mine.holds, carried.steps, carried.evaluated_at) == (6, 6, 3)
    kept = model.weight.detach().clone()
    changed(model)

    again, other = held(carried)

    assert again.holds == 6
    assert torch.equal(other.weight, kept)


def test_state_from_before_a_rollback_does_not_count() -> None:
    for joined, is_void in ((Token(1, 3), True), (Token(1, 4), False), (Token(2, 1), False)):
        mine, _ = held(CarriedState(RegisteredState(parts()).collect(), 25, 0, joined))
        saver = Restoring(10)

        mine.come_up_to(
            FormGeneration(Token(2, 5), (W,), ("", 0), False, "", (SavedStep(10, "x", ""),), ROLLBACK),
            0,
            cast(TrainSettings, None),
            cast(ProcessGroupBackend, Alone()),
            cast(Saver, saver),
            check=lambda: None,
            note=lambda text: None,
        )

        assert (mine.holds, saver.asked) == ((10, True) if is_void else (25, False))
        assert mine.joined == Token(2, 5)


class Alone:
    """A group of one."""

    device = Host()

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor) -> Alone:
        tensors[0].copy_(tensor)
        return self

    def wait_on_host(self) -> None:
        """It is there."""


class Restoring:
    """A saver whose newest saved step has so many done steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.asked = False

    def restore(self, *_: Any) -> tuple[Any, list[str]]:
        self.asked = True
        return SimpleNamespace(steps=self._steps, evaluated_at=0), []


def test_what_was_carried_over_stays_so_until_the_task_registers_again() -> None:
    carried = CarriedState(RegisteredState(parts()).collect(), 5, 0, NO_GENERATION)
    mine = HeldState(carried)

    assert mine.carry() is carried
