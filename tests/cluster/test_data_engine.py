"""Whole runs whose samples Ray Data makes: chosen when there is a CPU for it, and never in the way of training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.rayrun import CommandRun
from tests.rotation import turn

Start = Callable[..., CommandRun]
FIELDS: dict[str, Any] = {"steps": 600, "task": "tests.tasks:DrawingTask", "task_args": {"delay_s": 0.002}}


def losses(run: CommandRun) -> dict[str, Any]:
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 600)
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    return summary


@turn(2, 6)
def test_a_killed_router_changes_nothing(start: Start) -> None:
    run = start(**FIELDS)
    run.await_line("data: preprocessed by Ray Data on 1 CPU")
    run.await_line("  running  ", 60)
    os.kill(run.await_pids("ray::Router", 1)[0], signal.SIGKILL)
    assert run.end(120) == 0, run.output
    routed = losses(run)
    run.assert_nothing_left()

    direct = start(**{**FIELDS, "name": "direct"}, data={**run.config["data"], "engine": "direct"})
    assert direct.end(120) == 0, direct.output
    assert "data: read by the workers (data.engine)" in direct.output
    assert routed["final_loss"] == pytest.approx(losses(direct)["final_loss"], rel=1e-9)


@turn(4, 6)
def test_without_a_cpu_for_ray_data_the_workers_do_it_and_the_run_says_so(start: Start) -> None:
    run = start(**FIELDS, scaling={"max_workers": 2, "resources_per_worker": {"CPU": 1}})
    assert run.end(120) == 0, run.output
    assert "beside 2 of them the cluster has no 1 CPU left for Ray Data (data.cpus)" in run.output
    losses(run)
    run.assert_nothing_left()
