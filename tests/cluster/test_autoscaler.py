"""Ray's own autoscaler starts hosts for a run, replaces one that dies, and takes those back that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.rig import Rig, why_not
from tests.cloud import Cloud
from tests.rayrun import CommandRun, await_value, job_config
from tests.rotation import turn

HOSTS = 4


@pytest.fixture
def rig() -> Iterator[Rig]:
    if problem := why_not():
        pytest.skip(problem)
    made = Rig(HOSTS)
    yield made
    made.close()


@turn(3, 12)
def test_hosts_come_for_a_run_are_replaced_and_go_when_it_is_over(rig: Rig, tmp_path: Path, dataset: str) -> None:
    cloud = Cloud(rig)
    rig.start_head()
    scaling = {"min_workers": 2, "max_workers": HOSTS, "resources_per_worker": {"CPU": 1}, "wait_s": 90.0}
    config = job_config(
        tmp_path,
        dataset,
        None,
        data={"train": dataset},
        scaling=scaling,
        steps=1200,
        task_args={"delay_s": 0.01, "evaluate": False},
    )
    run = CommandRun(tmp_path, config, "--address", rig.address, inside=rig.hosts[0].inside)
    try:
        run.await_line(f"{HOSTS} workers from step", 120)
        assert cloud.launched == HOSTS
        lost = cloud.hosts()[1]
        seen = len(run.lines)
        lost.power_off()

        await_value(lambda: True if cloud.launched > HOSTS else None, 90, lambda: f"{run.output}\n{rig.logs()}")
        await_value(
            lambda: True if any(f"{HOSTS} workers from step" in line for line in run.lines[seen:]) else None,
            90,
            lambda: f"{run.output}\n{rig.logs()}",
        )
        assert run.end(150) == 0, run.output
        summary = run.summary()
        assert (summary["samples_missing"], summary["samples_repeated"], summary["steps_redone"]) == (0, 0, 0)
        await_value(lambda: True if not cloud.hosts() else None, 90, lambda: f"not taken back: {cloud.hosts()}")
    finally:
        run.clean_up()
        cloud.close()
