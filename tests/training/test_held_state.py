from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_trainer.training.held_state import CarriedState, HeldState
from elastic_trainer.training.state import RegisteredState


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
        start = CarriedState(RegisteredState(parts()).collect(), 5, 0)
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
    mine, model = held(CarriedState(RegisteredState(parts()).collect(), 5, 3))
    mine.begin_update()
    changed(model)
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


def test_what_was_carried_over_stays_so_until_the_task_registers_again() -> None:
    carried = CarriedState(RegisteredState(parts()).collect(), 5, 0)
    mine = HeldState(carried)

    assert mine.carry() is carried
