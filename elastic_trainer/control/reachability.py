"""Who goes on when not everybody can reach everybody.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def largest(workers_of: Mapping[str, Sequence[int]], unreachable: Collection[tuple[str, str]]) -> set[str]:
    """The nodes of the largest set in which everybody reaches everybody.

    Args:
        workers_of: By node, the ids of its workers.
        unreachable: Pairs of nodes, in either order.

    Returns:
        The set with the most workers; among equals the one with the lowest worker ids.
    """
    apart: dict[str, set[str]] = {node: set() for node in workers_of}
    for a, b in unreachable:
        if a in apart and b in apart and a != b:
            apart[a].add(b)
            apart[b].add(a)
    best: tuple[int, list[int]] | None = None
    chosen: set[str] = set()
    for clique in _cliques(set(), set(workers_of), set(), apart):
        ids = sorted(each for node in clique for each in workers_of[node])
        if best is None or (-len(ids), ids) < (-best[0], best[1]):
            best, chosen = (len(ids), ids), clique
    return chosen


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
