"""Each format: what it becomes, what is told of its damaged rows, and that nothing depends on parts or processes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_trainer.data.dataset import read_index
from elastic_trainer.data.preparation import sources
from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.data.preparation.tokens import END, blocks_of, decode, encode
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import DataError


def rows_of(folder: Path) -> dict[str, Any]:
    reader = DatasetReader(folder)
    return reader.rows(np.arange(reader.index.rows))


def write_parquet(folder: Path, files: int = 3, rows: int = 500) -> Path:
    folder.mkdir()
    for number in range(files):
        first = number * rows
        table = pa.table(
            {
                "number": np.arange(first, first + rows),
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 2, dtype=np.float32)), 2),
                "text": [f"row {first + row}" for row in range(rows)],
                "flag": [row % 2 == 0 for row in range(rows)],
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet")
    return folder


def test_parquet_keeps_every_row_and_its_types(tmp_path: Path) -> None:
    index = prepare(write_parquet(tmp_path / "raw"), tmp_path / "set")

    found = rows_of(tmp_path / "set")
    assert sorted(found["number"]) == list(range(1500))
    assert [found["text"][i] for i in range(5)] == [f"row {found['number'][i]}" for i in range(5)]
    assert {c.name: (c.dtype, c.shape) for c in index.columns} == {
        "number": ("int64", ()),
        "vector": ("float32", (2,)),
        "text": ("string", ()),
        "flag": ("bool", ()),
    }
    assert (found["flag"] == (found["number"] % 2 == 0)).all()


def test_parts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_parquet(tmp_path / "raw")
    whole = prepare(raw, tmp_path / "whole")
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    monkeypatch.setattr("elastic_trainer.data.preparation.shuffle.RUN_BYTES", 1000)
    monkeypatch.setattr("elastic_trainer.data.preparation.job.BUCKET_BYTES", 1000)

    assert prepare(raw, tmp_path / "parts").digest == whole.digest


def test_rows_are_mixed_whatever_their_order_was(tmp_path: Path) -> None:
    """Sorted input: neighbours in the data set are as far apart as in a random order."""
    prepare(write_parquet(tmp_path / "raw", rows=2000), tmp_path / "set")

    number = rows_of(tmp_path / "set")["number"]
    assert abs(np.corrcoef(number[:-1], number[1:])[0, 1]) < 4 / np.sqrt(len(number))


def test_json_lines(tmp_path: Path) -> None:
    raw = tmp_path / "rows.jsonl.gz"
    with gzip.open(raw, "wt") as file:
        for number in range(100):
            file.write(json.dumps({"number": number if number % 3 else number + 0.5, "pair": [1, number]}) + "\n")

    index = prepare(raw, tmp_path / "set")

    assert {c.name: (c.dtype, c.shape) for c in index.columns} == {"number": ("float64", ()), "pair": ("int64", (2,))}


def test_csv_tells_numbers_from_words(tmp_path: Path) -> None:
    raw = tmp_path / "table.csv"
    raw.write_text('a,b,c\n1,x,2\n2,"y, z",3.5\n3,x,4\n')

    prepare(raw, tmp_path / "set")

    found = rows_of(tmp_path / "set")
    assert sorted(zip(found["a"], found["b"], found["c"], strict=True)) == [
        (1, "x", 2.0),
        (2, "y, z", 3.5),
        (3, "x", 4.0),
    ]


def test_text_becomes_blocks_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    texts = {"one.py": "def ä(): pass\n" * 20, "two.py": "x = 1\n", "not.md": "left out"}
    for name, text in texts.items():
        (tmp_path / "raw" / name).write_text(text)

    index = prepare(tmp_path / "raw", tmp_path / "set", file_format="text", include=["*.py"], block=32)

    assert index.about == {"format": "text", "vocabulary": 257, "block": 32}
    tokens = rows_of(tmp_path / "set")["tokens"]
    assert tokens.shape[1] == 32
    assert (tokens[tokens != END].size) == sum(len(texts[name].encode()) for name in ("one.py", "two.py"))
    assert decode(blocks_of(encode("ä ok".encode()), 4).reshape(-1)) == "ä ok"


def images(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(6):
            pixels = random.integers(0, 255, (12, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_an_image_folder_keeps_files_or_decodes_them(tmp_path: Path) -> None:
    raw = images(tmp_path / "raw")
    kept = prepare(raw, tmp_path / "kept")
    decoded = prepare(raw, tmp_path / "decoded", image_size=(12, 10))

    assert [c.dtype for c in kept.columns] == ["binary", "int64"]
    assert kept.about["labels"] == ["cat", "dog"]
    assert {(c.name, c.shape) for c in decoded.columns} == {("image", (12, 10, 3)), ("label", ())}
    assert sorted(rows_of(tmp_path / "kept")["label"]) == [0] * 6 + [1] * 6
    assert {bytes(each) for each in rows_of(tmp_path / "kept")["image"]} == {
        f.read_bytes() for f in raw.glob("*/*.png")
    }


def break_json(folder: Path) -> Path:
    raw = folder / "rows.jsonl"
    raw.write_text('{"a": 1}\n{"a": 2}\nno json\n{"a": "x"}\n{"b": 1}\n[1]\n')
    return raw


def break_csv(folder: Path) -> Path:
    raw = folder / "rows.csv"
    raw.write_text("a,b\n1,2\n2,3\n3\nx,4\n,5\n")
    return raw


def break_images(folder: Path) -> Path:
    raw = images(folder / "raw")
    (raw / "cat" / "broken.png").write_bytes(b"no image")
    return raw


BROKEN: list[tuple[Callable[[Path], Path], str, int]] = [
    (break_json, "rows.jsonl, row 2: is not JSON", 4),
    (break_csv, "rows.csv, row 2: has 1 fields, the first line names 2", 3),
    (break_images, "cat/broken.png, row 0: is not an image", 1),
]


@pytest.mark.parametrize(("source", "told", "count"), BROKEN)
def test_damaged_rows_fail_or_are_left_out_and_counted(
    source: Callable[[Path], Path], told: str, count: int, tmp_path: Path
) -> None:
    raw, said = source(tmp_path), list[str]()

    with pytest.raises(DataError, match=told):
        prepare(raw, tmp_path / "failed")
    skipped = prepare(raw, tmp_path / "skipped", on_error="skip", say=said.append)
    kept = prepare(raw, tmp_path / "kept", on_error="quarantine")

    assert skipped.digest == kept.digest
    assert skipped.about["left_out"] == count
    assert any(told in line for line in said)
    assert not (tmp_path / "failed" / "index.json").exists()
    assert not (tmp_path / "skipped" / "quarantine.jsonl").exists()
    lines = (tmp_path / "kept" / "quarantine.jsonl").read_text().splitlines()
    assert len(lines) == count
    assert {"file", "row", "problem", "content"} == set(json.loads(lines[0]))


def test_a_transform_may_change_rows_and_its_failures_are_found_to_the_row(tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "raw")

    def twice(columns: dict[str, Any]) -> dict[str, Any]:
        kept = columns["number"] % 2 == 0
        return {"double": np.repeat(columns["number"][kept] * 2, 2)}

    def picky(columns: dict[str, Any]) -> dict[str, Any]:
        if 77 in columns["number"]:
            raise ValueError("seventy-seven")
        return {"number": columns["number"]}

    prepare(raw, tmp_path / "double", transform=twice)
    assert sorted(rows_of(tmp_path / "double")["double"]) == sorted([n * 2 for n in range(0, 1500, 2)] * 2)
    with pytest.raises(DataError, match=r"part-0.parquet, row 77: transform\(\) raised ValueError: seventy-seven"):
        prepare(raw, tmp_path / "failed", transform=picky)
    prepare(raw, tmp_path / "skipped", transform=picky, on_error="skip")
    assert sorted(rows_of(tmp_path / "skipped")["number"]) == [n for n in range(1500) if n != 77]


def test_a_missing_value_that_a_transform_lets_through_is_damage(tmp_path: Path) -> None:
    raw = tmp_path / "rows.csv"
    raw.write_text("a,b\n1,2\n2,\n3,4\n")

    with pytest.raises(DataError, match=r"rows.csv, row 1: b is not a number after transform\(\)"):
        prepare(raw, tmp_path / "failed", transform=lambda columns: columns)
    index = prepare(raw, tmp_path / "set", transform=lambda columns: columns, on_error="skip")
    assert (index.rows, index.about["left_out"]) == (2, 1)


def test_an_empty_document_makes_no_block(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="has no rows"):
        prepare(tmp_path / "a.txt", tmp_path / "empty", block=4)

    (tmp_path / "b.txt").write_text("abcdefg")
    assert prepare(tmp_path / "*.txt", tmp_path / "set", block=4).rows == len(blocks_of(encode(b"abcdefg"), 4))


def test_few_documents_still_make_every_split() -> None:
    for seed in range(40):
        names = [f"{seed}-{number}.txt" for number in range(3)]
        chosen = sources.splits_of_files(names, {"validation": 0.1, "test": 0.1}, seed)
        assert sorted(chosen.values()) == ["test", "train", "validation"]
    many = [f"{number}.txt" for number in range(2000)]
    chosen = sources.splits_of_files(many, {"validation": 0.1}, 3)
    assert 150 < list(chosen.values()).count("validation") < 250
    fewer = sources.splits_of_files(many[::2], {"validation": 0.1}, 3)
    assert all(chosen[name] == fewer[name] for name in fewer), "a document changed its split because others left"

    with pytest.raises(DataError, match="1 files cannot be divided into train, validation"):
        sources.splits_of_files(["one.txt"], {"validation": 0.1}, 0)


def test_splits_share_the_rows_and_do_not_change_with_others(tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "raw")
    prepare(raw, tmp_path / "set", splits={"validation": 0.2, "test": 0.1})
    (raw / "part-2.parquet").unlink()
    prepare(raw, tmp_path / "fewer", splits={"validation": 0.2, "test": 0.1})

    found = {name: set(rows_of(tmp_path / "set" / name)["number"]) for name in ("train", "validation", "test")}
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(1500))
    assert 200 < len(found["validation"]) < 400
    fewer = set(rows_of(tmp_path / "fewer" / "validation")["number"])
    assert fewer == {n for n in found["validation"] if n < 1000}


def test_an_interrupted_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_parquet(tmp_path / "raw", files=4)
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    whole = prepare(raw, tmp_path / "whole")
    read: list[str] = []

    def until_the_third(columns: dict[str, Any]) -> dict[str, Any]:
        read.append(columns["text"][0])
        if len(read) == 3:
            raise KeyboardInterrupt
        return columns

    with pytest.raises(KeyboardInterrupt):
        prepare(raw, tmp_path / "set", transform=until_the_third)
    assert not (tmp_path / "set" / "index.json").exists()
    with pytest.raises(DataError, match="is not a dataset folder, or its preparation did not end"):
        read_index(tmp_path / "set")
    again = prepare(raw, tmp_path / "set", transform=until_the_third)

    assert len(read) == 5, "parts that were read are read again"
    assert again.digest == whole.digest
    assert not (tmp_path / "set" / ".preparing").exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"source": "nothing"}, "nothing: no such file"),
    ({"file_format": "xml"}, "format 'xml' is not known. Use one of npz, parquet"),
    ({"include": ["*.csv"]}, r"a folder without files that match \*.csv"),
    ({"on_error": "ignore"}, "on_error = 'ignore' is not known"),
    ({"splits": {"train": 0.5}}, "split train=0.5: give a name and a share"),
    ({"splits": {"a": 0.5, "b": 0.5}}, "the splits take 1 of the rows and leave none to train"),
    ({"file_format": "csv"}, "its first line must name the columns"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_what_cannot_be_prepared_is_told(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "raw")
    source = tmp_path / options.pop("source", "raw")
    if "csv" in options.values():
        (raw / "part-0.parquet").write_text("a,a\n")
    with pytest.raises(DataError, match=told):
        prepare(source, tmp_path / "set", **options)
    assert not (tmp_path / "set" / "index.json").exists()


def test_files_that_contradict_each_other_are_both_named(tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "raw", files=1)
    pq.write_table(
        pa.table({"number": ["one"], "vector": [[1.0, 2.0]], "text": ["x"], "flag": [True]}), raw / "z.parquet"
    )
    with pytest.raises(DataError, match=r"column 'number' is string\[\] in z.parquet and int64\[\] in part-0.parquet"):
        prepare(raw, tmp_path / "set")
    pq.write_table(pa.table({"number": [1]}), raw / "z.parquet")
    with pytest.raises(DataError, match="one alone has flag, text, vector"):
        prepare(raw, tmp_path / "set")
    pq.write_table(pa.table({"list": [[1], [1, 2]]}), raw / "part-0.parquet")
    with pytest.raises(DataError, match="lists of different shapes"):
        prepare(raw, tmp_path / "set")


def test_formats_that_cannot_be_told_are_named(tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "raw")
    (raw / "notes.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="1 of csv, 3 of parquet"):
        prepare(raw, tmp_path / "set")
