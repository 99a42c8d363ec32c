from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import TaskError
from elastic_trainer.training import state as transfer
from elastic_trainer.training.state import RegisteredState, copied
from tests.tasks import state_digest
from tests.training.groups import backend, on_ranks


class Odd:
    """State of every kind that may be registered."""

    def __init__(self, value: int) -> None:
        self.state: dict[str, Any] = {
            "milestones": {10: 1, 20: 2},
            "pair": (1.5, None),
            "list": [torch.tensor(value), {"text": "ä", "flag": True}],
            "empty": torch.zeros(0, 3),
            "half": torch.full((3,), value, dtype=torch.bfloat16),
            "bools": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j]),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def parts(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[2].parameters()), "betas": (0.8, 0.9)}]
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    for _ in range(steps):
        model(torch.randn(6, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "odd": Odd(seed)}


def moved(rank: int, world: int) -> tuple[str, Any, Any]:
    mine = parts(rank, steps=3 if rank == 1 else 0)
    state = RegisteredState(mine)
    received = transfer.share(state.collect() if rank == 1 else None, 1, backend())
    if rank != 1:
        state.restore(received)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in mine["optimizer"].param_groups]
    return state_digest(mine["model"], mine["optimizer"], mine["odd"]), groups, mine["scheduler"].state_dict()


def test_newcomers_get_everything_that_was_registered() -> None:
    zero, one, two = on_ranks(3, moved)

    assert zero == one == two


def test_restored_state_steps_on_like_the_original() -> None:
    original, other = parts(1, 3), parts(2, 0)
    RegisteredState(other).restore(copied(RegisteredState(original).collect()))
    x = torch.randn(6, 5)
    for each in (original, other):
        each["optimizer"].zero_grad()
        each["model"](x).sum().backward()
        each["optimizer"].step()

    assert state_digest(original["model"], original["optimizer"]) == state_digest(other["model"], other["optimizer"])


def test_a_copy_has_memory_of_its_own() -> None:
    mine = parts(1, 1)
    kept = copied(RegisteredState(mine).collect())
    before = state_digest(mine["model"])
    with torch.no_grad():
        mine["model"][0].weight.zero_()

    RegisteredState(mine).restore(kept)

    assert state_digest(mine["model"]) == before


def test_what_cannot_be_registered_is_told() -> None:
    with pytest.raises(TaskError, match=r"run.register\(number=...\) got a int"):
        RegisteredState({"number": 3})  # type: ignore[dict-item]
    odd = Odd(1)
    odd.state["function"] = len
    with pytest.raises(TaskError, match=r"state\.odd\.function is a builtin_function_or_method"):
        transfer.share(RegisteredState({"odd": odd}).collect(), 0, backend())


def test_other_names_are_refused() -> None:
    one, other = RegisteredState({"a": Odd(1)}), RegisteredState({"b": Odd(1)})
    with pytest.raises(TaskError, match="registered are b, the run's state has a"):
        other.restore(one.collect())


def test_an_optimizer_without_its_model_is_told() -> None:
    mine = parts(1, 1)
    with pytest.raises(TaskError, match="belongs to no registered model"):
        RegisteredState({"optimizer": mine["optimizer"]}).collect()


def test_optimizer_state_keeps_its_own_type() -> None:
    """torch's load_state_dict casts it to the parameter's."""

    def made(steps: int) -> dict[str, Any]:
        model = nn.Linear(3, 1, dtype=torch.bfloat16)
        optimizer = torch.optim.NAdam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        if steps:
            optimizer.state["shared"] = {"scale": torch.tensor(3.0)}  # type: ignore[index]
        return {"model": model, "optimizer": optimizer}

    original, other = made(3), made(0)

    RegisteredState(other).restore(copied(RegisteredState(original).collect()))

    (state,) = [other["optimizer"].state[p] for p in [other["model"].weight]]
    assert state["mu_product"].dtype == torch.float32
    assert torch.equal(state["mu_product"], original["optimizer"].state[original["model"].weight]["mu_product"])
    assert other["optimizer"].state["shared"] == {"scale": torch.tensor(3.0)}
