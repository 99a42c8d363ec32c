"""The reducer against torch's DDP and against one process, with uneven work and unused parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_trainer.errors import TaskError
from elastic_trainer.training import reducer as reducer_module
from elastic_trainer.training.reducer import Reducer
from tests.training.groups import backend, on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.unused = nn.Parameter(torch.ones(4))
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(hidden * self.sometimes if use else hidden)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def reduced(rank: int, world: int, rows_of: list[int], overlap: bool, bucket: int) -> dict[str, Any]:
    """Gradients of the sum over all ranks' rows divided by their number; each rank does micro-batches of 2 rows."""
    reducer_module.BUCKET_BYTES = reducer_module.FIRST_BUCKET_BYTES = bucket
    net = Net().double()
    reducer = Reducer(net.parameters(), backend())
    start, total = sum(rows_of[:rank]), sum(rows_of)
    micro = inputs(total)[start : start + rows_of[rank]].split(2) if rows_of[rank] else []
    for number, x in enumerate(micro):
        if overlap and number == len(micro) - 1:
            reducer.arm()
        (net(x, use=rank == 0) ** 2).sum().backward()
    reducer.launch()
    reducer.wait()
    reducer.scale_and_clip(1 / total, None)
    return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in net.named_parameters()}


def alone(rows_of: list[int]) -> dict[str, Any]:
    net = Net().double()
    start = 0
    for rank, rows in enumerate(rows_of):
        x = inputs(sum(rows_of))[start : start + rows]
        start += rows
        if rows:
            ((net(x, use=rank == 0) ** 2).sum() / sum(rows_of)).backward()
    return {name: None if p.grad is None else p.grad.numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows_of", [[4, 4], [6, 1, 3], [5, 0], [0, 4], [2]])
def test_gradients_equal_those_of_one_process(rows_of: list[int], overlap: bool) -> None:
    expected = alone(rows_of)
    for bucket in (64, 1 << 20):
        for found in on_ranks(len(rows_of), reduced, rows_of, overlap, bucket):
            assert found["unused"] is None
            for name, value in expected.items():
                if value is None:
                    assert found[name] is None, f"{name} was used by nobody"
                else:
                    assert abs(found[name] - value).max() < 1e-14, name


def against_ddp(rank: int, world: int) -> float:
    net = Net().double()
    other = DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    reducer = Reducer(net.parameters(), backend())
    worst = 0.0
    for step in range(5):
        x = inputs(100 + step)[rank * 8 : rank * 8 + 8]
        other.zero_grad()
        (other(x, True) ** 2).mean().backward()
        reducer.zero()
        reducer.arm()
        (net(x, True) ** 2).sum().backward()
        reducer.launch()
        reducer.wait()
        reducer.scale_and_clip(1 / (8 * world * 2), None)  # a mean over rows and two outputs
        for mine, theirs in zip(net.parameters(), other.module.parameters(), strict=True):
            if mine.grad is not None:
                assert theirs.grad is not None
                worst = max(worst, float((mine.grad - theirs.grad).abs().max()))
    return worst


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_equal_those_of_torch_ddp(world: int) -> None:
    assert max(on_ranks(world, against_ddp)) < 1e-15


def clipped(rank: int, world: int) -> tuple[float, float]:
    nets = [Net().double(), Net().double()]
    reducer = Reducer(nets[0].parameters(), backend())
    x = inputs(8)
    (nets[0](x, True) ** 2).sum().backward()
    reducer.launch()
    reducer.wait()
    reducer.scale_and_clip(1 / world, 0.5)
    (nets[1](x, True) ** 2).sum().backward()
    torch.nn.utils.clip_grad_norm_(nets[1].parameters(), 0.5)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    difference = max(
        float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None
    )
    norm = float(
        torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1) for p in nets[0].parameters() if p.grad is not None]))
    )
    return difference, norm


def test_clipping_equals_torchs() -> None:
    for difference, norm in on_ranks(2, clipped):
        assert difference < 1e-12
        assert norm == pytest.approx(0.5, rel=1e-5)


def misused(rank: int, world: int, how: str) -> str:
    net = Net().double()
    reducer = Reducer(net.parameters(), backend())
    try:
        if how == "late":
            reducer.arm()
            (net(inputs(2), True) ** 2).sum().backward()
            (net(inputs(2), True) ** 2).sum().backward()
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer.zero_grad()  # a habit from other loops, which changes nothing at a step's beginning
            (net(inputs(2), True) ** 2).sum().backward()
            reducer.keep()
            if how == "lost gradients":
                optimizer.zero_grad()
                reducer.check_kept()
                (net(inputs(2), True) ** 2).sum().backward()
        reducer.launch()
        reducer.wait()
    except TaskError as error:
        return str(error)
    return "nothing"


def test_misuse_is_found() -> None:
    assert "backward ran twice" in on_ranks(1, misused, "late")[0]
    assert ".grad was replaced" in on_ranks(1, misused, "lost gradients")[0]
    assert on_ranks(1, misused, "needless zeros")[0] == "nothing"


def sparse(rank: int, world: int) -> list[float]:
    net = nn.Embedding(5, 2, sparse=True)
    reducer = Reducer(net.parameters(), backend())
    for _ in range(2):
        net(torch.tensor([1, 1, 3])).sum().backward()
    reducer.launch()
    reducer.wait()
    assert net.weight.grad is not None
    return net.weight.grad[:, 0].tolist()


def test_sparse_gradients_are_reduced_as_dense_ones() -> None:
    assert on_ranks(2, sparse) == [[0, 8, 0, 4, 0]] * 2


def regrouped(rank: int, world: int) -> float:
    """The same hooks and buffers, first in a group of two, then in one of one."""
    net = Net().double()
    reducer = Reducer(net.parameters(), backend())
    for divide in (world, 1):
        reducer.zero()
        reducer.arm()
        (net(inputs(4), True) ** 2).sum().backward()
        reducer.launch()
        reducer.wait()
        reducer.scale_and_clip(1 / divide, None)
        if divide == world:
            before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    after = [p.grad for p in net.parameters() if p.grad is not None]
    return max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))


def test_the_group_can_be_replaced_under_the_same_hooks() -> None:
    assert max(on_ranks(2, regrouped)) < 1e-13
