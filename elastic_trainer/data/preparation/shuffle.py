"""The full shuffle: each row has a key, parts become runs sorted by it, and data files are merged from all runs.

A row's key depends on the seed, its file's name and its number in the file, so the outcome depends on nothing else: not
on how files are dealt to tasks, nor on how many of these run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from elastic_trainer.data.dataset import Column, Columns, DataFile, RowGroup, schema_of, to_arrow, to_numpy_column
from elastic_trainer.data.order import Words, key, mix_array
from elastic_trainer.data.preparation.columns import common, settle, to_numpy
from elastic_trainer.data.preparation.damage import Damage, DamagedRow
from elastic_trainer.data.preparation.readers import Open, ReadOptions, RowBatch, read
from elastic_trainer.data.preparation.sources import Part, split_at
from elastic_trainer.errors import DataError
from elastic_trainer.storage.object_store import ObjectStore

Transform = Callable[[Columns], Columns]
RUN_BYTES = 64 << 20  # rows are sorted and written when so many have come together: a task's memory stays bounded
KEY = "key"  # the column of keys, the first of a run
_SPLIT_SALT = np.uint64(0x9D5C_6F0B_3A1E_77C1)


@dataclass(frozen=True)
class ShuffleSpec:
    """What every task of a preparation needs to know; `buckets` bounds what a merge reads at once."""

    format: str
    seed: int
    splits: Mapping[str, float]
    on_error: str
    reading: ReadOptions
    buckets: int


@dataclass(frozen=True)
class Bucket:
    """The rows of a run whose keys lie in one range: where in the run's file."""

    rows: int
    offset: int
    length: int


@dataclass(frozen=True)
class Run:
    """Rows of a part, sorted by key, in one file of the staging area."""

    name: str
    split: str
    source: str  # a file that it came from, for messages
    columns: tuple[Column, ...]
    buckets: tuple[Bucket, ...]
    content_bytes: int  # of the values alone, whatever the file adds to them

    @property
    def rows(self) -> int:
        """Of all buckets."""
        return sum(bucket.rows for bucket in self.buckets)


@dataclass(frozen=True)
class PartResult:
    """What became of a part."""

    runs: tuple[Run, ...]
    left_out: int
    damaged: tuple[DamagedRow, ...]


# ---- parts to runs


def sort_part(
    part: Part, spec: ShuffleSpec, opened: Open, transform: Transform | None, store: ObjectStore, prefix: str
) -> PartResult:
    """Read a part, transform its rows, and write them as runs below `prefix`.

    Raises:
        DataError: A file cannot be read, or a row cannot be used and the policy is to fail.
    """
    damage = Damage(spec.on_error)
    writers: dict[str, _RunWriter] = {}
    for raw in read(part, spec.format, opened, damage, spec.reading):
        for batch in _transformed(raw, transform, damage) if transform else [raw]:
            settled, columns = settle(batch, damage)
            if transform:
                settled = settled.without(_undefined(settled), damage)
            if not settled.rows:
                continue
            keys = _keys(settled, spec.seed)
            for split, chosen in _by_split(keys, part.split, spec.splits):
                writer = writers.setdefault(split, _RunWriter(split, spec.buckets, store, prefix, len(writers)))
                writer.add(settled.files[0], columns, {n: v[chosen] for n, v in settled.columns.items()}, keys[chosen])
    runs = [run for writer in writers.values() for run in writer.end()]
    return PartResult(tuple(runs), damage.count, tuple(damage.rows))


def _transformed(batch: RowBatch, transform: Transform, damage: Damage) -> Iterator[RowBatch]:
    """The batch as the task's transform makes it; a row on which it raises is found by halving, and is damaged."""
    try:
        found = transform(to_numpy(batch))
    except Exception as error:
        if len(batch.rows) == 1:
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"transform() raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            batch.without({0: problem}, damage)
            return
        middle = len(batch.rows) // 2
        yield from _transformed(batch.at(list(range(middle))), transform, damage)
        yield from _transformed(batch.at(list(range(middle, len(batch.rows)))), transform, damage)
        return
    yield _as_batch(found, batch)


def _as_batch(found: Any, batch: RowBatch) -> RowBatch:
    if not isinstance(found, Mapping) or not found:
        raise DataError(f"transform() returned {type(found).__name__}, not columns: {{name: array, ...}}.")
    columns = {name: values if isinstance(values, np.ndarray) else np.asarray(values) for name, values in found.items()}
    lengths = {name: len(values) if values.ndim else None for name, values in columns.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise DataError(f"transform() returned columns of different lengths: {lengths}. They must be equal.")
    count = next(iter(lengths.values())) or 0
    if count == len(batch.rows):
        return RowBatch(dict(columns), batch.files, batch.rows)
    # rows came or went: they are named by the batch's first row
    first = (batch.rows[0] + 1) << 20
    return RowBatch(dict(columns), [batch.files[0]] * count, list(range(first, first + count)))


def _undefined(batch: RowBatch) -> dict[int, str]:
    """Rows in which a transform has left a missing value, which it gets as NaN, without deciding what becomes of it."""
    bad: dict[int, str] = {}
    for name, values in batch.columns.items():
        if values.dtype.kind == "f" and np.isnan(values).any():
            for place in np.flatnonzero(np.isnan(values.reshape(len(values), -1)).any(axis=1)):
                bad.setdefault(int(place), f"{name} is not a number after transform()")
    return bad


def _keys(batch: RowBatch, seed: int) -> Words:
    of_file = {name: key(seed, xxhash.xxh3_64_intdigest(name.encode())) for name in set(batch.files)}
    files = np.array([of_file[name] for name in batch.files], dtype=np.uint64)
    return mix_array(files ^ np.array(batch.rows, dtype=np.uint64))


def _by_split(
    keys: Words, whole: str | None, splits: Mapping[str, float]
) -> Iterator[tuple[str, NDArray[np.int64] | slice]]:
    if whole is not None or not splits:
        yield whole or "", slice(None)
        return
    drawn = mix_array(keys ^ _SPLIT_SALT) / float(1 << 64)
    names = np.array([split_at(float(each), splits) for each in drawn])
    for name in sorted(set(names.tolist())):
        yield name, np.flatnonzero(names == name)


class _RunWriter:
    """Gathers rows of one split of a part, and writes them sorted when enough have come together."""

    def __init__(self, split: str, buckets: int, store: ObjectStore, prefix: str, number: int) -> None:
        self._split = split
        self._buckets = buckets
        self._store = store
        self._prefix = f"{prefix}-{number}"
        self._gathered: list[tuple[str, tuple[Column, ...], Columns, Words]] = []
        self._bytes = 0
        self._runs: list[Run] = []

    def add(self, source: str, columns: tuple[Column, ...], arrays: Columns, keys: Words) -> None:
        self._gathered.append((source, columns, arrays, keys))
        self._bytes += sum(_size(values) for values in arrays.values())
        if self._bytes >= RUN_BYTES:
            self._flush()

    def end(self) -> list[Run]:
        if self._gathered:
            self._flush()
        return self._runs

    def _flush(self) -> None:
        columns = common((source, each) for source, each, _, _ in self._gathered)
        keys = np.concatenate([each for _, _, _, each in self._gathered])
        order = np.argsort(keys, kind="stable")
        arrays = {c.name: np.concatenate([each[c.name] for _, _, each, _ in self._gathered])[order] for c in columns}
        name = f"{self._prefix}-{len(self._runs)}.arrow"
        content, buckets = _sorted_file(columns, arrays, keys[order], self._buckets)
        self._store.put(name, content)
        self._runs.append(Run(name, self._split, self._gathered[0][0], columns, buckets, self._bytes))
        self._gathered, self._bytes = [], 0


def _sorted_file(
    columns: tuple[Column, ...], arrays: Columns, keys: Words, count: int
) -> tuple[memoryview, tuple[Bucket, ...]]:
    borders = np.searchsorted(_bucket_of(keys, count), np.arange(count + 1))
    schema = _run_schema(columns)
    sink = pa.BufferOutputStream()
    buckets = []
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_record_batch(columns, arrays, keys, slice(0, 0)))  # the header goes out before the first
        for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            offset = sink.tell()
            if high > low:
                writer.write_batch(_record_batch(columns, arrays, keys, slice(low, high)))
            buckets.append(Bucket(high - low, offset, sink.tell() - offset))
    return memoryview(sink.getvalue()), tuple(buckets)


def _bucket_of(keys: Words, count: int) -> NDArray[np.int64]:
    return ((keys >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _run_schema(columns: tuple[Column, ...]) -> pa.Schema:
    return schema_of(columns).insert(0, pa.field(KEY, pa.uint64(), nullable=False))


def _record_batch(columns: tuple[Column, ...], arrays: Columns, keys: Words, rows: slice) -> pa.RecordBatch:
    values = [pa.array(keys[rows]), *(to_arrow(arrays[column.name][rows], column) for column in columns)]
    return pa.record_batch(values, schema=_run_schema(columns))


def _size(values: NDArray[Any]) -> int:
    return sum(map(len, values.tolist())) if values.dtype == object else values.nbytes


# ---- runs to data files


@dataclass(frozen=True)
class FilePlan:
    """A data file to be made: rows `low` to `high` of a split, counted over all keys in order."""

    name: str
    split: str
    columns: tuple[Column, ...]
    low: int
    high: int
    row_group: int


def merge_file(plan: FilePlan, runs: Sequence[Run], store: ObjectStore, out: ObjectStore) -> DataFile:
    """Write a data file from the buckets that hold its rows."""
    counts = np.array([[bucket.rows for bucket in run.buckets] for run in runs], dtype=np.int64).sum(axis=0)
    starts = np.concatenate([[0], np.cumsum(counts)])
    first = int(np.searchsorted(starts, plan.low, side="right")) - 1
    last = int(np.searchsorted(starts, plan.high, side="left"))
    schema = schema_of(plan.columns)
    merged = pa.concat_tables(
        [_merged_bucket(number, plan.columns, runs, store) for number in range(first, last) if counts[number]]
    )
    rows = merged.slice(plan.low - int(starts[first]), plan.high - plan.low)
    sink = pa.BufferOutputStream()
    places: list[tuple[int, int, int]] = []
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([], each.type) for each in schema], schema=schema))
        # by way of numpy: what pads a slice of an Arrow array are its neighbours, and bytes must not depend on these
        arrays = {c.name: to_numpy_column(rows.column(c.name).combine_chunks(), c) for c in plan.columns}
        for low in range(0, len(rows), plan.row_group):
            high = min(low + plan.row_group, len(rows))
            values = [to_arrow(arrays[column.name][low:high], column) for column in plan.columns]
            offset = sink.tell()
            writer.write_batch(pa.record_batch(values, schema=schema))
            places.append((high - low, offset, sink.tell() - offset))
    content = memoryview(sink.getvalue())
    out.put(plan.name, content)
    groups = tuple(RowGroup(n, at, size, xxhash.xxh3_64_hexdigest(content[at : at + size])) for n, at, size in places)
    return DataFile(plan.name.rpartition("/")[2], len(content), groups)


def _merged_bucket(number: int, columns: tuple[Column, ...], runs: Sequence[Run], store: ObjectStore) -> pa.Table:
    wanted = schema_of(columns)
    keys, tables = [], []
    for run in runs:
        bucket = run.buckets[number]
        if not bucket.rows:
            continue
        content = bytearray(bucket.length)
        store.read_into(run.name, bucket.offset, memoryview(content))
        batch = pa.ipc.read_record_batch(pa.py_buffer(content), _run_schema(run.columns))
        keys.append(batch.column(KEY).to_numpy())
        tables.append(pa.Table.from_batches([batch]).select(wanted.names).cast(wanted))
    order = np.argsort(np.concatenate(keys), kind="stable")
    return pa.concat_tables(tables).combine_chunks().take(pa.array(order))
