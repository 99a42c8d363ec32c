"""Batches on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic_trainer.data.batch_plan import MicroBatchPlan
from elastic_trainer.errors import TaskError
from elastic_trainer.training.batches import make_batch
from elastic_trainer.training.device import BatchCopies, Host, check_gpu, is_lost

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")


def test_a_worker_without_gpus_computes_on_the_cpu_and_copies_nothing() -> None:
    check_gpu(0)
    batch = make_batch(MicroBatchPlan(0, 0, 0, np.arange(3), 3), {"x": np.ones(3)}, None, False)
    copies = BatchCopies(torch.device("cpu"))
    assert copies.on_device(copies.pinned(batch)) is batch


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_torch_does_not_see_is_told() -> None:
    with pytest.raises(TaskError, match=r"GPU: 1, and torch .* sees no GPU"):
        check_gpu(1)


@needs_gpu
def test_batches_arrive_whole_while_the_device_is_busy() -> None:
    device = torch.device("cuda", 0)
    copies = BatchCopies(device)
    busy = torch.rand(4096, 4096, device=device)
    for number in range(20):
        busy = busy @ busy / 4096
        rows = {"x": np.full((64, 65_536), number, "f4"), "t": np.array(["a"] * 64, object)}
        batch = make_batch(MicroBatchPlan(0, 0, 0, np.arange(64), 64), rows, None, False)
        found = copies.on_device(copies.pinned(batch))
        assert found["x"].device == device
        assert found["t"] == ["a"] * 64
        assert found.rows == 64
        assert bool((found["x"] == number).all())


def test_the_host_is_never_behind_and_never_lost() -> None:
    here = Host().fetch(torch.ones(2))
    assert here.is_there()
    assert here.value().tolist() == [1.0, 1.0]
    assert not is_lost(Host())
