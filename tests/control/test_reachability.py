"""Who goes on when not everybody can reach everybody."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from elastic_trainer.control.reachability import largest


def test_two_that_cannot_reach_each_other_leave_the_lower_worker() -> None:
    assert largest({"a": [1], "b": [0]}, [("a", "b")]) == {"b"}


def test_the_larger_part_goes_on() -> None:
    nodes = {"a": [0], "b": [1], "c": [2]}
    assert largest(nodes, [("a", "b"), ("a", "c")]) == {"b", "c"}
    assert largest(nodes, []) == {"a", "b", "c"}
    assert largest({"a": [0], "b": [1, 2, 3], "c": [4]}, [("b", "a"), ("c", "b")]) == {"b"}


def test_who_has_the_state_goes_on_before_a_larger_set_without_it_if_they_are_enough() -> None:
    nodes = {"a": [0], "b": [1], "c": [2]}
    pairs = [("a", "c"), ("b", "c")]
    assert largest(nodes, pairs, {"c"}) == {"c"}
    assert largest(nodes, pairs, {"c"}, least=2) == {"a", "b"}
    assert largest(nodes, pairs, set(nodes)) == {"a", "b"}


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_largest_of_all_sets(seed: int) -> None:
    chooser = random.Random(seed)
    nodes = {name: [number] for number, name in enumerate("abcdefg"[: chooser.randint(1, 7)])}
    pairs = [pair for pair in combinations(nodes, 2) if chooser.random() < 0.4]

    with_state = {name for name in nodes if chooser.random() < 0.3}
    least = chooser.randint(1, 3)

    found = largest(nodes, pairs, with_state, least)

    def reaches(chosen: tuple[str, ...]) -> bool:
        return not any(set(pair) <= set(chosen) for pair in pairs)

    sets = [chosen for size in range(1, len(nodes) + 1) for chosen in combinations(nodes, size) if reaches(chosen)]
    preferred = [chosen for chosen in sets if len(chosen) >= least and with_state & set(chosen)]
    best = min(preferred or sets, key=lambda chosen: (-len(chosen), sorted(nodes[name][0] for name in chosen)))
    assert found == set(best)


def test_a_large_group_with_a_switch_cut_in_two_is_quick() -> None:
    nodes = {f"n{number:03}": [number] for number in range(128)}
    pairs = [(a, b) for a in list(nodes)[:60] for b in list(nodes)[60:]]
    assert largest(nodes, pairs) == set(list(nodes)[60:])
