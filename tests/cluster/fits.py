"""Jobs that a test runs from its own process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from elastic_trainer import ElasticTrainer, JobConfig, LocalCluster, Result
from elastic_trainer.observability.standing import Standing
from tests.rayrun import job_config

STEPS = 150


class Fit:
    """Runs jobs of three workers on the shared cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path, dataset: str, held_out: str) -> None:
        self._cluster = cluster
        self._folder = folder
        self._data = (dataset, held_out)

    def __call__(self, task: Any, on_standing: Any = None, **fields: Any) -> Result:
        config = job_config(self._folder, *self._data, **{"task": None, "task_args": {}, "steps": STEPS, **fields})
        config["scaling"] = fields.get("scaling", {"max_workers": 3})
        trainer = ElasticTrainer(task, JobConfig(**config), cluster=self._cluster, on_standing=on_standing)
        return trainer.fit()


def ledger(result: Result) -> dict[int, tuple[int, str]]:
    from elastic_trainer.observability.journal import read_stream
    from elastic_trainer.storage.object_store import ObjectStore

    folder = ObjectStore(str(Path(result.path).parent))
    lines = list(read_stream(folder.names("ledger"), folder.read))
    return {line["step"]: (line["samples"], line["digest"]) for line in lines}


class KillAt:
    """Kills workers' processes when the run has done so many steps and three workers train."""

    def __init__(self, kills: list[tuple[int, tuple[int, ...]]]) -> None:
        self.kills = list(kills)
        self.killed: list[int] = []

    def __call__(self, standing: Standing) -> None:
        if not self.kills or standing.step < self.kills[0][0] or standing.world_size < 3 or standing.phase != "running":
            return
        _, victims = self.kills.pop(0)
        for victim in victims:
            pid = next(pid for worker, pid in standing.pids.items() if worker.startswith(f"w{victim}."))
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)
