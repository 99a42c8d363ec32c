"""The controller dies and another takes over: training goes on meanwhile, and nothing is lost or repeated."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rayrun import CommandRun, await_value
from tests.rotation import rotating, turn

Start = Callable[..., CommandRun]


def kill(run: CommandRun, role: str) -> int:
    pid = run.await_pids(role, 1)[0]
    os.kill(pid, signal.SIGKILL)
    return pid


def assert_exact(run: CommandRun, steps: int) -> dict[str, Any]:
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    return summary


def await_account(run: CommandRun) -> None:
    """The first generation stands in the run's account; a controller that dies before leaves nothing of it."""
    path = run.summary_path.parent / "accounts/000001.json"
    await_value(
        lambda: True if path.exists() and '"generation": 1' in path.read_text() else None, 30, lambda: run.output
    )


PHASES = ["cluster", "starting", "running", "rebuilding", "evaluating", "saving"]


@pytest.mark.parametrize("phase", rotating(PHASES, 1, 0, 2))
def test_another_controller_takes_over_in_each_phase(phase: str, start: Start) -> None:
    fields: dict[str, Any] = {"steps": 900, "checkpoint": {"every_steps": 100}, "timeouts": {"form_s": 10.0}}
    if phase == "evaluating":
        fields |= {"steps": 20, "task": "tests.tasks:SlowEvaluationTask", "task_args": {}, "evaluate_every": 10}
    if phase == "saving":
        fields |= {"checkpoint": {"every_steps": 3}}
    run = start(**fields)
    awaited = {"cluster": "ray::Controller", "starting": "ray::WorkerActor"}
    if phase in awaited:
        run.await_pids(awaited[phase], 1)
    else:
        run.await_line("evaluating now" if phase == "evaluating" else "generation 1")
        await_account(run)
    if phase == "rebuilding":
        os.kill(run.pids("ray::WorkerActor")[0], signal.SIGKILL)
        time.sleep(0.05)
    workers = run.pids("ray::WorkerActor")

    kill(run, "ray::Controller")

    assert run.end(120) == 0, run.output
    summary = assert_exact(run, fields["steps"])
    assert summary["terms"] == 2 or phase == "cluster", run.output  # there it may die before its term begins
    if phase in ("running", "evaluating", "saving"):
        assert "another takes over" in run.output
        assert [g["reason"] for g in summary["generations"]][1] == "term 2 takes over"
        assert [g["resume_step"] for g in summary["generations"]][1] > 0, "training began anew"
        assert summary["steps_redone"] == 0
        assert workers
    run.assert_nothing_left()


@turn(3, 4)
def test_training_goes_on_while_there_is_no_controller(start: Start) -> None:
    run = start(steps=3000, task_args={"delay_s": 0.004}, checkpoint={"every_steps": 20})
    run.await_line("workers  saved ")  # the first step can take a second
    workers = run.await_pids("ray::WorkerActor", 2)
    mapped = Path(f"/proc/{run.pids('ray::Controller')[0]}/maps").read_text()
    assert "libtorch" not in mapped, "the controller needs no torch, which takes a second to load"
    before = time.monotonic()
    controller = kill(run, "ray::Controller")
    run.await_line("generation 2")
    away_s = time.monotonic() - before
    assert run.pids("ray::WorkerActor") == workers, "a worker was replaced"
    assert run.pids("ray::Controller") != [controller]

    run.process.send_signal(signal.SIGTERM)

    assert run.end(60) == 130, run.output
    summary = run.summary()
    assert summary["status"] == "stopped"
    second = summary["generations"][1]
    # a step takes some 25 ms here; a group that waits for its controller would have done none meanwhile
    assert second["resume_step"] >= 20 + away_s / 0.25, (away_s, second)
    assert summary["steps_redone"] == 0
    assert summary["checkpoint"]["steps"] == summary["steps"]
    run.assert_nothing_left()


@pytest.mark.parametrize("other", rotating(["ray::RendezvousStore", "ray::WorkerActor"], 1, 1, 4))
def test_the_controller_and_another_die_together(other: str, start: Start) -> None:
    run = start(steps=600)
    run.await_line("generation 1")
    run.await_pids("ray::WorkerActor", 2)

    kill(run, other)
    kill(run, "ray::Controller")

    assert run.end(120) == 0, run.output
    summary = assert_exact(run, 600)
    assert summary["steps_redone"] <= 1
    run.assert_nothing_left()


@pytest.mark.soak
def test_a_worker_that_waits_for_a_controller_in_vain_ends(start: Start) -> None:
    """It says why, after a minute; the controller that was stopped finds it gone when it goes on."""
    run = start(steps=900, checkpoint={"every_steps": 50})
    run.await_line("workers  saved ")
    waiting, killed = run.await_pids("ray::WorkerActor", 2)
    controller = run.pids("ray::Controller")[0]

    os.kill(controller, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    await_value(lambda: True if not run.pids("ray::WorkerActor") else None, 90, lambda: run.output)
    assert waiting not in run.pids("")
    os.kill(controller, signal.SIGCONT)

    assert run.end(60) == 0, run.output
    assert "another may have its place, so it ends" in run.output
    summary = assert_exact(run, 900)
    assert summary["terms"] == 1
    run.assert_nothing_left()


@turn(7, 12)
def test_of_two_clusters_that_start_one_run_the_later_has_it(start: Start) -> None:
    """The controller of the other one stops at its next entry in the log, and says why."""
    fields = {"steps": 250, "task_args": {"delay_s": 0.05}, "checkpoint": {"every_steps": 20}}
    first = start(**fields)
    first.await_line("workers  saved ")
    second = start(**fields)

    assert first.end(90) != 0
    assert "taken over" in first.output
    assert second.end(120) == 0, second.output
    assert_exact(second, 250)
    first.assert_nothing_left()


@pytest.mark.soak
def test_a_controller_that_dies_again_and_again(start: Start) -> None:
    run = start(steps=1500, checkpoint={"every_steps": 50})
    run.await_line("generation 1")
    killed: list[int] = []

    for _ in range(4):
        killed.append(kill(run, "ray::Controller"))
        await_value(
            lambda: True if set(run.pids("ray::Controller")) - set(killed) or run.process.poll() is not None else None,
            60,
            lambda: run.output,
        )

    assert run.end(120) == 0, run.output
    assert_exact(run, 1500)
    run.assert_nothing_left()
