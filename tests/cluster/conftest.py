"""Runs of the command line that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from elastic_trainer import LocalCluster
from tests.cluster.fits import Fit
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
