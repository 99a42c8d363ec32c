from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.device import Host
from elastic_trainer.training.gate import Gate


class Group:
    """Leaves `found` in what is reduced; `breaks`: it was aborted."""

    device = Host()

    def __init__(self, found: float, *, breaks: bool = False) -> None:
        self._found = found
        self._breaks = breaks
        self.sent: list[float] = []

    def all_reduce(self, tensor: torch.Tensor) -> Group:
        self.sent.append(float(tensor))
        tensor.fill_(self._found)
        return self

    def wait(self) -> None:
        """Orders what comes after it."""

    def wait_on_host(self) -> None:
        if self._breaks:
            raise CollectiveFailed("the group was aborted")


@pytest.mark.parametrize(
    ("found", "is_complete"), [(3.0, True), (1.0, False), (2.0, False), (0.0, False), (float("nan"), False)]
)
def test_only_the_sum_of_all_ranks_is_complete(found: float, is_complete: bool) -> None:
    group: Any = Group(found)
    gate = Gate(group, 3, steps=7)
    for _ in range(2):  # the one before leaves nothing behind
        gate.launch()
        assert gate.verdict().tolist() == [is_complete]
    assert group.sent == [1.0, 1.0]
    assert gate.count.tolist() == [7.0]


def test_the_host_learns_of_an_abort() -> None:
    group: Any = Group(3.0, breaks=True)
    gate = Gate(group, 3, steps=0)
    gate.launch()
    with pytest.raises(CollectiveFailed):
        gate.confirm()


def test_it_closes_for_good() -> None:
    group: Any = Group(3.0)
    gate = Gate(group, 3, steps=0)
    assert gate.is_open
    gate.close()
    assert not gate.is_open
