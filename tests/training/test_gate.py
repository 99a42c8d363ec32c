from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.device import Host
from elastic_trainer.training.gate import Gate


class Group:
    """Leaves `found` in what is reduced; `breaks`: it was aborted."""

    device = Host()

    def __init__(self, found: Callable[[float], float], *, breaks: bool = False) -> None:
        self._found = found
        self._breaks = breaks
        self.sent: list[float] = []

    def all_reduce(self, tensor: torch.Tensor) -> Group:
        self.sent.append(float(tensor))
        tensor.fill_(self._found(float(tensor)))
        return self

    def wait(self) -> None:
        """Orders what comes after it."""

    def wait_on_host(self) -> None:
        if self._breaks:
            raise CollectiveFailed("the group was aborted")


FOUND: dict[str, Callable[[float], float]] = {
    "all of it": lambda mine: 3 * mine,
    "its own": lambda mine: mine,
    "half a sum": lambda mine: 2 * mine,
    "what the step before left": lambda mine: 3 * (mine - 1),
    "nothing": lambda mine: 0.0,
    "garbage": lambda mine: float("nan"),
}


@pytest.mark.parametrize("what", FOUND)
def test_only_the_sum_of_all_ranks_in_this_step_is_complete(what: str) -> None:
    group: Any = Group(FOUND[what])
    gate = Gate(group, 3, steps=7)
    for step in (7, 8):
        gate.count.fill_(step)
        gate.launch(step)
        assert gate.verdict().tolist() == [what == "all of it"]
        gate.launch(step)
        if what == "all of it":
            gate.confirm()
        else:
            with pytest.raises(CollectiveFailed):
                gate.confirm()
    assert group.sent == [8.0, 8.0, 9.0, 9.0]


def test_a_rank_that_has_not_completed_the_step_before_spoils_the_next_for_all() -> None:
    group: Any = Group(lambda mine: 3 * mine)
    gate = Gate(group, 3, steps=7)
    gate.launch(8)
    assert math.isnan(group.sent[0])
    assert gate.verdict().tolist() == [False]


def test_the_host_learns_of_an_abort() -> None:
    group: Any = Group(lambda mine: 3 * mine, breaks=True)
    gate = Gate(group, 3, steps=0)
    gate.launch(0)
    with pytest.raises(CollectiveFailed):
        gate.confirm()


def test_it_closes_for_good() -> None:
    group: Any = Group(lambda mine: 3 * mine)
    gate = Gate(group, 3, steps=0)
    assert gate.is_open
    gate.close()
    assert not gate.is_open
