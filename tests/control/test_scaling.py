"""Other numbers of workers while the run goes on."""

from __future__ import annotations

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.vocabulary import Token, Worker
from tests.control.hosts import TOKEN, Cluster, W

SECOND = Token(1, 2)


def scaled(cluster: Cluster, least: int, most: int) -> list[f.Effect]:
    cluster.effects.clear()
    cluster.take(e.ScaleRequested(least, most, "a person"))
    return list(cluster.effects)


def test_more_are_started_at_once_and_join_at_a_boundary() -> None:
    cluster = Cluster(workers=2)
    told, *starts = scaled(cluster, 1, 4)
    assert told.reason == "1 to 4 workers from now on, wanted by a person"
    assert [each.worker for each in starts if isinstance(each, f.StartWorker)] == [W[2], W[3]]
    cluster.take(e.WorkerPlaced(W[2]))
    cluster.effects.clear()
    cluster.take(e.WorkerWarm(W[2], 0, None))
    assert [type(each) for each in cluster.effects] == [f.ParkGeneration]


def test_members_that_are_too_many_leave_at_a_boundary_and_end() -> None:
    cluster = Cluster()
    assert [type(each) for each in scaled(cluster, 1, 2)] == [f.Tell, f.ParkGeneration]
    cluster.effects.clear()
    for w in W[:3]:
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.PARKED, 5))
    form, retire = cluster.effects
    assert isinstance(form, f.FormGeneration)
    assert form.ranks == (W[0], W[1])
    assert isinstance(retire, f.RetireWorker)
    assert retire.worker == W[2]
    for w in W[:2]:
        cluster.take(e.GenerationJoined(w, SECOND, 5))
    cluster.effects.clear()
    cluster.take(e.WorkerLost(W[2], "its process ended"))
    del cluster.where[W[2]]
    cluster.pass_time(60)
    assert cluster.effects == []  # nobody is started in its place


def test_one_that_was_retired_comes_back_as_another_life() -> None:
    cluster = Cluster()
    scaled(cluster, 1, 2)
    for w in W[:3]:
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.PARKED, 5))
    for w in W[:2]:
        cluster.take(e.GenerationJoined(w, SECOND, 5))
    starts = [each.worker for each in scaled(cluster, 1, 3) if isinstance(each, f.StartWorker)]
    assert starts == [Worker(2, 1)]


def test_a_new_minimum_counts_from_the_next_generation_on() -> None:
    cluster = Cluster(workers=2)
    scaled(cluster, 2, 2)
    cluster.effects.clear()
    cluster.take(e.WorkerLost(W[1], "killed"))
    cluster.take(e.GroupLeft(W[0], TOKEN, e.Left.COLLECTIVE_FAILED, 5))
    cluster.where = {W[0]: cluster.where[W[0]]}
    cluster.pass_time(1.0)
    assert not [each for each in cluster.effects if isinstance(each, f.FormGeneration)]
    assert any("1 of at least 2 ready" in each.reason for each in cluster.effects if isinstance(each, f.Tell))


def test_the_same_again_changes_nothing() -> None:
    cluster = Cluster()
    assert scaled(cluster, 1, 3) == []


def test_a_member_without_a_place_stays_while_nobody_can_take_it() -> None:
    cluster = Cluster()
    cluster.take(e.WorkerLost(W[0], "its host is gone"))
    for w in (W[1], W[2]):
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.COLLECTIVE_FAILED, 5))
    del cluster.where[W[0]]
    cluster.pass_time(0.3)
    for w in (W[1], W[2]):
        cluster.take(e.GenerationJoined(w, SECOND, 5))
    scaled(cluster, 2, 2)  # worker 2 has no place, and worker 0 is not there
    cluster.effects.clear()
    cluster.pass_time(5)
    assert cluster.effects == []
    cluster.take(e.WorkerPlaced(Worker(0, 1)))
    cluster.take(e.WorkerWarm(Worker(0, 1), 0, None))
    assert [type(each) for each in cluster.effects] == [f.ParkGeneration]


def test_a_stop_comes_before_any_change_of_numbers() -> None:
    cluster = Cluster()
    cluster.take(e.StopRequested("a person"))
    assert any(isinstance(each, f.StopGeneration) for each in cluster.effects)
    assert not [each for each in scaled(cluster, 1, 1) if isinstance(each, f.ParkGeneration)]


def test_a_schedule_sets_the_size_by_steps_and_a_command_comes_before_it() -> None:
    cluster = Cluster(2, schedule=((0, 2), (50, 3), (80, 1)))
    cluster.take(e.StepsDone(W[0], TOKEN, 50))
    assert cluster.machine.limits.max_workers == 3
    assert [each.worker for each in cluster.effects if isinstance(each, f.StartWorker)] == [W[2]]
    told = [each.reason for each in cluster.effects if isinstance(each, f.Tell)]
    assert told == ["at most 3 workers from step 50 on, by the schedule"]
    cluster.take(e.ScaleRequested(1, 2, "somebody"))
    cluster.take(e.StepsDone(W[0], TOKEN, 90))
    assert cluster.machine.limits.max_workers == 2
