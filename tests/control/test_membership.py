"""What was reported of other systems' memberships, as histories of the control machine: one plan, and nobody hangs."""

from __future__ import annotations

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits, Phase
from elastic_trainer.vocabulary import Stage, Token, Worker
from tests.control.hosts import TOKEN, Cluster, W

NEXT = Token(1, 2)


def forms(cluster: Cluster) -> list[f.FormGeneration]:
    return [each for each in cluster.effects if isinstance(each, f.FormGeneration)]


def leave(cluster: Cluster, *workers: Worker, cause: e.Left = e.Left.PARKED, token: Token = TOKEN) -> None:
    for w in workers:
        cluster.take(e.GroupLeft(w, token, cause, 5))


def test_one_whose_host_goes_while_a_generation_is_formed_leaves_it_at_a_boundary() -> None:
    """As in pytorch#123678: a graceful departure in the middle of a rendezvous."""
    cluster = Cluster(4)
    cluster.take(e.WorkerLost(W[3], "killed"))
    leave(cluster, *W[:3], cause=e.Left.COLLECTIVE_FAILED)
    cluster.pass_time(0.3)
    assert [each.token for each in forms(cluster)] == [NEXT]
    for w in W[:3]:
        cluster.take(e.GroupFormed(w, NEXT))

    cluster.take(e.NodesDraining((("n1", 30.0),)))  # nobody has joined yet
    assert len(forms(cluster)) == 1
    for w in W[:3]:
        cluster.take(e.GenerationJoined(w, NEXT, 5))
    cluster.pass_time(0.3)
    leave(cluster, *W[:3], token=NEXT)

    assert [each.ranks for each in forms(cluster)] == [(W[0], W[1], W[2]), (W[0], W[2])]


def test_reports_of_one_failure_that_come_over_half_a_minute_make_one_plan() -> None:
    """As in kubeflow trainer#2000: eight members, one after the other."""
    cluster = Cluster(8)
    cluster.take(e.WorkerLost(W[0], "killed"))
    for w in W[1:]:
        cluster.now += 4.0  # nobody beats meanwhile: the judge is not at issue
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.COLLECTIVE_FAILED, 5))
    cluster.pass_time(0.3)

    assert [each.ranks for each in forms(cluster)] == [tuple(W[1:])]
    aborts = [each for each in cluster.effects if isinstance(each, f.AbortGeneration)]
    assert len(aborts) == 1
    starts = [each for each in cluster.effects if isinstance(each, f.StartWorker)]
    assert [each.worker for each in starts] == [Worker(0, 1)]


def test_one_that_wakes_two_generations_later_is_not_heard() -> None:
    """As in NVIDIA's resiliency extension, 8efe781: what it says belongs to a group that is long gone."""
    cluster = Cluster(3)
    cluster.take(e.WorkerLost(W[2], "killed"))
    leave(cluster, *W[:2], cause=e.Left.COLLECTIVE_FAILED)
    cluster.pass_time(0.3)
    for w in W[:2]:
        cluster.take(e.GenerationJoined(w, NEXT, 5))
    cluster.take(e.WorkerPlaced(Worker(2, 1)))
    cluster.take(e.WorkerWarm(Worker(2, 1), 0, None))
    cluster.pass_time(0.3)
    leave(cluster, *W[:2], token=NEXT)
    cluster.pass_time(0.3)
    assert len(forms(cluster)) == 2
    before = cluster.machine.snapshot()

    cluster.take(e.GroupFormed(W[2], TOKEN))
    cluster.take(e.GenerationJoined(W[2], TOKEN, 9))
    cluster.take(e.StepsDone(W[2], TOKEN, 9))
    cluster.take(e.GroupLeft(W[2], TOKEN, e.Left.PARKED, 9))

    assert cluster.machine.snapshot() == before


def test_more_workers_than_are_wanted_wait_as_spares() -> None:
    """As in NVIDIA's resiliency extension, f59cfc6: a later term that wants fewer finds three too many."""
    machine = Machine(Limits(1, 2, place_s=30.0, form_s=20.0, leave_s=300.0, spares=3), term=2)
    found = tuple(e.FoundWorker(w, Stage.WARM, 0, 5) for w in W[:5])
    effects = machine.handle(e.RunBegan(generation=3, found=found, has_store=True), 100.0)
    effects += machine.handle(e.StoreReady("10.0.0.9", 4000), 100.1)
    effects += machine.handle(e.TimePassed(), 101.0)

    (form,) = [each for each in effects if isinstance(each, f.FormGeneration)]
    assert form.ranks == (W[0], W[1])
    assert not [each for each in effects if isinstance(each, f.KillWorker | f.RetireWorker)]
    assert {each.stage for each in machine.state.workers.values()} == {Stage.JOINING, Stage.WARM}


def test_below_the_minimum_a_planned_leave_waits_like_a_fault_and_a_new_node_ends_both() -> None:
    """As in Horovod#3494: removal and failure take one path."""
    for event in (e.WorkerLost(W[2], "killed"), e.WorkerLost(W[2], "its host is gone")):
        cluster = Cluster(3, least=3)
        cluster.take(event)
        leave(cluster, *W[:2], cause=e.Left.COLLECTIVE_FAILED)
        cluster.pass_time(1.0)
        assert cluster.machine.state.phase is Phase.WAITING
        assert forms(cluster) == []
        cluster.take(e.WorkerPlaced(Worker(2, 1)))
        cluster.take(e.WorkerWarm(Worker(2, 1), 0, None))
        cluster.pass_time(0.3)
        assert [each.ranks for each in forms(cluster)] == [(W[0], W[1], Worker(2, 1))]


def test_one_that_dies_before_it_joins_holds_nobody_up() -> None:
    """As in DLRover#1385: the others are forming already."""
    cluster = Cluster(3)
    cluster.take(e.WorkerLost(W[2], "killed"))
    leave(cluster, *W[:2], cause=e.Left.COLLECTIVE_FAILED)
    cluster.pass_time(0.3)
    cluster.take(e.GroupFormed(W[0], NEXT))
    cluster.take(e.WorkerLost(W[1], "killed"))
    cluster.pass_time(0.1)
    aborts = [each for each in cluster.effects if isinstance(each, f.AbortGeneration) and each.token == NEXT]
    assert [W[0] in each.workers for each in aborts] == [True]
    leave(cluster, W[0], cause=e.Left.ORDERED, token=NEXT)
    cluster.pass_time(0.3)
    assert forms(cluster)[-1].ranks == (W[0],)


def test_a_loss_in_a_long_step_is_acted_on_at_once() -> None:
    """As in skypilot#825: the others are in a step of half a minute."""
    cluster = Cluster(3)
    cluster.moving.clear()
    cluster.pass_time(1.0)
    assert cluster.effects == []
    cluster.take(e.WorkerLost(W[2], "killed"))
    assert [type(each) for each in cluster.effects if isinstance(each, f.AbortGeneration)] == [f.AbortGeneration]
