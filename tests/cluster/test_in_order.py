from __future__ import annotations

import itertools

from elastic_trainer.cluster.in_order import InOrder


def test_every_order_of_arrival_comes_out_in_the_order_of_sending() -> None:
    for arrival in itertools.permutations(range(5)):
        messages: InOrder[str] = InOrder()

        out = [text for number in arrival for text in messages.take(number, f"m{number}")]

        assert out == ["m0", "m1", "m2", "m3", "m4"]


def test_a_message_that_comes_twice_counts_once() -> None:
    messages: InOrder[str] = InOrder()

    assert messages.take(1, "b") == []
    assert messages.take(1, "b") == []
    assert messages.take(0, "a") == ["a", "b"]
    assert messages.take(0, "a") == []
