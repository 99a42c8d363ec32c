"""Places that come and go."""

from __future__ import annotations

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.vocabulary import Token, Worker
from tests.control.hosts import TOKEN, Cluster, W


def lose(cluster: Cluster, worker: Worker, token: Token) -> Token:
    """A member is lost, and the others go on; returns their generation."""
    others = [w for w in cluster.machine.state.group if w != worker]
    cluster.take(e.WorkerLost(worker, "its host went away"))
    cluster.now += 0.1
    for w in others:
        cluster.take(e.GroupLeft(w, token, e.Left.COLLECTIVE_FAILED, 5))
    return form(cluster)


def form(cluster: Cluster) -> Token:
    """Wait for the next generation, and let its members join."""
    for _ in range(40):
        cluster.now += 0.1
        cluster.take(e.TimePassed())
        orders = [each for each in cluster.effects if isinstance(each, f.FormGeneration)]
        if orders:
            cluster.effects.clear()
            for w in orders[-1].ranks:
                cluster.take(e.GenerationJoined(w, orders[-1].token, 5))
            return orders[-1].token
    raise AssertionError("no generation was formed")


def come(cluster: Cluster, worker: Worker) -> list[f.Effect]:
    """Its replacement is ready."""
    cluster.effects.clear()
    cluster.now += 10.0
    cluster.take(e.TimePassed())
    cluster.take(e.WorkerPlaced(worker))
    cluster.take(e.WorkerWarm(worker, 0, None))
    return list(cluster.effects)


def flap(cluster: Cluster, times: int) -> list[f.Effect]:
    """Worker 2 is lost and comes back so often; what follows when it is ready for the last time."""
    cluster.silent = set(W)  # hosts are not at issue
    token, effects = TOKEN, []
    for incarnation in range(times):
        token = lose(cluster, Worker(2, incarnation), token)
        effects = come(cluster, Worker(2, incarnation + 1))
        if incarnation + 1 < times:
            for w in list(cluster.machine.state.group):
                cluster.take(e.GroupLeft(w, token, e.Left.PARKED, 5))
            token = form(cluster)
            cluster.now += 0.5
    return effects


def test_one_that_is_lost_now_and_then_joins_at_once() -> None:
    cluster = Cluster()
    effects = flap(cluster, 2)
    assert [type(each) for each in effects if isinstance(each, f.ParkGeneration)] == [f.ParkGeneration]


def test_one_that_is_lost_soon_time_after_time_joins_later() -> None:
    cluster = Cluster()
    effects = flap(cluster, 3)
    assert not [each for each in effects if isinstance(each, f.ParkGeneration)]
    told = [each.reason for each in effects if isinstance(each, f.Tell)]
    assert told[-1] == (
        "w2.3 is ready and joins in 15 s at the earliest: its place was lost 3 times in a row soon after it had joined"
    )
    deadline = cluster.machine.next_deadline()
    assert deadline is not None
    assert deadline <= cluster.now + 15.0

    cluster.effects.clear()
    cluster.now += 15.1
    cluster.take(e.TimePassed())
    assert [each.reason for each in cluster.effects if isinstance(each, f.ParkGeneration)] == ["w2.3 joins"]


def test_where_the_others_are_too_few_it_joins_at_once() -> None:
    cluster = Cluster(3, least=3)
    cluster.silent = set(W)
    token = TOKEN
    for incarnation in range(4):
        others = W[:2]
        cluster.take(e.WorkerLost(Worker(2, incarnation), "its host went away"))
        for w in others:
            cluster.take(e.GroupLeft(w, token, e.Left.COLLECTIVE_FAILED, 5))
        come(cluster, Worker(2, incarnation + 1))
        token = form(cluster)
        assert len(cluster.machine.state.group) == 3


def test_a_long_stay_is_forgiven() -> None:
    cluster = Cluster()
    flap(cluster, 2)
    token = cluster.machine.state.token
    for w in list(cluster.machine.state.group):
        cluster.take(e.GroupLeft(w, token, e.Left.PARKED, 5))
    token = form(cluster)
    cluster.now += 60.0
    lose(cluster, Worker(2, 2), token)
    assert cluster.machine.state.workers[2].short_stays == 0
