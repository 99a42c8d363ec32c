"""Workers that everybody waits for, step after step."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.control import effects as f
from tests.control.hosts import Cluster, W


def paced(cluster: Cluster, paces: list[float], steps: int) -> list[str]:
    """What is told while so many steps are done at these paces."""
    cluster.effects.clear()
    for _ in range(steps):
        for w, pace_s in zip(W, paces, strict=False):
            where = cluster.where[w]
            cluster.where[w] = replace(where, steps=where.steps + 1, mark=where.mark + 1, pace_s=pace_s)
        cluster.pass_time(0.15)
    return [each.reason for each in cluster.effects if isinstance(each, f.Tell)]


def test_one_that_is_twice_as_slow_is_named_once_within_ten_steps() -> None:
    cluster = Cluster()
    assert paced(cluster, [0.016, 0.017, 0.034], 10) == [
        "w2.0 on host host2 is slow: a micro-batch takes it 34 ms, the others 16 ms, and they wait for it. Look for "
        "another process on its cores, a throttled clock or a slow device"
    ]
    assert paced(cluster, [0.016, 0.017, 0.034], 50) == []


def test_a_slow_step_now_and_then_is_nothing() -> None:
    cluster = Cluster()
    for _ in range(10):
        assert paced(cluster, [0.016, 0.017, 0.034], 3) == []
        assert paced(cluster, [0.016, 0.017, 0.018], 3) == []


def test_workers_that_are_all_slow_are_nothing() -> None:
    assert paced(Cluster(), [0.5, 0.5, 0.6], 30) == []


def test_nobody_is_named_before_the_pace_is_known() -> None:
    assert paced(Cluster(), [0.0, 0.0, 0.034], 30) == []


def test_of_two_the_slower_is_named() -> None:
    told = paced(Cluster(workers=2), [0.040, 0.016], 10)
    assert len(told) == 1
    assert told[0].startswith("w0.0 on host host0 is slow")
