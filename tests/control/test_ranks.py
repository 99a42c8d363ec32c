from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.control import ranks
from elastic_trainer.control.ranks import assign
from elastic_trainer.vocabulary import Worker

A, B, C, D = (Worker(i, 0) for i in range(4))
NEW_B = Worker(1, 1)


def test_survivors_keep_their_order_and_newcomers_follow() -> None:
    assert assign([C, A, B], {A, C, NEW_B, D}, most=4) == (C, A, NEW_B, D)


def test_a_replacement_does_not_take_the_rank_of_the_lost_one() -> None:
    assert assign([A, B, C], {A, NEW_B, C}, most=3) == (A, C, NEW_B)


def test_no_more_than_the_most_and_survivors_first() -> None:
    assert assign([D], {A, B, D}, most=2) == (D, A)


@pytest.mark.parametrize(
    ("slowness", "logical_ranks", "expected"),
    [
        ([1, 1, 1], 12, (4, 4, 4)),
        ([1, 1, 2], 12, (5, 5, 2)),
        ([1, 1, 2], 10, (4, 4, 2)),
        ([1, 100], 12, (11, 1)),
        ([3], 5, (5,)),
        ([1, 1, 1], 3, (1, 1, 1)),
    ],
)
def test_the_slow_carry_less(slowness: list[float], logical_ranks: int, expected: tuple[int, ...]) -> None:
    assert ranks.shares(slowness, logical_ranks) == expected


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=6), st.integers(0, 20))
def test_no_other_dealing_is_through_sooner(slowness: list[float], more: int) -> None:
    found = ranks.shares(slowness, len(slowness) + more)
    assert sum(found) == len(slowness) + more
    assert min(found) >= 1
    last = max(n * each for n, each in zip(found, slowness, strict=True))
    for giver in range(len(found)):
        for taker in range(len(found)):
            if giver != taker and found[giver] > 1:
                other = [n - (i == giver) + (i == taker) for i, n in enumerate(found)]
                assert last <= max(n * each for n, each in zip(other, slowness, strict=True)) + 1e-9
