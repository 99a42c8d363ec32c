"""Hosts that are announced to go: who leaves, who stays, and what is saved."""

from __future__ import annotations

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.vocabulary import Token, Worker
from tests.control.hosts import TOKEN, Cluster, W

NEXT = Token(1, 2)


def leave(cluster: Cluster, *workers: Worker, token: Token = TOKEN) -> None:
    for w in workers:
        cluster.take(e.GroupLeft(w, token, e.Left.PARKED, 5))


def kinds(cluster: Cluster) -> list[str]:
    return [type(each).__name__ for each in cluster.effects]


def test_members_on_a_host_that_goes_leave_at_a_boundary_and_are_started_elsewhere() -> None:
    cluster = Cluster()
    cluster.take(e.NodesDraining((("n1", 30.0),)))
    assert [each.reason for each in cluster.effects] == [
        "host host1 is being taken away in 30 s",
        "host host1 is being taken away",
    ]
    assert kinds(cluster) == ["Tell", "ParkGeneration"]
    cluster.effects.clear()

    leave(cluster, *W[:3])

    form, kill, start = cluster.effects
    assert isinstance(form, f.FormGeneration)
    assert form.ranks == (W[0], W[2])
    assert isinstance(kill, f.KillWorker)
    assert kill.worker == W[1]
    assert isinstance(start, f.StartWorker)
    assert start.worker == Worker(1, 1)


def test_a_notice_that_comes_again_is_told_once() -> None:
    cluster = Cluster()
    cluster.take(e.NodesDraining((("n1", 30.0),)))
    cluster.effects.clear()
    cluster.take(e.NodesDraining((("n1", 29.0),)))
    assert cluster.effects == []


def test_where_the_rest_is_too_few_they_train_on() -> None:
    cluster = Cluster(least=3)
    cluster.take(e.NodesDraining((("n1", 0.0),)))
    assert [each.reason for each in cluster.effects] == [
        "host host1 is being taken away",
        "host host1 is being taken away, and the run needs 3 workers: it trains on there",
    ]
    cluster.effects.clear()
    cluster.pass_time(5)
    assert cluster.effects == []


def test_where_all_go_the_state_is_saved() -> None:
    cluster = Cluster()
    cluster.take(e.NodesDraining((("n0", 30.0), ("n1", 30.0), ("n2", 30.0))))
    saves = [each for each in cluster.effects if isinstance(each, f.SaveGeneration)]
    assert [each.workers for each in saves] == [tuple(W[:3])]
    assert "ParkGeneration" not in kinds(cluster)


def test_a_newcomer_on_a_host_that_goes_does_not_join_and_is_moved() -> None:
    cluster = Cluster()
    cluster.take(e.WorkerLost(W[2], "killed"))
    leave(cluster, W[0], W[1])
    cluster.pass_time(0.3)
    for w in (W[0], W[1]):
        cluster.take(e.GenerationJoined(w, NEXT, 5))
    again = Worker(2, 1)
    cluster.where[again] = cluster.where.pop(W[2])
    cluster.take(e.WorkerPlaced(again))
    cluster.beat(again)
    cluster.effects.clear()
    cluster.take(e.NodesDraining((("n2", 30.0),)))
    assert [each.worker for each in cluster.kills] == [again]
    cluster.take(e.WorkerWarm(again, 0, None))  # its word was on the way
    assert "ParkGeneration" not in kinds(cluster)


def test_a_host_that_stays_after_all_is_used_again() -> None:
    cluster = Cluster(least=3)
    cluster.take(e.NodesDraining((("n1", 30.0),)))
    cluster.take(e.NodesDraining(()))
    assert cluster.machine.state.draining == []


def test_when_the_only_worker_with_the_newest_state_goes_it_brings_it_first() -> None:
    cluster = Cluster()
    cluster.take(e.NodesDraining((("n1", 30.0),)))
    cluster.take(e.StepsDone(W[1], TOKEN, 6))
    cluster.take(e.GroupLeft(W[1], TOKEN, e.Left.PARKED, 6))
    cluster.effects.clear()
    leave(cluster, W[0], W[2])
    form = next(each for each in cluster.effects if isinstance(each, f.FormGeneration))
    assert W[1] in form.ranks
