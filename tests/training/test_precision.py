from __future__ import annotations

import functools
from typing import Any

import torch

from elastic_trainer.training.precision import backward, forward
from tests.harness import Harness, settings_for
from tests.tasks import NetTask


def test_bf16_runs_forward_in_it_and_keeps_weights() -> None:
    layer = torch.nn.Linear(4, 4)
    with forward("bf16", torch.device("cpu")):
        out = layer(torch.ones(2, 4))
        with backward("bf16", torch.device("cpu")):
            assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert (out.dtype, layer.weight.dtype) == (torch.bfloat16, torch.float32)
    with forward("fp32", torch.device("cpu")), backward("fp32", torch.device("cpu")):
        assert layer(torch.ones(2, 4)).dtype == torch.float32


def test_a_run_in_bf16_learns_alike_for_any_number_of_workers(dataset: str) -> None:
    """In float64 nothing is autocast; this net is float32."""
    task: Any = functools.partial(NetTask, dtype="float32")
    outcomes = {
        (precision, workers): Harness(
            task, settings_for(dataset, steps=60, precision=precision, clip_norm=1.0), workers=workers
        ).run()
        for precision, workers in (("fp32", 1), ("bf16", 1), ("bf16", 3))
    }

    exact, one, three = outcomes.values()
    assert one.losses != exact.losses, "autocast did nothing"
    assert abs(sum(one.losses[-10:]) / sum(exact.losses[-10:]) - 1) < 0.2
    assert max(abs(a - b) / abs(a) for a, b in zip(one.losses, three.losses, strict=True)) < 1e-3
    assert three.audit.bad_steps() == []
