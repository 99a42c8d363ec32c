"""The preparation as a job of Ray Data, into an object store, and of a data set of Ray's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from elastic_trainer.cluster.local import LocalCluster
from elastic_trainer.data.dataset import read_index
from elastic_trainer.data.preparation import sources
from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import DataError
from tests.data.preparation.test_formats import rows_of, write_parquet
from tests.s3server import S3Server


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus_per_node=2) as running:
        yield running


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "number": columns["number"] * 2}


def raising(columns: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("never")


def test_ray_data_makes_the_same_bytes_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    raw = write_parquet(tmp_path / "raw", files=5)
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    here = prepare(raw, tmp_path / "here", transform=doubled, splits={"test": 0.2})
    request.getfixturevalue("cluster")
    said: list[str] = []

    there = prepare(raw, tmp_path / "there", transform=doubled, splits={"test": 0.2}, say=said.append)

    assert there.digest == here.digest
    assert read_index(tmp_path / "there" / "test").digest == read_index(tmp_path / "here" / "test").digest
    assert said[0].startswith("reading 5 parts")


def test_an_error_in_a_task_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    with pytest.raises(DataError, match=r"^part-\d.parquet, row 0: transform\(\) raised ValueError: never"):
        prepare(write_parquet(tmp_path / "raw"), tmp_path / "set", transform=raising)


def test_a_ray_data_set_is_taken_in_its_order(tmp_path: Path, cluster: LocalCluster) -> None:
    digests = set()
    for blocks in (1, 7):
        dataset = ray.data.range(1000, override_num_blocks=blocks).map(lambda row: {"number": row["id"] + 1})
        digests.add(prepare(dataset, tmp_path / f"set-{blocks}").digest)

    assert len(digests) == 1
    assert sorted(rows_of(tmp_path / "set-7")["number"]) == list(range(1, 1001))


def test_into_an_object_store_and_back(tmp_path: Path, s3: S3Server) -> None:
    raw, url = write_parquet(tmp_path / "raw"), s3.url()
    local = prepare(raw, tmp_path / "set")

    stored = prepare(raw, url, out_options=s3.options())

    assert stored.digest == local.digest == read_index(url, s3.options()).digest
    reader = DatasetReader(url, options=s3.options())
    ids = np.array([7, 0, 1499, 7])
    for name, values in reader.rows(ids).items():
        assert (values == DatasetReader(tmp_path / "set").rows(ids)[name]).all(), name
    with pytest.raises(DataError, match="exists already"):
        prepare(raw, url, out_options=s3.options())
