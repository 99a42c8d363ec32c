"""A session of Ray Train 2.60 for `recovery.py` and `hosts.py`: a checkpoint every 50 steps, restarts without end.

On one machine it has three workers; in the cluster of a given address two to three, with a CPU each, elastically.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from typing import Any

CHECKPOINT_EVERY = 50


def train(config: dict[str, Any]) -> None:
    """As its documentation does it: DDP, report() with a checkpoint, back from the last one."""
    import ray.train
    import ray.train.torch
    import torch

    sys.path.insert(0, config["root"])
    from jobs.benchmarks.marks import Marks
    from jobs.benchmarks.small_gpt import SmallGPT, fill_up, loss_of, tokens_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = state["steps"]
    ddp = ray.train.torch.prepare_model(model)
    marks = Marks(config["folder"])
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        loss_of(ddp, tokens_of(4, steps * 3 + rank)).backward()
        fill_up(began)
        optimizer.step()
        steps += 1
        marks.done(steps, rank, world, model)
        if steps % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
                    torch.save(state, os.path.join(folder, "state.pt"))
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"steps": steps}, checkpoint=saved)


def main(folder: str, address: str = "") -> None:
    """Train in `folder` until killed, in a cluster of its own or in that of `address`."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from elastic_trainer.cluster.local import LocalCluster

    with contextlib.ExitStack() as stack:
        if address:
            ray.init(address=address)
            scaling = ScalingConfig(num_workers=(2, 3), resources_per_worker={"CPU": 1})
        else:
            stack.enter_context(LocalCluster(cpus_per_node=3))
            assert ray.is_initialized()
            scaling = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5})
        TorchTrainer(
            train,
            train_loop_config={"folder": folder, "root": os.getcwd()},
            scaling_config=scaling,
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
        ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
