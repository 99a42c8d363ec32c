from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.config import JobConfig
from elastic_trainer.data.dataset import Column, DataFile, DatasetIndex, RowGroup
from elastic_trainer.errors import ConfigError
from elastic_trainer.resolve import ResolvedJob, order_of, resolve

INDEX = DatasetIndex(
    rows=1000,
    row_group=3,
    seed=0,
    columns=(Column("x", "float32", (4,)),),
    files=(DataFile("data-00000.arrow", 1, (RowGroup(1000, 0, 16_000, "0"),)),),
)


def resolved(fits: int = 3, **fields: Any) -> ResolvedJob:
    values: dict[str, Any] = {"name": "job", "data": {"train": "d"}, "epochs": 2, "global_batch": 96}
    return resolve(JobConfig(**{**values, **fields}), INDEX, None, fits=fits, fixed_shapes=False)


def test_what_is_left_open_is_worked_out() -> None:
    job = resolved()

    assert (job.limits.min_workers, job.limits.max_workers) == (1, 3)
    assert (job.config.micro_batch, job.config.logical_ranks) == (8, 12)
    assert job.settings.steps == 2 * 11
    assert job.settings.plan.order.window == 1


def test_what_is_given_is_kept() -> None:
    job = resolved(micro_batch=4, logical_ranks=6, scaling={"max_workers": 5}, steps=7, epochs=None)

    assert (job.config.micro_batch, job.config.logical_ranks, job.limits.max_workers, job.settings.steps) == (
        4,
        6,
        5,
        7,
    )


def test_no_more_workers_than_slices_when_the_cluster_is_large() -> None:
    assert resolved(fits=500, logical_ranks=6).limits.max_workers == 6


def test_no_full_step_under_drop_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.drop_last = true leaves no step: d has 1000 rows, fewer than"):
        resolved(global_batch=1024, data={"train": "d", "drop_last": True})


def test_a_batch_larger_than_the_data_is_one_short_step() -> None:
    assert resolved(global_batch=1024).settings.plan.order.steps_per_epoch == 1


def test_the_order_can_be_told_from_what_is_stored() -> None:
    job = resolved()

    assert order_of(job.to_dict()) == job.settings.plan.order


def test_waiting_for_resources_is_bounded_as_configured_only_when_they_are_not_there() -> None:
    scaling = {"min_workers": 4, "max_workers": 4, "wait_s": 3.0}

    assert resolved(fits=3, scaling=scaling).limits.place_s == 3.0
    assert resolved(fits=4, scaling=scaling).limits.place_s == 30.0
