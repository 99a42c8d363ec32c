from __future__ import annotations

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
