"""Workers that live and do not go on: who is named, when, and what long work is no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.object_store import ObjectStore
from tests.cluster.conftest import Start
from tests.cluster.fits import Fit, KillAt
from tests.rotation import rotating, turn
from tests.s3server import FaultProxy, S3Server
from tests.tasks import HangingTask, NetTask, SlowBuildTask, SlowToCollectTask, SlowWorkerTask

STEP = 60
HANGS = ["deadlock", "holds the interpreter"]
# how long they take to be judged is in their nature: half a minute while the CPU is used, or data is waited for
LONG_HANGS = ["spin", "loader", "save"]


def longest_pause(path: str) -> float:
    """Seconds between two done steps that follow each other."""
    store = ObjectStore(str(Path(path).parent))
    times = sorted(line["done_at"] for line in read_stream(store.names("metrics"), store.read) if "step" in line)
    return max(later - earlier for earlier, later in pairwise(times))


def check_hang(fit: Fit, how: str, capsys: pytest.CaptureFixture[str], most_s: float) -> str:
    # enough saves before it, so that their time is known
    result = fit(HangingTask(how, worker_id=1, step=STEP), steps=200, checkpoint={"every_steps": 8})
    out = capsys.readouterr().out
    summary = result.summary
    assert summary["status"] == "finished"
    assert summary["steps_redone"] == 0
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    assert summary["survivor_pids_unchanged"]
    assert summary["workers_given_up"] == 1
    assert "w1.0 lost while training: it stood still" in out
    assert longest_pause(result.path) < most_s
    return out


@pytest.mark.parametrize("how", rotating(HANGS, 1, 0, 3))
def test_a_worker_that_hangs_is_named_with_its_stacks_and_replaced(
    fit: Fit, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = check_hang(fit, how, capsys, most_s=6.0)  # the budget is 2 s
    assert "w0.0 in phase 'reduce'" in out
    if how == "deadlock":
        assert f"in phase 'loss' of step {STEP}" in out
        assert "in _deadlock" in out  # its stacks
    else:
        assert "after phase" in out  # what it had told last
        assert "in _holds_the_interpreter" in out


@pytest.mark.soak
@pytest.mark.parametrize("how", LONG_HANGS)
def test_a_worker_that_spins_waits_for_data_or_hangs_in_a_save_has_half_a_minute(
    fit: Fit, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = check_hang(fit, how, capsys, most_s=45.0)
    assert "30.0 s are its budget there" in out


@pytest.mark.parametrize("how", rotating(["collects garbage", "evaluates long", "calls back long"], 1, 2, 6))
def test_long_work_is_no_hang(fit: Fit, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    worker_id = 0 if how == "calls back long" else 1  # only rank 0 is called back
    result = fit(HangingTask(how, worker_id=worker_id, step=STEP), steps=150, evaluate_every=75)
    assert result.summary["status"] == "finished"
    assert len(result.summary["generations"]) == 1, capsys.readouterr().out
    assert longest_pause(result.path) > 15


@turn(0, 6)
def test_a_save_that_takes_long_to_copy_is_no_hang(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = SlowToCollectTask(str(tmp_path / "told"), seconds=20.0)
    result = fit(task, steps=100, checkpoint={"every_steps": STEP})
    assert result.summary["status"] == "finished"
    assert len(result.summary["generations"]) == 1, capsys.readouterr().out
    assert longest_pause(result.path) > 15


@turn(3, 12)
def test_a_store_that_takes_long_is_no_hang(fit: Fit, s3: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Training goes on beside the first save, and the last one, behind it, is waited for."""
    late: list[str] = []

    def plan(line: str) -> str:
        if line.startswith("PUT") and ".bin" in line:
            late.append(line)
            return "late"
        return ""

    with FaultProxy(s3.port) as proxy:
        proxy.plan = plan
        result = fit(
            NetTask(delay_s=0.002, evaluate=False),
            steps=100,
            checkpoint={"every_steps": STEP},
            storage=s3.url(),
            storage_options=s3.options(proxy.port),
        )
    assert result.summary["status"] == "finished"
    assert len(late) >= 6  # of three workers, twice
    assert len(result.summary["generations"]) == 1, capsys.readouterr().out


@turn(4, 6)
def test_a_worker_that_everybody_waits_for_is_named(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(SlowWorkerTask(worker_id=1, from_step=STEP), steps=120)
    assert result.summary["status"] == "finished"
    assert len(result.summary["generations"]) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if "is slow: a micro-batch takes it" in line]
    assert len(named) == 1
    assert "w1.0 on host" in named[0]


@turn(2, 6)
def test_a_slow_worker_gets_fewer_slices(fit: Fit) -> None:
    scaling = {"max_workers": 3, "stragglers": "relieve"}
    result = fit(SlowWorkerTask(worker_id=1, from_step=STEP), steps=240, scaling=scaling)
    summary = result.summary
    assert summary["status"] == "finished"
    assert [each["reason"] for each in summary["generations"]][1] == "w1.0 is slow and gets fewer logical ranks"
    assert summary["survivor_pids_unchanged"]
    assert (summary["samples_missing"], summary["samples_repeated"], summary["steps_redone"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [*rotating([(10.0, 1200)], 1, 10, 12), pytest.param(60.0, 6000, marks=pytest.mark.soak)],
)
def test_a_newcomer_that_builds_for_long_holds_nobody_up(fit: Fit, seconds: float, steps: int) -> None:
    result = fit(SlowBuildTask(seconds), KillAt([(40, (1,))]), steps=steps)
    assert [each["world_size"] for each in result.summary["generations"]] == [3, 2, 3]
    assert result.summary["steps_redone"] == 0
    assert longest_pause(result.path) < 3.0


@turn(5, 6)
def test_a_controller_that_stands_still_for_seconds_blames_nobody_for_their_silence(start: Start) -> None:
    run = start(steps=2500, scaling={"max_workers": 3, "resources_per_worker": {"CPU": 0.5}})
    run.await_line("3 workers from step 0", 120)
    controller = run.pids("ray::Controller")[0]
    for _ in range(3):
        os.kill(controller, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(controller, signal.SIGCONT)
        time.sleep(0.5)

    assert run.end(120) == 0, run.output
    summary = run.summary()
    assert len(summary["generations"]) == 1, run.output
    assert summary["workers_given_up"] == 0


LOADED_S = float(os.environ.get("LOADED_S", "10"))


@pytest.fixture
def full_load() -> Iterator[None]:
    """Every core has something else to do too."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for process in spinning:
        process.kill()
        process.wait()


@turn(1, 6)
@pytest.mark.timeout(LOADED_S + 240)
def test_nobody_is_given_up_under_full_load(start: Start, full_load: None) -> None:
    run = start(
        steps=10_000_000,
        scaling={"max_workers": 3, "resources_per_worker": {"CPU": 0.5}},
        evaluate_every=200,
        checkpoint={"every_steps": 150},
    )
    run.await_line("3 workers from step 0", 120)
    time.sleep(LOADED_S)
    assert run.process.poll() is None, run.output

    os.kill(run.process.pid, signal.SIGINT)

    run.end(60)
    summary = run.summary()
    assert summary["status"] == "stopped", run.output
    assert len(summary["generations"]) == 1, run.output
    assert summary["workers_given_up"] == 0
    assert summary["steps_redone"] == 0
