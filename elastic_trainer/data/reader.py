"""Reads rows of a dataset folder by id, from local files mapped into memory or by range from an object store."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from elastic_trainer.data.dataset import (
    VARIABLE,
    Columns,
    DataFile,
    DatasetIndex,
    RowGroup,
    check_size,
    read_index,
    schema_of,
    to_numpy_column,
)
from elastic_trainer.data.order import Ids
from elastic_trainer.errors import DataError
from elastic_trainer.storage.object_store import ObjectStore

READS_AT_ONCE = 8  # row groups fetched from a store together: a range read waits for the network most of its time
CACHE_BYTES = 128 << 20  # of fetched row groups; neighbouring spans share those at their borders


@dataclass
class Gathered:
    """Rows of some ids: row i of them lies at `places[i]` of each column, int64 of shape (n,)."""

    columns: Columns
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.places)

    def take(self, chosen: NDArray[np.int64] | slice) -> Columns:
        """The rows of these ids, by their number among them; arrays of their own."""
        places = self.places[chosen]
        return {name: values.take(places, axis=0) for name, values in self.columns.items()}


class _MappedFiles:
    """Local data files, mapped into memory."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._maps: dict[str, mmap.mmap] = {}

    def fetch(self, wanted: Iterable[tuple[DataFile, RowGroup]]) -> None:
        """Nothing to do: the system reads a page when it is looked at."""

    def bytes_of(self, file: DataFile, group: RowGroup) -> memoryview:
        if file.name not in self._maps:
            path = self._folder / file.name
            try:
                with open(path, "rb") as opened:
                    check_size(str(path), os.fstat(opened.fileno()).st_size, file.size_bytes)
                    self._maps[file.name] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}). Prepare the dataset again.") from None
        return memoryview(self._maps[file.name])[group.offset : group.offset + group.length]


class _FetchedFiles:
    """Row groups of an object store, read by range; those used last are kept."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="fetch")
        self._kept: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def fetch(self, wanted: Iterable[tuple[DataFile, RowGroup]]) -> None:
        with self._lock:
            missing = [(file, group) for file, group in wanted if (file.name, group.offset) not in self._kept]
        for each in [self._pool.submit(self.bytes_of, *group) for group in missing]:
            each.result()

    def bytes_of(self, file: DataFile, group: RowGroup) -> memoryview:
        name = (file.name, group.offset)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return memoryview(self._kept[name])
        content = bytearray(group.length)
        try:
            self._store.read_into(file.name, group.offset, memoryview(content))
        except FileNotFoundError:
            raise DataError(f"{self._store.url}/{file.name}: is not there. Prepare the dataset again.") from None
        with self._lock:
            if name not in self._kept:
                self._kept[name] = content
                self._size += len(content)
            while self._size > CACHE_BYTES and len(self._kept) > READS_AT_ONCE:
                self._size -= len(self._kept.popitem(last=False)[1])
        return memoryview(content)


class DatasetReader:
    """Reads rows of a dataset folder by id, checking each row group when it is read first.

    Args:
        folder: A local path or a URL.
        index: When it is known already.
        options: For the client of its store.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        index: DatasetIndex | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = os.fspath(folder)
        self.index = index or read_index(folder, options)
        self.is_remote = "://" in self.url
        self._groups = [(file, group) for file in self.index.files for group in file.row_groups]
        self._schema = schema_of(self.index.columns)
        self._files = _FetchedFiles(ObjectStore(self.url, options)) if self.is_remote else _MappedFiles(self.url)
        self._verified: set[int] = set()

    def rows(self, ids: Ids) -> Columns:
        """The rows with these ids, in their order.

        Returns:
            For each column an array of shape (n, *column shape); strings and bytes as objects, shape (n,).

        Raises:
            DataError: A data file is damaged; the message names it and the row group.
            StorageError: The store cannot be reached.
        """
        return self.gather(ids).take(slice(None))

    def gather(self, ids: Ids) -> Gathered:
        """The same rows, in the order in which they lie in the files, which is the quickest way to read them.

        Raises:
            DataError, StorageError: As for `rows`.
        """
        order = np.argsort(ids, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(ids))
        group_of, row_of = np.divmod(ids[order], self.index.row_group)
        columns: Columns = {}
        for column in self.index.columns:
            dtype = np.dtype(object) if column.dtype in VARIABLE else np.dtype(column.dtype)
            columns[column.name] = np.empty((len(ids), *column.shape), dtype=dtype)
        numbers, counts = np.unique(group_of, return_counts=True)
        ends = np.cumsum(counts)
        self._files.fetch(self._groups[number] for number in numbers)
        for number, low, high in zip(numbers.tolist(), ends - counts, ends, strict=True):
            batch = _chosen(self._batch(number), row_of[low:high])
            for column in self.index.columns:
                columns[column.name][low:high] = to_numpy_column(batch.column(column.name), column)
        return Gathered(columns, places)

    def _batch(self, number: int) -> pa.RecordBatch:
        file, group = self._groups[number]
        raw = self._files.bytes_of(file, group)
        if self.is_remote or number not in self._verified:
            found = xxhash.xxh3_64_hexdigest(raw)
            if found != group.digest:
                raise DataError(
                    f"{self.url}/{file.name}: row group at byte {group.offset} is damaged (digest {found}, the "
                    f"index says {group.digest}). Prepare the dataset again, or restore the file from a copy."
                )
            self._verified.add(number)
        return pa.ipc.read_record_batch(pa.py_buffer(raw), self._schema)


def _chosen(batch: pa.RecordBatch, rows: Ids) -> pa.RecordBatch:
    """These rows, which ascend; most often they are a run, which is not copied."""
    is_run = len(rows) == rows[-1] - rows[0] + 1 and bool((np.diff(rows) == 1).all())
    return batch.slice(int(rows[0]), len(rows)) if is_run else batch.take(pa.array(rows))
