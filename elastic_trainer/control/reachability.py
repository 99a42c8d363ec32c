"""Who goes on when not everybody can reach everybody.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def largest(
    workers_of: Mapping[str, Sequence[int]],
    unreachable: Collection[tuple[str, str]],
    with_state: Collection[str] = (),
    least: int = 1,
) -> set[str]:
    """The nodes of the largest set in which everybody reaches everybody.

    Args:
        workers_of: By node, the ids of its workers.
        unreachable: Pairs of nodes, in either order.
        with_state: Nodes with a worker whose state the run goes on from.
        least: Workers without which no set can go on.

    Returns:
        The set with the most workers, of those that have the state and can go on if there are any: without the state
        done steps are done again. Among equals the one with the lowest worker ids.
    """
    apart: dict[str, set[str]] = {node: set() for node in workers_of}
    for a, b in unreachable:
        if a in apart and b in apart and a != b:
            apart[a].add(b)
            apart[b].add(a)

    def order(clique: set[str]) -> tuple[bool, int, list[int]]:
        ids = sorted(each for node in clique for each in workers_of[node])
        return clique.isdisjoint(with_state) or len(ids) < least, -len(ids), ids

    return min(_cliques(set(), set(workers_of), set(), apart), key=order)


def _cliques(clique: set[str], open_: set[str], closed: set[str], apart: Mapping[str, set[str]]) -> list[set[str]]:
    """Bron-Kerbosch with a pivot: all sets that nobody can be added to. Few nodes lose each other, so few branches."""
    if not open_ and not closed:
        return [clique]
    pivot = min(open_ | closed, key=lambda node: len(apart[node] & open_))
    found: list[set[str]] = []
    for node in sorted(open_ & (apart[pivot] | {pivot})):
        near = {other for other in open_ if other != node and other not in apart[node]}
        far = {other for other in closed if other not in apart[node]}
        found += _cliques(clique | {node}, near, far, apart)
        open_ = open_ - {node}
        closed = closed | {node}
    return found
