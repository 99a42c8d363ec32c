from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import ConfigError, ElasticTrainer, JobConfig, StorageError
from tests.conftest import make_dataset
from tests.rayrun import CommandRun, job_config
from tests.rotation import turn
from tests.tasks import NetTask


def test_a_task_is_given_once(dataset: str, tmp_path: Path) -> None:
    config = JobConfig(**job_config(tmp_path, dataset, None))
    with pytest.raises(ConfigError, match="is set, and a task was passed too"):
        ElasticTrainer(NetTask(), config)
    with pytest.raises(ConfigError, match="task is missing"):
        ElasticTrainer(None, config.model_copy(update={"task": None}))


@pytest.mark.parametrize("storage", ["file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_refused(storage: str, dataset: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where = storage if storage.startswith("/") else str(tmp_path / storage)
    run = CommandRun(tmp_path, job_config(tmp_path, dataset, None, storage=where))
    try:
        assert run.end() == 1
        assert "cannot be written" in run.output
        assert StorageError.__name__ in run.output
        run.assert_nothing_left()
    finally:
        run.clean_up()


def loop(run: Any) -> None:
    import torch

    model = torch.nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    for step in run.steps():
        with step:
            for batch in step:
                error = (model(batch["x"]).squeeze(1) - batch["y"]) ** 2
                step.backward(error.sum(), batch.rows)
            step.apply(optimizer)


def test_a_function_of_the_loop_api_trains_on_a_cluster_of_its_own(dataset: str, tmp_path: Path) -> None:
    config = JobConfig(**{**job_config(tmp_path, dataset, None), "task": None, "task_args": {}, "steps": 30})

    result = ElasticTrainer(loop, config).fit()

    assert result.status == "finished"
    assert result.summary["samples_trained"] == 21 * 24 + 4 + 8 * 24
    assert Path(result.path).exists()


def test_a_finished_run_says_so_and_trains_on_when_steps_are_raised(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**job_config(tmp_path, dataset, None), "task": None, "task_args": {}, "steps": 30}
    first = ElasticTrainer(loop, JobConfig(**values)).fit()

    again = ElasticTrainer(loop, JobConfig(**values)).fit()

    assert "run job has finished already, with 30 steps" in capsys.readouterr().out
    assert again.summary == first.summary

    more = ElasticTrainer(loop, JobConfig(**{**values, "steps": 40})).fit()
    assert more.status == "finished"
    assert (more.summary["steps"], more.summary["terms"]) == (40, 2)
    assert more.summary["generations"][1]["resume_step"] == 30
    assert more.summary["samples_trained"] == 21 * 24 + 4 + 18 * 24
    assert (more.summary["samples_missing"], more.summary["samples_repeated"]) == (0, 0)


@turn(1, 2)
def test_a_new_run_begins_with_the_state_of_another(dataset: str, tmp_path: Path) -> None:
    values = {**job_config(tmp_path, dataset, None), "task": None, "task_args": {}, "steps": 30}
    first = ElasticTrainer(loop, JobConfig(**values)).fit()

    with pytest.raises(ConfigError, match=r"has saved 30. Name one of these steps"):
        ElasticTrainer(loop, JobConfig(**{**values, "name": "child", "start_from": "job@7"})).fit()
    child = ElasticTrainer(loop, JobConfig(**{**values, "name": "child", "start_from": "job", "steps": 1})).fit()

    assert child.summary["steps"] == 1
    fresh = ElasticTrainer(loop, JobConfig(**{**values, "name": "fresh", "steps": 1})).fit()
    # the same samples as a fresh run's first step, seen by a model that has learned from 30 steps
    assert child.summary["final_loss"] < fresh.summary["final_loss"]
    assert first.summary["steps"] == 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, "seed = 5 differs from the 0 with which run 'job' was started"),
        ({"global_batch": 48}, "global_batch = 48 differs from the 24"),
        ({"clip_norm": 1.0}, "clip_norm = 1.0 differs from the None"),
        ({"task_args": {"delay_s": 0.5}}, r"task_args.delay_s = 0.5 differs from the 0.002.*--allow-change"),
    ],
)
def test_a_changed_fixed_field_is_refused_with_both_values(
    change: Any, words: str, dataset: str, stopped: Path
) -> None:
    config = {**job_config(stopped, dataset, None, steps=20), **change}

    with pytest.raises(ConfigError, match=words):
        ElasticTrainer(None, JobConfig(**config)).fit()


def test_a_dataset_of_other_rows_is_refused(stopped: Path) -> None:
    other = make_dataset(stopped / "other", 508, seed=9)

    with pytest.raises(ConfigError, match="holds other rows than the run was started with"):
        ElasticTrainer(None, JobConfig(**job_config(stopped, other, None, steps=20))).fit()


def test_a_log_with_a_gap_is_refused(stopped: Path, dataset: str) -> None:
    entry = stopped / "runs/job/log/000000000000.json"
    content = entry.read_bytes()
    entry.unlink()
    try:
        with pytest.raises(StorageError, match=r"entry 000000000000.json is missing"):
            ElasticTrainer(None, JobConfig(**job_config(stopped, dataset, None, steps=20))).fit()
    finally:
        entry.write_bytes(content)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, dataset: str) -> Path:
    """The folder of a run that has done 10 steps."""
    folder = tmp_path_factory.mktemp("resume")
    assert ElasticTrainer(None, JobConfig(**job_config(folder, dataset, None, steps=10))).fit().status == "finished"
    return folder


def test_a_relative_storage_is_refused_inside_a_ray_job(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs a job in a copy of the working directory, and takes that away."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = JobConfig(**{**job_config(tmp_path, dataset, None), "storage": "./runs"})
    with pytest.raises(ConfigError, match=r"storage = './runs' is relative"):
        ElasticTrainer(None, config).fit()
