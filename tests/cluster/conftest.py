"""Runs of the command line that end with the test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from elastic_trainer import LocalCluster
from jobs.rig import Rig
from tests.cluster.fits import Fit
from tests.cluster.hosts_run import HOSTS, STEP_S, HostsRun
from tests.rayrun import CommandRun, await_value, job_config

Start = Callable[..., CommandRun]


@pytest.fixture
def start(tmp_path: Path, dataset: str, held_out: str) -> Iterator[Start]:
    runs: list[CommandRun] = []

    def begin(**fields: Any) -> CommandRun:
        runs.append(CommandRun(tmp_path, job_config(tmp_path, dataset, held_out, **fields)))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, cpus_per_node=1) as running:
        yield running


@pytest.fixture
def nothing_left(cluster: LocalCluster) -> Iterator[None]:
    yield

    def left() -> list[Any]:
        groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
        return [*ray.util.list_named_actors(all_namespaces=True), *groups]

    await_value(lambda: True if not left() else None, 20, lambda: f"left in Ray: {left()}")


@pytest.fixture
def fit(cluster: LocalCluster, nothing_left: None, tmp_path: Path, dataset: str, held_out: str) -> Fit:
    return Fit(cluster, tmp_path, dataset, held_out)


@pytest.fixture
def train(rig: Rig, tmp_path: Path, dataset: str, held_out: str) -> Iterator[Callable[..., HostsRun]]:
    rig.mend()
    runs: list[CommandRun] = []

    def begin(**fields: Any) -> HostsRun:
        scaling = {"min_workers": 1, "max_workers": HOSTS, "resources_per_worker": {"CPU": 1}}
        values: dict[str, Any] = {"scaling": scaling, "steps": 150, "task_args": {"delay_s": STEP_S, "evaluate": False}}
        values["data"] = {"train": dataset}
        values["name"] = name = f"job{uuid.uuid4().hex[:6]}"  # a run of a test that failed may live on in the cluster
        config = job_config(tmp_path, dataset, None, **{**values, **fields})
        runs.append(CommandRun(tmp_path, config, "--address", rig.address, inside=rig.hosts[0].inside))
        return HostsRun(rig, runs[-1], tmp_path / "runs" / name)

    yield begin
    for run in runs:
        try:
            if run.process.poll() != 0:
                rig.end_actors()
        finally:
            run.clean_up()
