"""The node on which Ray Data preprocesses is killed: training goes on, with the same samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_trainer.cluster.local import LocalCluster
from elastic_trainer.cluster.processes import command_of
from tests.conftest import make_dataset
from tests.data.routed import ROWS, Idle, Routed, Shifting, Sized
from tests.rotation import turn


@turn(0, 2)
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
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    wanted = (cluster.temp_folder, "sockets/raylet.1", "/raylet/raylet")
    (found,) = [pid for pid in pids if all(part in command_of(pid) for part in wanted)]
    return found


@turn(1, 2)
def test_an_object_store_of_100_mb_hangs_nobody(tmp_path: Path) -> None:
    """An epoch is some 250 MB here, of rows that preprocess makes large, and may not be spilled."""
    folder = make_dataset(tmp_path / "train", ROWS)
    with LocalCluster(cpus_per_node=2, object_store_bytes=100 << 20) as cluster:
        each = Routed("small", folder, Sized(), window=20, ahead_bytes=1 << 30)
        each.serve_until_routed(0, [range(6), range(6, 12)], share=0.3)
        spilled = [path for path in Path(cluster.temp_folder).rglob("*spilled*/*") if path.is_file()]
        each.end()
    assert not spilled
