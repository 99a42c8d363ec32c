"""Micro-batches as the user's code sees them: dicts of tensors by column name, with their place in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_trainer.data.batch_plan import MicroBatchPlan
from elastic_trainer.data.dataset import Named
from elastic_trainer.errors import TaskError

Rows = list[dict[str, Any]]
Collate = Callable[[Rows], Mapping[str, Any]]
WEIGHT = "row_weight"


class Batch(Named):
    """A micro-batch: column name to tensor of shape (rows, ...).

    `rows` is the number of real rows. Only a task with `fixed_shapes` gets further, repeated ones behind them; then
    the column `row_weight` is 1 for real rows and 0 for the others.
    """

    rows: int
    sample_ids: NDArray[np.int64]


def make_batch(
    planned: MicroBatchPlan, data: Rows | dict[str, NDArray[np.generic]], collate: Collate | None, fixed_shapes: bool
) -> Batch:
    """The batch of a planned micro-batch from its rows or columns."""
    if collate is not None:
        columns: Mapping[str, Any] = collate(data if isinstance(data, list) else _rows(data))
    elif isinstance(data, list):
        columns = {name: _stack(name, [row[name] for row in data]) for name in data[0]}
    else:
        columns = {name: _tensor(name, values) for name, values in data.items()}
    batch = Batch(columns)
    batch.rows = planned.rows
    batch.sample_ids = planned.ids[: planned.rows]
    if fixed_shapes:
        batch[WEIGHT] = (torch.arange(len(planned.ids)) < planned.rows).to(torch.float32)
    return batch


def _rows(columns: dict[str, NDArray[np.generic]]) -> Rows:
    count = len(next(iter(columns.values())))
    return [Named({name: values[i] for name, values in columns.items()}) for i in range(count)]


def _tensor(name: str, values: NDArray[np.generic]) -> Any:
    if values.dtype == object:
        return values.tolist()  # text stays a list: a task that needs tensors of it has preprocess or collate
    return torch.from_numpy(np.ascontiguousarray(values))


def _stack(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], str | bytes):
        return list(values)
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values)
        return _tensor(name, np.stack([np.asarray(value) for value in values]))
    except (ValueError, RuntimeError, TypeError) as error:
        raise TaskError(
            f"the rows of column {name!r} cannot be stacked ({error}). Give them equal shapes in preprocess(), or "
            "define collate(rows) in the task."
        ) from None
