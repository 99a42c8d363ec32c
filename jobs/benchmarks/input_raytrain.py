"""One epoch of 1001 rows through Ray Train's own path, for `input.py`: two workers, one of them killed in mid-epoch."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

ROWS = 1001


def train(config: dict[str, Any]) -> None:
    """Goes through its shard once and writes down the rows that it got."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    shard = ray.train.get_dataset_shard("train")
    with open(f"{config['folder']}/{os.getpid()}.rows", "a") as file:
        for number, batch in enumerate(shard.iter_batches(batch_size=10)):
            file.write("".join(f"{row}\n" for row in batch["id"].tolist()))
            file.flush()
            time.sleep(0.02)
            if rank == 1 and number == 25 and not os.path.exists(f"{config['folder']}/killed"):
                open(f"{config['folder']}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str) -> None:
    """Until the epoch has ended."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from elastic_trainer.cluster.local import LocalCluster

    with LocalCluster(cpus_per_node=4):
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            torch_config=TorchConfig(backend="gloo"),
            datasets={"train": ray.data.range(ROWS, override_num_blocks=20)},
            run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=3)),
        ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
