from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.errors import DataError


def saved(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "source.npz", **arrays)
    return folder / "source.npz"


def test_the_same_source_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    source = saved(tmp_path, x=np.arange(1000))
    digests = [prepare(source, tmp_path / name, seed=seed).digest for name, seed in (("a", 1), ("b", 1), ("c", 2))]

    assert digests[0] == digests[1] != digests[2]
    assert (tmp_path / "a" / "data-00000.arrow").read_bytes() == (tmp_path / "b" / "data-00000.arrow").read_bytes()


def test_small_data_has_many_row_groups(tmp_path: Path) -> None:
    index = prepare(saved(tmp_path, x=np.arange(1000)), tmp_path / "set")

    assert index.row_group == 1000 // 256
    assert sum(group.rows for group in index.files[0].row_groups) == 1000


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({}, "holds no array"),
        ({"x": np.zeros((0, 3))}, "has no rows"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "different numbers of rows"),
        ({"x": np.float32(1)}, "is a single value"),
        ({"x": np.zeros(3, dtype=complex)}, "has dtype complex128"),
        ({"x": np.array([["a"], ["b"]])}, "text needs one dimension"),
        ({"x": np.array([{}, {}], dtype=object)}, "cannot be read as a numpy archive"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused(arrays: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        prepare(saved(tmp_path, **arrays), tmp_path / "set")
    assert not (tmp_path / "set" / "index.json").exists()


def test_a_missing_or_foreign_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        prepare(tmp_path / "nothing.npz", tmp_path / "set")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as a numpy archive"):
        prepare(tmp_path / "text.npz", tmp_path / "set")


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    source = saved(tmp_path, x=np.arange(10))
    prepare(source, tmp_path / "set")

    with pytest.raises(DataError, match="exists already"):
        prepare(source, tmp_path / "set")
