from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.config import JobConfig
from elastic_trainer.errors import ConfigError
from elastic_trainer.resume import merge

BASE: dict[str, Any] = {
    "name": "job",
    "task": "tasks:Net",
    "task_args": {"lr": 0.1, "width": 8},
    "data": {"train": "data/x"},
    "steps": 100,
    "global_batch": 24,
}


def stored(**fields: Any) -> dict[str, Any]:
    filled = JobConfig(**{**BASE, **fields}).model_copy(update={"micro_batch": 2, "logical_ranks": 12})
    return {**filled.model_dump(mode="json"), "resolved": {"steps": 100}}


def test_what_is_not_set_keeps_the_stored_value() -> None:
    config, changed = merge(stored(clip_norm=1.0, scaling={"max_workers": 4}), JobConfig(**BASE))

    assert (config.micro_batch, config.logical_ranks, config.clip_norm) == (2, 12, 1.0)
    assert config.scaling.max_workers == 4
    assert changed == {}


def test_free_fields_change_and_are_told() -> None:
    given = JobConfig(**{**BASE, "steps": 200, "scaling": {"max_workers": 2}, "checkpoint": {"every_steps": 10}})

    config, changed = merge(stored(), given)

    assert (config.steps, config.scaling.max_workers, config.checkpoint.every_steps) == (200, 2, 10)
    assert changed == {
        "steps": [100, 200],
        "scaling.max_workers": [None, 2],
        "checkpoint.every_steps": [None, 10],
    }


def test_epochs_may_replace_steps() -> None:
    config, changed = merge(stored(), JobConfig(**{**BASE, "steps": None, "epochs": 3}))

    assert (config.steps, config.epochs) == (None, 3)
    assert set(changed) == {"steps", "epochs"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 48}, "global_batch = 48 differs from the 24"),
        ({"micro_batch": 4}, "micro_batch = 4 differs from the 2"),
        ({"logical_ranks": 6}, "logical_ranks = 6 differs from the 12"),
        ({"seed": 3}, "seed = 3 differs from the 0"),
        ({"clip_norm": 2.0}, "clip_norm = 2.0 differs from the None"),
        ({"data": {"train": "x", "drop_last": True}}, r"data.drop_last = True differs from the False"),
        ({"task": "tasks:Other"}, "task = 'tasks:Other' differs from the 'tasks:Net'.*--allow-change task"),
        ({"task_args": {"lr": 0.2}}, r"task_args.lr = 0.2 differs from the 0.1.*--allow-change task_args.lr"),
        ({"start_from": "other@7"}, "start_from = 'other@7' differs from the None"),
    ],
)
def test_fixed_fields_are_refused_with_both_values(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        merge(stored(), JobConfig(**{**BASE, **change}))


def test_a_task_argument_may_be_allowed_to_change() -> None:
    given = JobConfig(**{**BASE, "task_args": {"lr": 0.2, "width": 8}})

    for allowed in ("task_args.lr", "task_args"):
        config, changed = merge(stored(), given, [allowed])
        assert config.task_args == {"lr": 0.2, "width": 8}
        assert changed == {"task_args.lr": [0.1, 0.2]}
    with pytest.raises(ConfigError, match=r"task_args.lr = 0.2"):
        merge(stored(), given, ["task_args.width"])
    with pytest.raises(ConfigError, match="--allow-change seed: only the task"):
        merge(stored(), given, ["seed"])


def test_credentials_come_with_each_submission_and_are_never_stored() -> None:
    given = JobConfig(**{**BASE, "storage": "s3://b/x", "storage_options": {"secret": "hidden"}})

    assert "hidden" not in str(given.model_dump(mode="json"))
    assert "hidden" not in repr(given)
    config, _ = merge(stored(), given)
    assert config.storage_options == {"secret": "hidden"}
