"""A dataset folder: Arrow IPC data files of row groups, and an index that knows the place and digest of each.

    <folder>/index.json            rows, row group size, files, columns, digests
             data-00000.arrow      uncompressed, so that a row group is read by mapping memory, without a copy

The index is written last and at once: a folder without one is not a dataset. A folder may lie in an object store, whose
row groups are read by range, several at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from elastic_trainer.errors import DataError, StorageError, did_you_mean
from elastic_trainer.storage.object_store import ObjectStore

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


def columns_of(found: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Columns from their JSON."""
    return tuple(Column(each["name"], each["dtype"], tuple(each["shape"])) for each in found)


@dataclass(frozen=True)
class DatasetIndex:
    """What `index.json` says; `about` holds what a task may want to know of the rows, such as the names of labels."""

    rows: int
    row_group: int
    seed: int
    columns: tuple[Column, ...]
    files: tuple[DataFile, ...]
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)

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


def read_index(folder: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> DatasetIndex:
    """The index of a dataset folder; every data file is there and has the size that the index tells.

    Args:
        folder: A local path or a URL.
        options: For the client of its store.

    Raises:
        DataError: No such folder, not a dataset, damaged, empty, or files missing or cut short.
    """
    url = os.fspath(folder)
    if "://" not in url and Path(url).is_file():
        raise DataError(
            f"{url} is a file, and a dataset is a folder. Make one of it: elastic-trainer prepare {url} --out "
            f"{Path(url).with_suffix('')}"
        )
    if "://" not in url and not Path(url).is_dir():
        raise DataError(f"{url}: no such dataset folder. Make one: elastic-trainer prepare SOURCE --out {url}")
    try:
        store = ObjectStore(url, options)
        text = store.read(INDEX).decode()
        sizes = store.sizes("")
    except FileNotFoundError:
        splits = [name for name in store.folders("") if f"{name}/{INDEX}" in store.sizes(name)]
        if splits:
            raise DataError(f"{url}: holds splits. Name one: {', '.join(f'{url}/{name}' for name in splits)}") from None
        raise DataError(
            f"{url}: has no {INDEX}, so it is not a dataset folder, or its preparation did not end. "
            f"Make it: elastic-trainer prepare SOURCE --out {url}"
        ) from None
    except (StorageError, UnicodeDecodeError) as error:
        raise DataError(f"{url}: the dataset cannot be read: {error}") from None
    index = _parse_index(url, text)
    for file in index.files:
        check_size(f"{url}/{file.name}", sizes.get(file.name), file.size_bytes)
    return index


def _parse_index(url: str, text: str) -> DatasetIndex:
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise DataError(f"{url}/{INDEX}: format {found['format']} is not {FORMAT}. Prepare the dataset again.")
        index = DatasetIndex(
            rows=found["rows"],
            row_group=found["row_group"],
            seed=found["seed"],
            columns=columns_of(found["columns"]),
            files=tuple(
                DataFile(f["name"], f["size_bytes"], tuple(RowGroup(**group) for group in f["row_groups"]))
                for f in found["files"]
            ),
            about=dict(found.get("about", {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url}/{INDEX}: damaged ({type(error).__name__}: {error}). Prepare it again.") from None
    if found.get("digest") != index.digest:
        raise DataError(f"{url}/{INDEX}: damaged (its digest does not fit its content). Prepare the dataset again.")
    if index.rows == 0:
        raise DataError(f"{url}: the dataset is empty (0 rows). Prepare it from a source that has rows.")
    return index


def check_size(name: str, found: int | None, size_bytes: int) -> None:
    """Hold a data file against the size that the index tells.

    Raises:
        DataError: It is not there, or has another size.
    """
    if found is None:
        raise DataError(f"{name}: is not there. Prepare the dataset again.")
    if found != size_bytes:
        raise DataError(f"{name}: has {found} bytes, the index says {size_bytes}. Prepare the dataset again.")


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


def to_numpy_column(array: pa.Array, column: Column) -> NDArray[np.generic]:
    """The opposite of `to_arrow`; numbers share the memory of `array`."""
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
