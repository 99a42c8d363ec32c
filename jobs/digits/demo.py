"""A run that loses a worker: three nodes on this machine, three workers, a SIGKILL at a third of the way.

    python -m jobs.digits.demo [--data FOLDER] [--storage FOLDER]

Prints what happened and, last, the path of the run's summary. Exit status 0 only if everything held that it shows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from elastic_trainer import DataConfig, ElasticTrainer, ElasticTrainerError, JobConfig, LocalCluster, ScalingConfig
from elastic_trainer.cli import describe
from elastic_trainer.observability.standing import Standing
from jobs.digits.data import prepare_digits
from jobs.digits.plain import BATCH, tensors
from jobs.digits.task import Digits

WORKERS = 3
MICRO_BATCH = 8
# Seconds of computing alone, so that training takes longer than that on any machine; three processes on two cores need
# about three times as much. The killed worker's replacement needs 3 to 10 s of it.
TRAIN_S = 20.0
WIDTH = 64  # so large that a step is mostly computing, which makes its time predictable
VICTIM = "w1.0"


def steps_for(seconds: float, folder: Path) -> int:
    """About how many steps take so long here, from the speed of some micro-batches in this process."""
    torch.set_num_threads(1)
    task = Digits(WIDTH)
    model = task.build_model()
    images, digits = tensors(folder / "train")
    timed = 10 * BATCH // MICRO_BATCH
    start = time.perf_counter()
    for _ in range(timed):
        torch.nn.functional.cross_entropy(model(images[:MICRO_BATCH]), digits[:MICRO_BATCH]).backward()
    step_s = (time.perf_counter() - start) / 10 / min(WORKERS, len(os.sched_getaffinity(0)))
    return max(300, round(seconds / step_s))


class Killer:
    """Kills one worker process when a third of the steps is done."""

    def __init__(self) -> None:
        self.killed: int | None = None

    def __call__(self, standing: Standing) -> None:
        """Look at the run."""
        if self.killed is None and standing.step >= standing.steps // 3 and VICTIM in standing.pids:
            self.killed = standing.pids[VICTIM]
            print(
                f"--- killing worker {VICTIM}, process {self.killed}, with SIGKILL at step {standing.step}", flush=True
            )
            os.kill(self.killed, signal.SIGKILL)


def problems(summary: dict[str, Any], killed: int | None) -> list[str]:
    """What did not hold of what this demonstration shows."""
    sizes = [generation["world_size"] for generation in summary["generations"]]
    claims = {
        "no worker was killed": killed is not None,
        f"the workers were {sizes}, not 3, then 2, then 3 again": sizes == [WORKERS, WORKERS - 1, WORKERS],
        "survivors changed their processes": summary["survivor_pids_unchanged"],
        "samples are missing or repeated": summary["samples_missing"] == 0 and summary["samples_repeated"] == 0,
        f"test accuracy is only {summary['evaluation']['accuracy']:.3f}": summary["evaluation"]["accuracy"] >= 0.95,
    }
    return [claim for claim, holds in claims.items() if not holds]


def main() -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/digits"))
    parser.add_argument("--storage", default="./runs")
    options = parser.parse_args()
    prepare_digits(options.data)
    config = JobConfig(
        name=f"digits-demo-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}",
        storage=options.storage,
        task="jobs.digits.task:Digits",
        task_args={"width": WIDTH},
        data=DataConfig(train=str(options.data / "train"), evaluation=str(options.data / "test")),
        scaling=ScalingConfig(min_workers=1, max_workers=WORKERS),
        steps=steps_for(TRAIN_S, options.data),
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
        logical_ranks=12,
    )
    killer = Killer()
    try:
        cluster = LocalCluster(nodes=WORKERS, cpus_per_node=1)
        summary = ElasticTrainer(None, config, cluster=cluster, on_standing=killer).fit().summary
    except ElasticTrainerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
        return 130
    if summary["status"] == "stopped":
        print("\n".join(describe(summary)))
        return 130
    failed = problems(summary, killer.killed)
    for claim in failed:
        print(f"FAILED: {claim}", file=sys.stderr)
    print(f"test accuracy: {summary['evaluation']['accuracy']:.4f}")
    print("\n".join(describe(summary)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
