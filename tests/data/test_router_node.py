"""The node on which Ray Data preprocesses is killed: training goes on, with the same samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_trainer.cluster.local import LocalCluster
from tests.conftest import make_dataset
from tests.data.routed import ROWS, Idle, Routed, Shifting


def test_the_preprocessing_node_is_killed(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "train", ROWS)
    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        head = next(node for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
        here = NodeAffinitySchedulingStrategy(head["NodeID"], soft=False)
        blocker = ray.remote(Idle).options(num_cpus=1, scheduling_strategy=here).remote()
        ray.get(blocker.ping.remote())
        each = Routed("node", folder, Shifting())
        steps = range(200)

        def kill(step: int) -> None:
            if step == 60:
                os.kill(second_raylet(cluster), signal.SIGKILL)

        assert each.serve(steps, [range(12)], kill) == each.expected(steps)
        each.end()


def second_raylet(cluster: LocalCluster) -> int:
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace") if folder.name.isdigit() else ""
        except OSError:
            continue
        if cluster.temp_folder in command and "sockets/raylet.1" in command and "/raylet/raylet" in command:
            return int(folder.name)
    raise AssertionError("there is no second raylet")
