"""What broke in other systems' data (reports named at each test): here every sample of every epoch is read once."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from elastic_trainer.data.batch_plan import BatchPlan, expected_digest, range_of, steps_digest
from elastic_trainer.data.order import SampleOrder

WORLDS = (1, 2, 3, 5, 8)


def order_of(rows: int, *, batch: int = 24, ranks: int = 8, drop_last: bool = False, row_group: int = 7) -> SampleOrder:
    return SampleOrder(rows, row_group, batch, ranks, 3, 1, drop_last)


def read(plan: BatchPlan, steps: range, world: int) -> Counter[int]:
    """Ids that a world of this size trains in these steps."""
    found: Counter[int] = Counter()
    for step in steps:
        for rank in range(world):
            for planned in plan.of_rank(step, range_of(rank, world, plan.order.logical_ranks)):
                found.update(planned.ids[: planned.rows].tolist())
    return found


@pytest.mark.parametrize("drop_last", [False, True])
def test_resizing_at_every_offset_of_an_epoch_reads_each_row_once(drop_last: bool) -> None:
    """DLRover#1553, #1339; Horovod#3143, #3399 and torchft#58 with a node that leaves at each step; ray#63285."""
    order = order_of(203, drop_last=drop_last)
    plan = BatchPlan(order, 3)
    expected = order.full_steps * order.global_batch if drop_last else 203
    for at in range(order.steps_per_epoch + 1):
        for before, after in zip(WORLDS, WORLDS[::-1], strict=True):
            found = read(plan, range(at), before) + read(plan, range(at, order.steps_per_epoch), after)
            assert (len(found), sum(found.values())) == (expected, expected), (at, before, after)


def test_a_crash_in_mid_epoch_of_1001_rows_repeats_and_loses_none() -> None:
    """Ray Train 2.60 trained 500 of them twice and one never."""
    order = order_of(1001)
    plan = BatchPlan(order, 3)
    middle = order.steps_per_epoch // 2
    found = read(plan, range(middle), 3) + read(plan, range(middle, order.steps_per_epoch), 2)
    assert found == Counter(range(1001))


def test_resuming_at_nine_tenths_of_a_billion_samples_takes_constant_time_and_memory() -> None:
    """transformers#21934 skipped for 6.5 h, #11284."""
    order = SampleOrder(1_000_000_000, 4096, 1024, 64, 64, 0)
    plan = BatchPlan(order, 16)
    step = int(0.9 * order.steps_per_epoch)
    list(plan.of_rank(0, range(1)))  # what is made once for all

    tracemalloc.start()
    times = []
    for number in range(5):
        began = time.perf_counter()
        ids = np.concatenate([planned.ids for planned in plan.of_rank(step + 64 * number, range(8))])
        times.append(time.perf_counter() - began)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(set(ids.tolist())) == 128
    assert min(times) < 0.05, f"{min(times):.3f} s to the first batch"
    assert peak < 20e6, f"{peak / 1e6:.1f} MB"


def test_resuming_at_the_first_and_last_step_of_three_epochs_then_resizing() -> None:
    """litdata#316, data#1437, streaming#437: epochs were skipped, shortened or repeated."""
    order = order_of(200)
    plan, per_epoch = BatchPlan(order, 3), order.steps_per_epoch
    for epoch in range(3):
        for stop in (epoch * per_epoch + 1, (epoch + 1) * per_epoch - 1, (epoch + 1) * per_epoch):
            found = read(plan, range(stop), 2) + read(plan, range(stop, 3 * per_epoch), 5)
            assert found == Counter(dict.fromkeys(range(200), 3)), (epoch, stop)


def test_the_state_of_the_data_is_the_step_alone() -> None:
    """data#1317: saving it at every step takes microseconds; litdata#251, #213: readers may be any number."""
    order = order_of(1001)
    fresh = SampleOrder(**{name: getattr(order, name) for name in order.__dataclass_fields__})
    for step in (0, 17, 41, 42, 1000):
        mine = [order.ids(step, rank).tolist() for rank in range(8)]
        assert mine == [fresh.ids(step, rank).tolist() for rank in reversed(range(8))][::-1]
        ids = np.array([each for ids in mine for each in ids])
        assert steps_digest(step, ids) == expected_digest(order, step)


def test_an_odd_number_of_rows_leaves_every_rank_with_the_same_steps() -> None:
    """ray#66085: a short batch in mid-stream gave ranks different numbers of collectives."""
    order = order_of(97)
    plan = BatchPlan(order, 3)
    sizes = [sum(p.rows for p in plan.of_rank(step, range(8))) for step in range(2 * order.steps_per_epoch)]
    assert sizes == [24, 24, 24, 24, 1] * 2, "only the last step of an epoch is short"


@pytest.mark.parametrize(("rows", "row_group"), [(20_000, 78), (20_000, 5_000), (3_000, 3_000)])
def test_shuffles_are_as_good_as_chance_for_rows_in_any_groups(rows: int, row_group: int) -> None:
    """Few row groups too: where a row comes in one epoch says nothing of where it comes in the next.

    The statistic is the correlation of places in two epochs; for permutations by chance its standard deviation is
    1 / sqrt(rows). What a window holds is bounded, so this is the quality of the layout together with the data set's
    own full shuffle; neighbours in one epoch are counted besides.
    """
    order = SampleOrder(rows, row_group, 100, 10, 20, 3)
    prepared = np.random.default_rng(0).permutation(rows)  # `prepare` has shuffled what was sorted
    epochs = []
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        ids = np.concatenate([order.ids(step, rank) for step in steps for rank in range(10)])
        epochs.append(prepared[ids])
    places = [np.argsort(each) for each in epochs]

    assert abs(np.corrcoef(epochs[0], np.arange(rows))[0, 1]) < 4 / np.sqrt(rows), "sorted input shows through"
    assert abs(np.corrcoef(epochs[0][:-1], epochs[0][1:])[0, 1]) < 4 / np.sqrt(rows), "neighbours are alike"
    if row_group < rows // 10:
        assert abs(np.corrcoef(*places)[0, 1]) < 0.1, "places are alike in two epochs"
