from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.batch_plan import (
    BatchPlan,
    choose_logical_ranks,
    choose_micro_batch,
    choose_window,
    evaluation_rows,
    expected_digest,
    range_of,
    steps_digest,
)
from elastic_trainer.data.order import SampleOrder

ORDER = SampleOrder(samples=53, row_group=7, global_batch=12, logical_ranks=3, window=3, seed=9)


@given(st.integers(1, 40), st.integers(1, 200))
def test_ranges_are_contiguous_even_and_complete(world: int, ranks: int) -> None:
    ranges = [range_of(rank, world, ranks) for rank in range(world)]

    assert [i for each in ranges for i in each] == list(range(ranks))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_shares_are_contiguous_in_the_order_of_ranks() -> None:
    assert [range_of(rank, 3, 12, (5, 5, 2)) for rank in range(3)] == [range(5), range(5, 10), range(10, 12)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 3, 4])  # step 4 is the short one, of 5 samples
def test_any_world_does_the_same_micro_batches(world: int, step: int) -> None:
    plan = BatchPlan(ORDER, 2)
    done = [m for rank in range(world) for m in plan.of_rank(step, range_of(rank, world, 3))]
    alone = list(plan.of_rank(step, range(3)))

    assert [(m.logical_rank, m.index, m.ids.tolist()) for m in done] == [
        (m.logical_rank, m.index, m.ids.tolist()) for m in alone
    ]


def test_the_short_step_is_dealt_fill_first() -> None:
    shapes = [(m.logical_rank, m.rows) for m in BatchPlan(ORDER, 2).of_rank(4, range(3))]

    assert shapes == [(0, 2), (0, 2), (1, 1)]


def test_fixed_shapes_repeat_real_samples() -> None:
    last = list(BatchPlan(ORDER, 2, fixed_shapes=True).of_rank(4, range(3)))[-1]

    assert last.rows == 1
    assert last.ids.tolist() == [last.ids[0]] * 2


def test_the_groups_digest_is_the_sum_of_the_ranks() -> None:
    for step in range(10):
        parts = sum(steps_digest(step, ORDER.ids(step, rank)) for rank in range(3)) % 2**64
        assert expected_digest(ORDER, step) == parts


def test_a_digest_tells_one_sample_from_another_and_one_step_from_another() -> None:
    ids = np.arange(12)
    others = [ids + 1, np.r_[ids[:-1], 3], ids[:-1]]

    assert steps_digest(0, ids) == steps_digest(0, ids[::-1])
    assert len({steps_digest(0, each) for each in [ids, *others]} | {steps_digest(1, ids)}) == 5


def test_evaluation_rows_are_dealt_completely() -> None:
    assert [i for rank in range(5) for i in evaluation_rows(13, rank, 5)] == list(range(13))


def test_defaults_leave_four_slices_for_each_worker() -> None:
    assert choose_micro_batch(96, 3) == 8
    assert choose_logical_ranks(96, 8, 3) == 12
    assert choose_logical_ranks(96, 8, 100) == 12
    assert choose_micro_batch(7, 4) == 1


def test_a_window_covers_two_row_groups_as_far_as_memory_allows() -> None:
    assert choose_window(row_group=100, per_rank=8, global_batch=96, row_bytes=1000, window_bytes=1 << 28) == 25
    assert choose_window(row_group=100, per_rank=8, global_batch=96, row_bytes=1000, window_bytes=300_000) == 3
    assert choose_window(row_group=100, per_rank=8, global_batch=96, row_bytes=1e9, window_bytes=1) == 1


def test_a_micro_batch_must_divide() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        BatchPlan(ORDER, 3)
