from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import ConfigError, ElasticTrainer, JobConfig, RunFolderError
from tests.rayrun import CommandRun, job_config
from tests.tasks import NetTask


def test_a_task_is_given_once(dataset: str, tmp_path: Path) -> None:
    config = JobConfig(**job_config(tmp_path, dataset, None))
    with pytest.raises(ConfigError, match="is set, and a task was passed too"):
        ElasticTrainer(NetTask(), config)
    with pytest.raises(ConfigError, match="task is missing"):
        ElasticTrainer(None, config.model_copy(update={"task": None}))


@pytest.mark.parametrize("storage", ["taken", "file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_refused(storage: str, dataset: str, tmp_path: Path) -> None:
    (tmp_path / "taken" / "job").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    where = storage if storage.startswith("/") else str(tmp_path / storage)
    run = CommandRun(tmp_path, job_config(tmp_path, dataset, None, storage=where))
    try:
        assert run.end() == 1
        told = "exists already" if storage == "taken" else "cannot be written"
        assert told in run.output
        assert RunFolderError.__name__ in run.output
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
    with pytest.raises(RunFolderError, match="exists already"):
        ElasticTrainer(loop, config).fit()
