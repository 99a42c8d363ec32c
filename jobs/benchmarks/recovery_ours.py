"""A session of ours for `recovery.py`: three workers train until they are told to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from elastic_trainer import DataConfig, ElasticTrainer, JobConfig, Run, ScalingConfig, prepare
from jobs.benchmarks.marks import Marks
from jobs.benchmarks.small_gpt import SmallGPT, fill_up, loss_of, tokens_of


def paced_steps(run: Run) -> Iterator[tuple[int, torch.nn.Module]]:
    """Train the small GPT, each step filled up to its time: number and model after every done step."""
    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    for step in run.steps():
        began = time.monotonic()
        with step:
            for batch in step:
                step.backward(loss_of(model, batch["tokens"]) * batch.rows, batch.rows)
            fill_up(began)
            step.apply(optimizer)
        if step.is_done:
            yield step.number, model


class Train:
    """The training function; a class, so that it knows the folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, run: Run) -> None:
        """Mark every done step."""
        marks = Marks(self.folder)
        for number, model in paced_steps(run):
            marks.done(number + 1, run.rank, run.world_size, model)


def main(folder: str, rows: int = 6000, steps: int = 1_000_000) -> None:
    """Train in `folder` on so many rows until these steps are done, or SIGTERM."""
    np.savez(f"{folder}/tokens.npz", tokens=tokens_of(rows, 0).numpy())
    prepare(f"{folder}/tokens.npz", f"{folder}/data")
    config = JobConfig(
        name="run",
        storage=folder,
        data=DataConfig(train=f"{folder}/data"),
        scaling=ScalingConfig(max_workers=3, resources_per_worker={"CPU": 0.5}),
        steps=steps,
        global_batch=12,
        micro_batch=2,
        logical_ranks=6,
    )
    ElasticTrainer(Train(folder), config).fit()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
