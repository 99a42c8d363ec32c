"""Rows by id: whatever ids in whatever order, each column has the row's own values."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.data.reader import DatasetReader

ROWS = 4000  # in row groups of 15


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> DatasetReader:
    folder = tmp_path_factory.mktemp("reader")
    number = np.arange(ROWS)
    np.savez(
        folder / "raw.npz",
        number=number,
        square=np.stack([number, number**2], axis=1).astype("f4"),
        text=np.array([f"row {i}" for i in range(ROWS)]),
        is_even=number % 2 == 0,
    )
    prepare(folder / "raw.npz", folder / "set", seed=1)
    return DatasetReader(folder / "set")


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_give_their_rows(seed: int, reader: DatasetReader) -> None:
    draw = np.random.default_rng(seed)
    everything = reader.rows(np.arange(ROWS))
    low = int(draw.integers(0, ROWS - 60))
    for ids in (
        draw.permutation(np.arange(low, low + 60)),
        draw.integers(0, ROWS, 40),  # some of them twice
        np.arange(low, low + 60, 7),
        np.array([low]),
        np.array([], dtype=np.int64),
    ):
        found, gathered = reader.rows(ids), reader.gather(ids)
        assert len(gathered) == len(ids)
        for name, values in everything.items():
            assert found[name].dtype == values.dtype
            assert (found[name] == values[ids]).all(), name
            assert (gathered.take(np.arange(len(ids))[::3])[name] == values[ids[::3]]).all(), name
        for name, values in found.items():
            values[:] = values[:1]  # arrays of their own: what a task writes into them stays with it
            assert (reader.rows(ids)[name] == everything[name][ids]).all(), name
