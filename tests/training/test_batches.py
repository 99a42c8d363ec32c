from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.data.batch_plan import MicroBatchPlan
from elastic_trainer.errors import DataError, TaskError
from elastic_trainer.training.batches import make_batch

PLANNED = MicroBatchPlan(0, 0, 0, np.array([4, 9, 4]), 2)


def test_columns_become_tensors_and_text_a_list() -> None:
    batch = make_batch(PLANNED, {"x": np.zeros((3, 2), "f4"), "t": np.array(["a", "b", "c"], object)}, None, False)

    assert batch["x"].dtype == torch.float32
    assert batch["t"] == ["a", "b", "c"]
    assert batch.rows == 2
    assert batch.sample_ids.tolist() == [4, 9]


def test_rows_are_stacked() -> None:
    rows: list[dict[str, Any]] = [{"x": torch.ones(2) * i, "y": i, "t": f"row {i}"} for i in range(3)]
    batch = make_batch(PLANNED, rows, None, True)

    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["y"].tolist() == [0, 1, 2]
    assert batch["t"] == ["row 0", "row 1", "row 2"]
    assert batch["row_weight"].tolist() == [1, 1, 0]


def test_collate_gets_rows() -> None:
    batch = make_batch(PLANNED, {"x": np.arange(3)}, lambda rows: {"n": torch.tensor(len(rows))}, False)

    assert int(batch["n"]) == 3


def test_rows_of_different_shapes_are_told() -> None:
    with pytest.raises(TaskError, match="rows of column 'x' cannot be stacked"):
        make_batch(PLANNED, [{"x": np.zeros(2)}, {"x": np.zeros(3)}], None, False)


def test_a_missing_column_is_told() -> None:
    with pytest.raises(DataError, match="no column 'z'"):
        make_batch(PLANNED, {"x": np.arange(3)}, None, False)["z"]
