from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from elastic_trainer.data.dataset import Named, read_index
from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = 300
    np.savez(
        tmp_path / "source.npz",
        image=np.random.default_rng(0).normal(size=(rows, 4, 3)).astype("f4"),
        number=np.arange(rows),
        is_even=np.arange(rows) % 2 == 0,
        text=np.array([f"row {i} ä" for i in range(rows)]),
    )
    prepare(tmp_path / "source.npz", tmp_path / "set", seed=3)
    return tmp_path / "set"


def test_rows_come_back_as_they_were(folder: Path) -> None:
    source = np.load(folder.parent / "source.npz")
    rows = DatasetReader(folder).rows(np.array([7, 0, 299, 7]))

    for place, number in enumerate(rows["number"]):
        assert (rows["image"][place] == source["image"][number]).all()
        assert rows["text"][place] == f"row {number} ä"
        assert rows["is_even"][place] == (number % 2 == 0)
    assert rows["image"].dtype == np.float32
    assert rows["is_even"].dtype == np.bool_


def test_all_rows_are_there_once(folder: Path) -> None:
    rows = DatasetReader(folder).rows(np.arange(300))

    assert sorted(rows["number"].tolist()) == list(range(300))
    assert rows["number"].tolist() != list(range(300)), "not shuffled"


def test_each_flipped_bit_is_found(folder: Path) -> None:
    index = read_index(folder)
    file = folder / index.files[0].name
    whole = file.read_bytes()
    places = [g.offset + int(f * (g.length - 1)) for g in index.files[0].row_groups[::60] for f in (0.0, 0.3, 1.0)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        file.write_bytes(bytes(damaged))
        with pytest.raises(DataError, match="is damaged"):
            DatasetReader(folder).rows(np.arange(300))


def break_nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def break_index(folder: Path) -> None:
    (folder / "index.json").unlink()


def break_json(folder: Path) -> None:
    (folder / "index.json").write_text('{"format": 1, ')


def break_digest(folder: Path) -> None:
    found = json.loads((folder / "index.json").read_text())
    found["files"][0]["row_groups"][0]["digest"] = "0" * 16
    (folder / "index.json").write_text(json.dumps(found))


def break_format(folder: Path) -> None:
    found = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**found, "format": 99}))


def break_file(folder: Path) -> None:
    (folder / "data-00000.arrow").unlink()


def break_length(folder: Path) -> None:
    file = folder / "data-00000.arrow"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (break_nothing, "no such dataset folder"),
        (break_index, "has no index.json"),
        (break_json, "damaged"),
        (break_digest, "its digest does not fit"),
        (break_format, "format 99 is not 1"),
        (break_file, "is not there"),
        (break_length, "the index says"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_by_name(damage: object, told: str, folder: Path) -> None:
    damage(folder)  # type: ignore[operator]

    with pytest.raises(DataError, match=told) as caught:
        read_index(folder)
    assert str(folder) in str(caught.value)


def test_an_unknown_column_is_told_with_what_there_is() -> None:
    with pytest.raises(DataError, match=r"no column 'imge'; it has 'image', 'digit'. Did you mean 'image'\?"):
        Named(image=1, digit=2)["imge"]


def test_a_file_and_a_folder_of_splits_are_told_from_a_dataset(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", number=np.arange(40))
    with pytest.raises(DataError, match=r"raw.npz is a file, .*elastic-trainer prepare .*raw.npz --out .*raw$"):
        read_index(tmp_path / "raw.npz")

    prepare(tmp_path / "raw.npz", tmp_path / "set", splits={"test": 0.3})
    with pytest.raises(DataError, match=r"holds splits. Name one: .*set/test, .*set/train"):
        read_index(tmp_path / "set")
