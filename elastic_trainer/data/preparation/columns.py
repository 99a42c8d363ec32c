"""Columns of any kind to those that a dataset folder holds: numbers and arrays of one shape, bool, text and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from elastic_trainer.data.dataset import VARIABLE, Column, Columns
from elastic_trainer.data.preparation.damage import Damage
from elastic_trainer.data.preparation.readers import RowBatch
from elastic_trainer.errors import DataError


def to_numpy(batch: RowBatch) -> Columns:
    """What a transform gets: numbers with NaN where a value is missing, text and bytes as objects, lists as arrays."""
    return {name: _numpy_of(values) for name, values in batch.columns.items()}


def _numpy_of(values: pa.Array | NDArray[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    if pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type) or pa.types.is_large_list(values.type):
        lengths = set(values.value_lengths().to_pylist())
        flat = values.flatten()
        if len(lengths) == 1 and None not in lengths and _is_plain(flat):
            return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(values), lengths.pop())
        rows = values.to_pylist()
        shapes = {None if row is None else np.shape(row) for row in rows}
        if len(shapes) == 1 and None not in shapes:
            return np.array(rows)
        out = np.empty(len(rows), dtype=object)
        out[:] = rows
        return out
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if _is_text(values.type) or pa.types.is_nested(values.type) or pa.types.is_decimal(values.type):
        out = np.empty(len(values), dtype=object)
        out[:] = values.to_pylist()
        return out
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_plain(values: pa.Array) -> bool:
    return not values.null_count and (pa.types.is_primitive(values.type) or pa.types.is_boolean(values.type))


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def settle(batch: RowBatch, damage: Damage) -> tuple[RowBatch, tuple[Column, ...]]:
    """The batch with numpy columns of settled types, and these types; rows with missing values are damaged.

    Raises:
        DataError: A column has a type that a dataset cannot hold; names it and what to do.
    """
    bad: dict[int, str] = {}
    for name, values in batch.columns.items():
        if isinstance(values, pa.Array) and values.null_count:
            for place in np.flatnonzero(np.asarray(values.is_null())):
                bad.setdefault(int(place), f"{name} is missing")
    kept = batch.without(bad, damage)
    if not kept.rows:
        return kept, ()
    arrays = to_numpy(kept)
    columns = tuple(_column(batch.files[0], name, values) for name, values in arrays.items())
    settled: dict[str, Any] = {
        column.name: values if column.dtype in VARIABLE else np.asarray(values, dtype=np.dtype(column.dtype))
        for column, values in zip(columns, arrays.values(), strict=True)
    }
    return RowBatch(settled, kept.files, kept.rows), columns


def _column(file: str, name: str, values: NDArray[Any]) -> Column:
    if values.dtype == object:
        kinds = {type(value) for value in values}
        if kinds == {str}:
            return Column(name, "string", ())
        if kinds == {bytes}:
            return Column(name, "binary", ())
        if kinds <= {list, np.ndarray}:
            shapes = sorted({np.shape(value) for value in values})
            raise DataError(
                f"{file}: column {name!r} holds lists of different shapes, such as {shapes[:3]}. Bring them to one "
                "shape in the task's transform(), or keep them as bytes."
            )
        raise DataError(
            f"{file}: column {name!r} holds {', '.join(sorted(kind.__name__ for kind in kinds))}; numbers, bool, text, "
            "bytes and arrays of one shape can be used. Change it in the task's transform()."
        )
    if values.dtype.kind in "US":
        if values.ndim != 1:
            raise DataError(f"{file}: column {name!r} of text has shape {values.shape}; text needs one dimension.")
        return Column(name, "string" if values.dtype.kind == "U" else "binary", ())
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(
            f"{file}: column {name!r} has dtype {values.dtype}; numbers, bool, text and bytes can be used. Change it "
            "in the task's transform()."
        )
    return Column(name, str(values.dtype.newbyteorder("=")), values.shape[1:])


def common(found: Iterable[tuple[str, tuple[Column, ...]]]) -> tuple[Column, ...]:
    """One type for each column from those of several files: whole numbers become floats where others are floats.

    Args:
        found: Names of files, and their columns.

    Raises:
        DataError: Two files contradict each other; names both.
    """
    first_file = ""
    columns: tuple[Column, ...] = ()
    for file, each in found:
        if not columns:
            first_file, columns = file, each
            continue
        names, others = [c.name for c in columns], [c.name for c in each]
        if set(names) != set(others):
            differ = ", ".join(sorted(set(names) ^ set(others)))
            raise DataError(
                f"{file} and {first_file} do not have the same columns; one alone has {differ}. Choose files with "
                "equal columns (--include), or bring them to the same in the task's transform()."
            )
        by_name = {c.name: c for c in each}
        columns = tuple(_merged(file, first_file, c, by_name[c.name]) for c in columns)
    return columns


def _merged(file: str, first_file: str, old: Column, new: Column) -> Column:
    if old == new:
        return old
    is_number = old.dtype not in (*VARIABLE, "bool") and new.dtype not in (*VARIABLE, "bool")
    if not is_number or old.shape != new.shape:
        raise DataError(
            f"column {old.name!r} is {new.dtype}{list(new.shape)} in {file} and {old.dtype}{list(old.shape)} in "
            f"{first_file}. Bring it to one type and shape in the task's transform()."
        )
    return Column(old.name, str(np.promote_types(old.dtype, new.dtype)), old.shape)
