"""Workers that everybody waits for, step after step."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.vocabulary import Token
from tests.control.hosts import TOKEN, Cluster, W


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


def test_a_slow_one_gets_fewer_logical_ranks_until_it_is_fast_again() -> None:
    cluster = Cluster(logical_ranks=12, rebalances=True)
    paced(cluster, [0.016, 0.017, 0.034], 10)
    (park,) = [each for each in cluster.effects if isinstance(each, f.ParkGeneration)]
    assert park.reason == "w2.0 is slow and gets fewer logical ranks"
    order = leave_and_form(cluster, TOKEN)
    assert order.ranks == (W[0], W[1], W[2])
    assert order.shares == (5, 5, 2)
    assert not [each for each in cluster.effects if isinstance(each, f.ParkGeneration)]

    told = paced(cluster, [0.016, 0.017, 0.017], 10)
    assert told == ["w2.0 is as fast as the others again"]
    assert not [each for each in cluster.effects if isinstance(each, f.ParkGeneration)]  # so soon after
    cluster.pass_time(60.0)
    assert [each.reason for each in cluster.effects if isinstance(each, f.ParkGeneration)] == [
        "nobody is slow any more"
    ]
    assert leave_and_form(cluster, order.token).shares == ()


def leave_and_form(cluster: Cluster, token: Token) -> f.FormGeneration:
    """Everybody leaves for the next generation and joins it."""
    cluster.effects.clear()
    for w in list(cluster.machine.state.group):
        cluster.take(e.GroupLeft(w, token, e.Left.PARKED, 5))
    (order,) = [each for each in cluster.effects if isinstance(each, f.FormGeneration)]
    for w in order.ranks:
        cluster.take(e.GenerationJoined(w, order.token, 5))
    return order
