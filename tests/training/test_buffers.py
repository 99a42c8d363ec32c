from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_trainer.data.batch_plan import range_of
from elastic_trainer.training.buffers import LogicalBuffers
from tests.training.groups import backend, on_ranks

RANKS = 6


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.1]))
        self.register_buffer("bound", torch.zeros(2))
        self.register_buffer("flag", torch.tensor([False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bound = self.bound + x[0, :2]  # a new tensor under the same name
        self.flag |= True
        return self.norm(x)


def rows(logical_rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + logical_rank)
    return torch.randn(4, 3, generator=generator)


def trained(rank: int, world: int, steps: int, with_rows: int) -> dict[str, Any]:
    module = Counting()
    buffers = LogicalBuffers([module], backend())
    for step in range(steps):
        buffers.begin()
        for logical_rank in range_of(rank, world, RANKS):
            if logical_rank < with_rows:
                buffers.enter(logical_rank)
                module(rows(logical_rank, step))
        total = torch.tensor([float(buffers.unagreed)])
        torch.distributed.all_reduce(total)
        if total > 0:
            buffers.agree()
        buffers.reduce()
        buffers.commit()
    return {name: value.numpy().copy() for name, value in module.named_buffers()}


def expected(steps: int, with_rows: int) -> dict[str, Any]:
    """By the definition: each logical rank starts from the same values; the mean of what they end with."""
    values = dict(Counting().named_buffers())
    for step in range(steps):
        ends = []
        for logical_rank in range(with_rows):
            module = Counting()
            module.load_state_dict({**module.state_dict(), **values})
            module(rows(logical_rank, step))
            ends.append(dict(module.named_buffers()))
        for name in values:
            if values[name].is_floating_point():
                values[name] = torch.stack([end[name] for end in ends]).mean(0)
            else:
                values[name] = ends[0][name]
    return values


def test_buffers_are_the_same_for_any_world_and_those_of_the_definition() -> None:
    for with_rows in (RANKS, 2):
        want = expected(3, with_rows)
        for world in (1, 2, 4):
            for found in on_ranks(world, trained, 3, with_rows):
                assert found["norm.num_batches_tracked"] == 3
                assert found["flag"].item() is True
                assert found["mask"].tolist() == want["mask"].tolist(), "a constant changed"
                for name in ("norm.running_mean", "norm.running_var", "bound"):
                    assert torch.allclose(torch.from_numpy(found[name]), want[name], rtol=1e-6, atol=1e-7), name


def test_a_step_that_is_given_up_leaves_the_buffers_as_they_were() -> None:
    module = Counting()
    before = {name: value.clone() for name, value in module.named_buffers()}
    buffers = LogicalBuffers([module], backend())
    buffers.begin()
    buffers.enter(0)
    module(rows(0, 0))
    buffers.enter(1)
    module(rows(1, 0))

    buffers.restore()

    for name, value in module.named_buffers():
        assert torch.equal(value, before[name]), name


def stepped(buffers: LogicalBuffers, module: nn.Module, number: int) -> None:
    buffers.begin()
    buffers.enter(0)
    module(rows(0, number))
    buffers.agree()
    buffers.reduce()
    buffers.commit()


def test_what_was_restored_before_any_step_stays_when_the_generation_is_given_up() -> None:
    module = Counting()
    buffers = LogicalBuffers([module], backend())
    module.norm.num_batches_tracked.fill_(20)

    buffers.restore()

    assert module.norm.num_batches_tracked == 20


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wave", torch.tensor([1 + 1j]))
        self.register_buffer("count", torch.tensor((1 << 53) + 1))

    def forward(self, x: torch.Tensor) -> None:
        self.wave += 1j
        self.count += 2


def changed_after_a_step(rank: int, world: int) -> float:
    module = Counting()
    buffers = LogicalBuffers([module], backend())
    stepped(buffers, module, 0)
    buffers.begin()
    module.mask.mul_(2.0)
    buffers.end()
    buffers.restore()
    return float(module.mask[2])


def reached_twice(rank: int, world: int) -> tuple[int, float]:
    module = Counting()
    buffers = LogicalBuffers([module, module.norm], backend())
    for number in range(3):
        stepped(buffers, module, number)
    return int(module.norm.num_batches_tracked), float(module.norm.running_mean.abs().sum())


def odd(rank: int, world: int) -> tuple[list[complex], int]:
    module = Odd()
    stepped(LogicalBuffers([module], backend()), module, 0)
    return module.wave.tolist(), int(module.count)


def test_what_a_task_changes_after_a_step_is_its_own() -> None:
    assert on_ranks(1, changed_after_a_step) == [float(torch.tensor(0.1) * 2)]


def test_a_buffer_that_two_parts_lead_to_changes_once() -> None:
    ((count, mean),) = on_ranks(1, reached_twice)
    assert count == 3
    assert mean > 0


def test_complex_and_large_whole_numbers_keep_every_bit() -> None:
    assert on_ranks(1, odd) == [([1 + 2j], (1 << 53) + 3)]
