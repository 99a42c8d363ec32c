"""How a run on Ray ends, in each phase, and that no process is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.rayrun import CommandRun
from tests.rotation import rotating, turn

Start = Callable[..., CommandRun]


PHASES = ["cluster", "starting", "running", "rebuilding", "evaluating"]


def reach(run: CommandRun, phase: str) -> None:
    """Bring a run into a phase."""
    if phase == "cluster":
        run.await_pids("gcs_server", 1)
    elif phase == "starting":
        run.await_pids("ray::WorkerActor", 1)
    elif phase == "running":
        run.await_line("generation 1")
    elif phase == "rebuilding":
        run.await_line("generation 1")
        os.kill(run.pids("ray::WorkerActor")[0], signal.SIGKILL)
    else:
        run.await_line("evaluating now")


def fields_for(phase: str) -> dict[str, Any]:
    if phase == "evaluating":
        return {"task": "tests.tasks:SlowEvaluationTask", "task_args": {}, "evaluate_every": 10}
    return {}


STOPS = [(phase, signum) for signum in (signal.SIGINT, signal.SIGTERM) for phase in PHASES]


@pytest.mark.parametrize(("phase", "signum"), rotating(STOPS, 1, 0, 2))
def test_a_stop_signal_ends_the_run_with_its_summary(phase: str, signum: signal.Signals, start: Start) -> None:
    run = start(**fields_for(phase))
    reach(run, phase)

    run.process.send_signal(signum)

    assert run.end() == 130, run.output
    run.assert_nothing_left()
    if phase == "cluster":
        assert not run.summary_path.parent.exists(), "a run that never began left its folder"
    else:
        assert run.summary()["status"] == "stopped"
        assert run.summary()["samples_missing"] == 0


@turn(1, 4)
def test_a_second_signal_does_not_wait_for_the_step(start: Start) -> None:
    run = start(task="tests.tasks:StuckTask", task_args={})
    run.await_line("stuck now")

    run.process.send_signal(signal.SIGINT)
    run.await_line("stopped by SIGINT")
    run.process.send_signal(signal.SIGINT)

    assert run.end(20) == 130, run.output
    run.assert_nothing_left()


@pytest.mark.parametrize("phase", rotating(PHASES, 1, 1, 2))
def test_a_killed_driver_takes_its_cluster_along(phase: str, start: Start) -> None:
    run = start(**fields_for(phase))
    reach(run, phase)

    run.process.kill()

    run.assert_nothing_left()


def test_a_finished_run_leaves_nothing_and_a_whole_summary(start: Start) -> None:
    run = start(steps=60)

    assert run.end() == 0, run.output

    run.assert_nothing_left()
    summary = run.summary()
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["samples_missing"], summary["samples_repeated"]) == (60, 0, 0)
    assert summary["samples_trained"] == 21 * 24 * 2 + 2 * 4 + 16 * 24
    assert set(summary["evaluation"]) == {"error", "rows"}
    assert run.lines[-1] == str(run.summary_path)


@turn(2, 4)
def test_a_workers_children_end_with_it(start: Start) -> None:
    run = start(task="tests.tasks:ForkingTask", task_args={})
    run.await_pids("sleep 1234", 2)
    run.await_line("generation 1")
    victim = run.pids("ray::WorkerActor")[0]
    before = run.pids("sleep 1234")

    os.kill(victim, signal.SIGKILL)

    run.await_line("generation 2")
    run.await_pids("ray::WorkerActor", 2)
    run.await_line("generation 3")
    assert len(set(run.pids("sleep 1234")) & set(before)) == 1, "the killed worker's child lives on"
    run.process.send_signal(signal.SIGINT)
    run.end()
    run.assert_nothing_left()


@pytest.mark.parametrize("role", rotating(["ray::NodeAgent", "ray::RendezvousStore"], 1, 3, 4))
def test_the_runs_own_helpers_may_die(role: str, start: Start) -> None:
    """The store's death is not even noticed by the group; an agent's takes its workers along, which are replaced."""
    run = start(steps=600, evaluate_every=20)
    run.await_line("evaluation after step 20")

    os.kill(run.pids(role)[0], signal.SIGKILL)

    if role == "ray::RendezvousStore":
        run.await_line("rendezvous store is gone")
        os.kill(run.pids("ray::WorkerActor")[0], signal.SIGKILL)
        assert run.end() == 0, run.output
        assert run.summary()["samples_missing"] == 0
    else:
        # on one node all workers hang on one agent, and with them goes all state: back to what was saved
        assert run.end() == 0, run.output
        assert "no worker that holds the" in run.output
        assert run.summary()["samples_missing"] == 0
    run.assert_nothing_left()
