"""The commands that look after runs, on a run that was stopped, resumed and finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer import ElasticTrainer, JobConfig, cli
from tests.rayrun import job_config


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, dataset: str, held_out: str) -> str:
    folder = tmp_path_factory.mktemp("commands")
    for steps in (30, 50):
        config = job_config(
            folder, dataset, held_out, steps=steps, checkpoint={"every_steps": 10}, task="tests.tasks:NetTask"
        )
        ElasticTrainer(None, JobConfig(**config)).fit()
    return str(folder / "runs")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


def test_runs_are_listed_and_shown(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "runs", "ls", "--storage", storage)
    assert status == 0
    assert out.splitlines()[1].split()[:6] == ["job", "finished", "50", "of", "50", "2"]

    status, out = run(capsys, "runs", "show", "job", "--storage", storage)
    assert status == 0
    assert "status: finished" in out
    assert "global_batch: 24" in out

    assert "finished: every worker has done" in run(capsys, "status", "job", "--storage", storage)[1]


def test_checkpoints_are_listed_shown_and_verified(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "checkpoints", "ls", "job", "--storage", storage)
    assert [line.split()[1] for line in out.splitlines()][-1] == "50"
    assert "error" in out.splitlines()[-1]  # what evaluate() said at that step

    _, out = run(capsys, "checkpoints", "show", "job", "--storage", storage)
    assert "steps: 50" in out
    assert "model.state.first.weight  float64[8, 6]" in out
    status, out = run(capsys, "checkpoints", "show", "job", "--step", "7", "--storage", storage)
    assert (status, "step 7 of run 'job' is not saved; saved is" in out) == (2, True)

    status, out = run(capsys, "checkpoints", "verify", "job", "--storage", storage)
    assert (status, "step 50: whole" in out) == (0, True)
    piece = next(Path(storage).glob("job/steps/000000000050.*/r0.bin"))
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        status, out = run(capsys, "checkpoints", "verify", "job", "--step", "50", "--storage", storage)
        assert (status, "r0.bin: bytes 0 to" in out) == (1, True)
    finally:
        piece.write_bytes(whole)


def test_the_story_and_what_workers_printed(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "logs", "job", "--storage", storage)
    assert status == 0
    assert "form generation: first start" in out
    assert "form generation: resumes after step 30" in out

    status, out = run(capsys, "logs", "job", "--worker", "w0", "--storage", storage)
    assert (status, "stdout of process" in out) == (0, True)
    status, out = run(capsys, "logs", "job", "--worker", "w9", "--storage", storage)
    assert (status, "there are logs of w0.0, w1.0" in out) == (1, True)


def test_the_ledger_of_both_terms_is_one(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "data", "audit", "job", "--storage", storage)
    assert (status, out) == (
        0,
        f"50 steps: samples: {21 * 24 * 2 + 2 * 4 + 6 * 24} trained, 0 missing, 0 repeated; 0 steps redone\n",
    )
    segment = min(Path(storage).glob("job/ledger/*"))
    whole = segment.read_text()
    segment.write_text(whole.replace('"samples": 24', '"samples": 23', 1))
    try:
        status, out = run(capsys, "data", "audit", "job", "--storage", storage)
        assert (status, "is not what the run's log names" in out) == (1, True)
    finally:
        segment.write_text(whole)


@pytest.mark.parametrize(
    "command", ["runs show", "status", "checkpoints ls", "checkpoints verify", "logs", "data audit"]
)
def test_a_run_that_is_not_there_is_told(command: str, storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, *command.split(), "nothing", "--storage", storage)

    assert (status, "no such run" in out) == (2, True)


def test_wrong_options_are_told(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "runs", "ls", "--storage", storage, "--storage-option", "key")
    assert (status, "not of the form key=value" in out) == (2, True)
    status, out = run(capsys, "logs", "job", "--worker", "x", "--storage", storage)
    assert (status, "not of the form w0.1" in out) == (2, True)
