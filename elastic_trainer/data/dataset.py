"""A dataset folder: Arrow IPC data files of row groups, and an index that knows the place and digest of each.

    <folder>/index.json            rows, row group size, files, columns, digests
             data-00000.arrow      uncompressed, so that a row group is read by mapping memory, without a copy

The index is written last and by rename: a folder without one is not a dataset.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from elastic_trainer.data.order import Ids
from elastic_trainer.errors import DataError, did_you_mean

FORMAT = 1
INDEX = "index.json"
Columns = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class RowGroup:
    """Where a row group lies in its file, and the xxh3-64 of these bytes."""

    rows: int
    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class DataFile:
    """One data file and its row groups in order."""

    name: str
    size_bytes: int
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True)
class Column:
    """A column of equal elements: numpy dtype and shape of one row, or dtype `string` / `binary`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 for strings and bytes, whose length varies."""
        return 0 if self.dtype in VARIABLE else math.prod(self.shape) * np.dtype(self.dtype).itemsize


VARIABLE = ("string", "binary")


@dataclass(frozen=True)
class DatasetIndex:
    """What `index.json` says."""

    rows: int
    row_group: int
    seed: int
    columns: tuple[Column, ...]
    files: tuple[DataFile, ...]

    @cached_property
    def digest(self) -> str:
        """Names the content: equal for equal rows in equal order."""
        groups = [[group.rows, group.digest] for file in self.files for group in file.row_groups]
        content = {"columns": [asdict(column) for column in self.columns], "row_groups": groups}
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    @property
    def row_bytes(self) -> float:
        """Bytes of a row on average."""
        return sum(group.length for file in self.files for group in file.row_groups) / self.rows

    def to_json(self) -> str:
        """The text of `index.json`."""
        return json.dumps({"format": FORMAT, "digest": self.digest, **asdict(self)}, indent=1) + "\n"


def read_index(folder: str | os.PathLike[str]) -> DatasetIndex:
    """The index of a dataset folder; every data file is there and has the size that the index tells.

    Raises:
        DataError: No such folder, not a dataset, damaged, empty, or files missing or cut short.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path}: no such dataset folder. Make one: elastic-trainer prepare SOURCE --out {path}")
    try:
        text = (path / INDEX).read_text()
    except FileNotFoundError:
        raise DataError(
            f"{path}: has no {INDEX}, so it is not a dataset folder, or its preparation did not end. "
            f"Make it: elastic-trainer prepare SOURCE --out {path}"
        ) from None
    index = _parse_index(path, text)
    for file in index.files:
        _check_size(path / file.name, file.size_bytes)
    return index


def _parse_index(path: Path, text: str) -> DatasetIndex:
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise DataError(f"{path / INDEX}: format {found['format']} is not {FORMAT}. Prepare the dataset again.")
        index = DatasetIndex(
            rows=found["rows"],
            row_group=found["row_group"],
            seed=found["seed"],
            columns=tuple(Column(c["name"], c["dtype"], tuple(c["shape"])) for c in found["columns"]),
            files=tuple(
                DataFile(f["name"], f["size_bytes"], tuple(RowGroup(**group) for group in f["row_groups"]))
                for f in found["files"]
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / INDEX}: damaged ({type(error).__name__}: {error}). Prepare it again.") from None
    if found.get("digest") != index.digest:
        raise DataError(f"{path / INDEX}: damaged (its digest does not fit its content). Prepare the dataset again.")
    if index.rows == 0:
        raise DataError(f"{path}: the dataset is empty (0 rows). Prepare it from a source that has rows.")
    return index


def _check_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Prepare the dataset again.") from None
    if found != size_bytes:
        raise DataError(f"{path}: has {found} bytes, the index says {size_bytes}. Prepare the dataset again.")


class DatasetReader:
    """Reads rows of a dataset folder by id, from memory-mapped files, checking each row group at its first use."""

    def __init__(self, folder: str | os.PathLike[str], index: DatasetIndex | None = None) -> None:
        self.folder = Path(folder)
        self.index = index or read_index(folder)
        self._groups = [(file, group) for file in self.index.files for group in file.row_groups]
        self._schema = schema_of(self.index.columns)
        self._maps: dict[str, mmap.mmap] = {}
        self._verified: set[int] = set()

    def rows(self, ids: Ids) -> Columns:
        """The rows with these ids, in their order.

        Returns:
            For each column an array of shape (n, *column shape); strings and bytes as objects, shape (n,).

        Raises:
            DataError: A data file is damaged; the message names it and the row group.
        """
        group_of, row_of = np.divmod(ids, self.index.row_group)
        out: Columns = {}
        for column in self.index.columns:
            dtype = np.dtype(object) if column.dtype in VARIABLE else np.dtype(column.dtype)
            out[column.name] = np.empty((len(ids), *column.shape), dtype=dtype)
        for number in np.unique(group_of):
            chosen = np.flatnonzero(group_of == number)
            for name, values in self._group(int(number)).items():
                out[name][chosen] = values[row_of[chosen]]
        return out

    def _group(self, number: int) -> Columns:
        file, group = self._groups[number]
        raw = memoryview(self._map(file))[group.offset : group.offset + group.length]
        if number not in self._verified:
            found = xxhash.xxh3_64_hexdigest(raw)
            if found != group.digest:
                raise DataError(
                    f"{self.folder / file.name}: row group at byte {group.offset} is damaged (digest {found}, the "
                    f"index says {group.digest}). Prepare the dataset again, or restore the file from a copy."
                )
            self._verified.add(number)
        batch = pa.ipc.read_record_batch(pa.py_buffer(raw), self._schema)
        return {column.name: _to_numpy(batch.column(column.name), column) for column in self.index.columns}

    def _map(self, file: DataFile) -> mmap.mmap:
        if file.name not in self._maps:
            _check_size(self.folder / file.name, file.size_bytes)
            with open(self.folder / file.name, "rb") as opened:
                self._maps[file.name] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file.name]


def schema_of(columns: tuple[Column, ...]) -> pa.Schema:
    """The Arrow schema of a dataset's data files."""
    return pa.schema([pa.field(column.name, _arrow_type(column), nullable=False) for column in columns])


def _arrow_type(column: Column) -> pa.DataType:
    if column.dtype in VARIABLE:
        return pa.large_string() if column.dtype == "string" else pa.large_binary()
    # bool has no byte-wide Arrow type: it is kept as uint8, so that it too is read without a copy
    element = pa.from_numpy_dtype(np.dtype("uint8" if column.dtype == "bool" else column.dtype))
    return pa.list_(element, math.prod(column.shape)) if column.shape else element


def to_arrow(values: NDArray[np.generic], column: Column) -> pa.Array:
    """An Arrow array of the rows `values`: shape (n, *column shape)."""
    if column.dtype in VARIABLE:
        return pa.array(values.tolist(), type=_arrow_type(column))
    flat = np.ascontiguousarray(values).reshape(-1)
    elements = pa.array(flat.view(np.uint8) if column.dtype == "bool" else flat)
    return pa.FixedSizeListArray.from_arrays(elements, math.prod(column.shape)) if column.shape else elements


def _to_numpy(array: pa.Array, column: Column) -> NDArray[np.generic]:
    if column.dtype in VARIABLE:
        return np.array(array.to_pylist(), dtype=object)
    flat = array.flatten() if column.shape else array
    values = flat.to_numpy(zero_copy_only=True)
    typed = values.view(np.bool_) if column.dtype == "bool" else values
    return np.asarray(typed.reshape(-1, *column.shape))


class Named(dict[str, Any]):
    """A row or a batch by column name; a name that the data lacks gets an error that says what there is."""

    def __missing__(self, name: str) -> Any:
        raise DataError(
            f"the data has no column {name!r}; it has {', '.join(map(repr, self)) or 'none'}."
            f"{did_you_mean(str(name), self)} Use one of them, or prepare the data with that column."
        )
