"""The digits job and its demonstration, as a user runs them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.digits.data import prepare_digits
from jobs.digits.plain import train_plainly
from tests.rayrun import CommandRun
from tests.rotation import rotating, turn

Start = Callable[..., CommandRun]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    prepare_digits(folder)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[CommandRun] = []

    def begin(*command: str) -> CommandRun:
        runs.append(CommandRun(tmp_path, None, *command))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@turn(0, 4)
def test_the_demonstration_holds_what_it_shows(digits: Path, tmp_path: Path, start: Start) -> None:
    run = start("-m", "jobs.digits.demo", "--data", str(digits), "--storage", str(tmp_path))

    assert run.end(180) == 0, run.output

    run.assert_nothing_left()
    summary: dict[str, Any] = json.loads(Path(run.lines[-1]).read_text())
    assert [g["world_size"] for g in summary["generations"]] == [3, 2, 3]
    assert "its process died" in summary["generations"][1]["reason"]
    assert summary["survivor_pids_unchanged"]
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    assert f"samples: {summary['samples_trained']} trained, 0 missing, 0 repeated" in run.output
    assert len(summary["recovery_s"]) == 1
    assert summary["wall_s"] >= 20
    assert summary["evaluation"]["accuracy"] >= 0.95


@turn(2, 4)
def test_the_job_reaches_the_accuracy_of_a_plain_loop(digits: Path, tmp_path: Path, start: Start) -> None:
    run = start(
        *("-m", "elastic_trainer", "run", "jobs/digits/job.yaml", "--set", f"storage={tmp_path}"),
        *("--set", f"data.train={digits / 'train'}", "--set", f"data.evaluation={digits / 'test'}"),
    )

    assert run.end(120) == 0, run.output

    accuracy = json.loads((tmp_path / "digits" / "summary.json").read_text())["evaluation"]["accuracy"]
    assert accuracy >= 0.95
    assert abs(accuracy - train_plainly(digits, 180)) <= 0.02
    audit = start("-m", "elastic_trainer", "data", "audit", str(tmp_path / "digits"))
    assert audit.end() == 0
    assert "180 steps: samples: 17244 trained, 0 missing, 0 repeated" in audit.output


MOMENTS = ["data/digits", "gcs_server", "ray::WorkerActor", "generation 1", "killing worker"]


@pytest.mark.parametrize("moment", rotating(MOMENTS, 1))
def test_ctrl_c_at_any_moment_of_the_demonstration_leaves_nothing(
    moment: str, digits: Path, tmp_path: Path, start: Start
) -> None:
    data = tmp_path / "data/digits" if moment == "data/digits" else digits
    run = start("-m", "jobs.digits.demo", "--data", str(data), "--storage", str(tmp_path))
    if "gcs" in moment or "ray::" in moment:
        run.await_pids(moment, 1)
    else:
        run.await_line(moment, 120)

    run.process.send_signal(signal.SIGINT)

    assert run.end() in (130, 1), run.output
    run.assert_nothing_left()
