"""Turns raw files into a dataset folder, fully shuffled once by a keyed order.

The key is of (seed, source's name, row), so that the same source and seed give the same bytes.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from elastic_trainer.data.dataset import (
    INDEX,
    VARIABLE,
    Column,
    Columns,
    DataFile,
    DatasetIndex,
    RowGroup,
    schema_of,
    to_arrow,
)
from elastic_trainer.data.order import key, permutation
from elastic_trainer.errors import DataError

ROW_GROUP_BYTES = 1 << 20  # a row group is read whole: large enough to read at full speed, small enough to mix well
FILE_BYTES = 256 << 20


def prepare(source: str | os.PathLike[str], out: str | os.PathLike[str], *, seed: int = 0) -> DatasetIndex:
    """Make the dataset folder `out` of a numpy archive.

    Args:
        source: A `.npz` file; its arrays become columns and share their first dimension, the rows.
        out: The folder to make; must not exist.
        seed: Of the shuffle.

    Raises:
        DataError: The source cannot be read, is empty or its arrays do not fit, or `out` exists.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise DataError(f"{out}: exists already. Remove it, or choose another --out.")
    columns, arrays = _read_npz(source)
    rows = len(next(iter(arrays.values())))
    order = permutation(rows, key(seed, xxhash.xxh3_64_intdigest(source.name.encode())))
    return _write(out, columns, {name: values[order] for name, values in arrays.items()}, rows, seed)


def _read_npz(source: Path) -> tuple[tuple[Column, ...], Columns]:
    try:
        with np.load(source, allow_pickle=False) as archive:
            arrays: Columns = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{source}: no such file.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{source}: cannot be read as a numpy archive ({error}). "
            "Write it with numpy.savez(path, name=array, ...), numbers or text, no objects."
        ) from None
    if not arrays:
        raise DataError(f"{source}: holds no array. Write it with numpy.savez(path, name=array, ...).")
    for name, values in arrays.items():
        if values.ndim == 0:
            raise DataError(f"{source}: array {name!r} is a single value; a column needs one element a row.")
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{source}: its arrays have different numbers of rows: {lengths}. They must be equal.")
    if not next(iter(lengths.values())):
        raise DataError(f"{source}: has no rows.")
    return tuple(_column(source, name, values) for name, values in arrays.items()), arrays


def _column(source: Path, name: str, values: NDArray[np.generic]) -> Column:
    if values.dtype.kind in "US":
        if values.ndim != 1:
            raise DataError(f"{source}: array {name!r} of text has shape {values.shape}; text needs one dimension.")
        return Column(name, "string" if values.dtype.kind == "U" else "binary", ())
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{source}: array {name!r} has dtype {values.dtype}; numbers, bool and text can be used.")
    return Column(name, str(values.dtype.newbyteorder("=")), values.shape[1:])


def _row_group_rows(rows: int, row_bytes: float) -> int:
    # bounded by rows // 256 too, so that even small data has many row groups to permute
    return max(1, min(int(ROW_GROUP_BYTES // max(1.0, row_bytes)), rows // 256))


def _write(out: Path, columns: tuple[Column, ...], arrays: Columns, rows: int, seed: int) -> DatasetIndex:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.mkdir()
    row_group = _row_group_rows(rows, sum(_row_bytes(column, arrays[column.name]) for column in columns))
    files: list[DataFile] = []
    low = 0
    while low < rows:
        file, low = _write_file(out / f"data-{len(files):05d}.arrow", columns, arrays, low, row_group)
        files.append(file)
    index = DatasetIndex(rows, row_group, seed, columns, tuple(files))
    partial = out / f".{INDEX}.partial"
    partial.write_text(index.to_json())
    partial.rename(out / INDEX)
    return index


def _write_file(
    path: Path, columns: tuple[Column, ...], arrays: Columns, low: int, row_group: int
) -> tuple[DataFile, int]:
    groups: list[RowGroup] = []
    rows = len(next(iter(arrays.values())))
    schema = schema_of(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while low < rows and sink.tell() < FILE_BYTES:
            high = min(low + row_group, rows)
            batch = pa.record_batch([to_arrow(arrays[c.name][low:high], c) for c in columns], schema=schema)
            if not groups:
                writer.write_batch(batch.slice(0, 0))  # the writer's header goes out before the first real offset
            offset = sink.tell()
            writer.write_batch(batch)
            groups.append(RowGroup(high - low, offset, sink.tell() - offset, ""))
            low = high
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        digested = tuple(
            RowGroup(g.rows, g.offset, g.length, xxhash.xxh3_64_hexdigest(raw[g.offset : g.offset + g.length]))
            for g in groups
        )
    return DataFile(path.name, path.stat().st_size, digested), low


def _row_bytes(column: Column, values: NDArray[np.generic]) -> float:
    return float(values.dtype.itemsize) if column.dtype in VARIABLE else float(column.row_bytes)
