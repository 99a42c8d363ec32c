from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_trainer.config import DataConfig, JobConfig
from elastic_trainer.errors import ConfigError

GOOD: dict[str, Any] = {"name": "job", "data": {"train": "d"}, "steps": 5, "global_batch": 64}


def told(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        JobConfig(**{**GOOD, **fields})
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"nmae": 1}, "nmae is not a known field. Did you mean 'name'?"),
        ({"scaling": {"max_workrs": 3}}, "scaling.max_workrs is not a known field. Did you mean 'max_workers'?"),
        ({"name": "../x"}, "name = '../x' may hold letters"),
        ({"epochs": 3}, "steps = 5 and epochs = 3: give exactly one of them."),
        ({"steps": None}, "steps = None and epochs = None: give exactly one of them."),
        (
            {"scaling": {"min_workers": 4, "max_workers": 3}},
            "scaling.max_workers = 3 is below scaling.min_workers = 4. Raise max_workers or lower min_workers.",
        ),
        ({"scaling": {"resources_per_worker": {"GPU": 0.5}}}, "GPU: 0.5, and a worker holds one GPU whole"),
        ({"scaling": {"resources_per_worker": {"GPU": 2}}}, "GPU: 2, and a worker holds one GPU whole"),
        ({"micro_batch": 7}, "micro_batch = 7 does not divide global_batch = 64. Use one of 1, 2, 4, 8."),
        (
            {"micro_batch": 8, "logical_ranks": 5},
            "logical_ranks = 5 does not divide 8, which is global_batch = 64 / micro_batch = 8 (B == L * micro_batch * "
            "accumulate). Use one of 1, 2, 4, 8.",
        ),
        (
            {"logical_ranks": 4, "scaling": {"max_workers": 5}},
            "scaling.max_workers = 5 is above logical_ranks = 4",
        ),
        ({"micro_batch": 32, "scaling": {"max_workers": 5}}, "scaling.max_workers = 5 is above the 2 slices"),
        ({"global_batch": 0}, "global_batch = 0 should be greater than 0. B, samples of one optimizer step"),
        ({"steps": "many"}, "steps = 'many' should be a valid integer"),
        ({"data": {}}, "data.train is missing. Set it: Dataset folder"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0 should be greater than 0"),
        ({"evaluate_every": 5}, "evaluate_every = 5 needs an evaluation, and data.evaluation is not set."),
        ({"checkpoint": {"keep_best": "-loss"}}, "checkpoint.keep_best = '-loss' needs an evaluation"),
        (
            {"storage_options": {"endpoint_url": "http://x"}},
            "storage_options has endpoint_url, but storage = './runs' and data.train = 'd' is on the local disk",
        ),
        ({"data": {"train": "d", "storage_options": {"key": "x"}}}, "data.storage_options has key, but data.train"),
        (
            {"timeouts": {"save_s": 20.0}},
            "timeouts.save_s = 20 is shorter than timeouts.storage_s = 30: a save is made of calls to the storage",
        ),
        ({"scaling": {"resources_per_worker": {"CPU": 0}}}, "scaling.resources_per_worker.CPU = 0 should be greater"),
    ],
)
def test_a_wrong_field_is_told_with_value_and_remedy(fields: dict[str, Any], expected: str) -> None:
    assert expected in told(**fields)


def test_several_wrong_fields_are_all_told() -> None:
    message = told(steps="x", global_batch=-1)

    assert "steps = 'x'" in message
    assert "global_batch = -1" in message


def job_file(folder: Path, **fields: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **fields}))
    return path


def test_a_file_and_overrides_make_a_job(tmp_path: Path) -> None:
    job = JobConfig.from_yaml(job_file(tmp_path), ["scaling.max_workers=2", "data.drop_last=true", "name=other"])

    assert (job.scaling.max_workers, job.data.drop_last, job.name) == (2, True, "other")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("nonsense", "not of the form field=value"),
        ("name.part=3", "name is not a section"),
        ("scaling.max_workers=[", "not valid YAML"),
        ("scaling.max_worker=3", "Did you mean 'max_workers'?"),
    ],
)
def test_a_wrong_override_is_told(override: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        JobConfig.from_yaml(job_file(tmp_path), [override])


def test_files_that_are_no_jobs_are_told(tmp_path: Path) -> None:
    for content, expected in (("[1, 2]", "holds a list"), ("a: [", "not valid YAML")):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(ConfigError, match=expected):
            JobConfig.from_yaml(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="no such job file"):
        JobConfig.from_yaml(tmp_path / "none.yaml")


def test_sections_can_be_given_as_objects() -> None:
    assert JobConfig(**{**GOOD, "data": DataConfig(train="here")}).data.train == "here"


def test_every_field_is_described() -> None:
    def undescribed(schema: dict[str, Any]) -> list[str]:
        return [name for name, field in schema.get("properties", {}).items() if not field.get("description")]

    schema = JobConfig.model_json_schema()
    assert undescribed(schema) == []
    assert [name for part in schema["$defs"].values() for name in undescribed(part)] == []
