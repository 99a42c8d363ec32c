"""Who is given up, on which evidence and when; and who is not."""

from __future__ import annotations

import pytest

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control import suspicion
from elastic_trainer.vocabulary import Token, Worker
from tests.control.hosts import TOKEN, Cluster, W


def test_nothing_is_suspicious_about_a_group_that_goes_on() -> None:
    cluster = Cluster()
    cluster.pass_time(60)
    assert cluster.effects == []


def test_a_silent_host_that_is_waited_for_is_given_up_within_a_second() -> None:
    cluster = Cluster()
    cluster.silent.add(W[2])
    cluster.moving.discard(W[2])
    cluster.waits(W[0], W[1])
    after, killed, why = cluster.until_given_up(5)
    assert after <= 1.2
    assert killed == [W[2]]
    assert why == (
        "w2.0 lost while training: host host2 has said nothing for 0.9 s while 2 others waited for it in a collective "
        "of step 5"
    )


def test_a_silent_host_whose_workers_go_on_training_is_given_up_a_little_later() -> None:
    cluster = Cluster()
    cluster.silent.add(W[2])  # a one-way cut: the group trains on
    after, killed, why = cluster.until_given_up(5)
    assert 2.0 <= after <= 2.5
    assert killed == [W[2]]
    assert "takes no orders" in why


def test_after_a_failed_collective_the_host_that_says_nothing_is_given_up() -> None:
    cluster = Cluster()
    cluster.silent.add(W[1])
    cluster.pass_time(0.2)
    for w in (W[0], W[2]):
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.COLLECTIVE_FAILED, 5, "connection reset"))
    cluster.effects.clear()
    cluster.pass_time(1.0)
    assert [each.worker for each in cluster.kills] == [W[1]]
    formed = next(each for each in cluster.effects if isinstance(each, f.FormGeneration))
    assert formed.ranks == (W[0], W[2])


def test_a_new_store_is_started_when_its_host_is_given_up() -> None:
    cluster = Cluster()
    cluster.take(e.StoreReady("10.0.0.2", 4001))
    cluster.silent.add(W[2])
    cluster.waits(W[0], W[1])
    cluster.until_given_up(5)
    assert any(isinstance(each, f.StartStore) for each in cluster.effects)
    assert cluster.machine.state.store is None


def test_who_was_given_up_is_fenced_when_its_host_is_back() -> None:
    cluster = Cluster()
    cluster.silent.add(W[2])
    cluster.waits(W[0], W[1])
    cluster.until_given_up(5)
    cluster.effects.clear()
    cluster.silent.clear()
    cluster.pass_time(0.5)
    fences = [each for each in cluster.kills if "its host is back" in each.reason]
    assert [each.worker for each in fences] == [W[2]]


def test_a_stopped_process_is_given_up_within_a_second_and_a_short_stop_is_not() -> None:
    cluster = Cluster()
    cluster.stopped.add(W[1])
    cluster.pass_time(0.3)
    cluster.stopped.clear()
    cluster.pass_time(5)
    assert cluster.effects == []
    cluster.stopped.add(W[1])
    after, killed, why = cluster.until_given_up(5)
    assert after <= 1.0
    assert killed == [W[1]]
    assert "its process is stopped" in why


@pytest.mark.parametrize(
    ("phase", "longest_s", "busy", "budget_s"),
    [
        (e.TaskPhase.LOSS, 0.05, False, 2.0),
        (e.TaskPhase.LOSS, 1.0, False, 8.0),
        (e.TaskPhase.LOSS, 0.05, True, 30.0),
        (e.TaskPhase.LOSS, 1.0, True, 120.0),
        (e.TaskPhase.DATA, 0.01, False, 30.0),
        (e.TaskPhase.EVALUATE, 1.0, False, 30.0),
        (e.TaskPhase.EVALUATE, 10.0, False, 80.0),
    ],
)
def test_who_stands_still_is_given_up_after_its_budget(
    phase: e.TaskPhase, longest_s: float, busy: bool, budget_s: float
) -> None:
    cluster = Cluster()
    cluster.enter(W[0], phase, longest_s=longest_s)
    cluster.moving.discard(W[0])
    cluster.waits(W[1], W[2])
    if busy:
        cluster.busy.add(W[0])
    after, killed, why = cluster.until_given_up(budget_s + 5)
    assert budget_s <= after <= budget_s + 0.5
    assert killed == [W[0]]
    assert f"in phase {phase.value!r} of step 5" in why
    assert cluster.kills[0].is_hung
    told = [each.reason for each in cluster.effects if isinstance(each, f.Tell)]
    assert any("w1.0 in phase 'reduce'" in text and "w2.0 in phase 'reduce'" in text for text in told)


def test_the_budget_can_be_one_number() -> None:
    cluster = Cluster(stall_s=4.0)
    cluster.moving.discard(W[0])
    cluster.waits(W[1], W[2])
    after, _, _ = cluster.until_given_up(10)
    assert 4.0 <= after <= 4.5


@pytest.mark.parametrize("phase", [e.TaskPhase.LOSS, e.TaskPhase.EVALUATE, e.TaskPhase.APPLY])
def test_the_first_times_of_a_phase_may_take_minutes(phase: e.TaskPhase) -> None:
    cluster = Cluster()
    cluster.enter(W[0], phase, stays=1)
    cluster.moving.discard(W[0])
    cluster.waits(W[1], W[2])
    cluster.pass_time(250)
    assert cluster.kills == []


@pytest.mark.parametrize("phase", [e.TaskPhase.UPLOAD, e.TaskPhase.BUILD, e.TaskPhase.STATE, e.TaskPhase.END])
def test_where_other_bounds_hold_nobody_is_judged(phase: e.TaskPhase) -> None:
    cluster = Cluster()
    cluster.enter(W[0], phase)
    cluster.moving.discard(W[0])
    cluster.waits(W[1], W[2])
    cluster.pass_time(200)
    assert cluster.kills == []


def test_a_garbage_collection_of_twenty_seconds_is_no_hang() -> None:
    cluster = Cluster()
    cluster.moving.discard(W[0])
    cluster.busy.add(W[0])
    cluster.waits(W[1], W[2])
    cluster.pass_time(20)
    cluster.moving.add(W[0])
    cluster.pass_time(5)
    assert cluster.effects == []


@pytest.mark.parametrize(("ago_s", "budget_s"), [(10.0, 8.0), (700.0, 2.0)])
def test_kills_on_suspicion_come_more_and_more_slowly(ago_s: float, budget_s: float) -> None:
    """Steps that are done in between change nothing: a budget that is too short would kill for ever."""
    cluster = Cluster()
    cluster.machine.state.hung_at = [cluster.now - ago_s] * 2
    cluster.take(e.StepsDone(W[1], TOKEN, 6))
    cluster.moving.discard(W[0])
    cluster.waits(W[1], W[2])
    after, _, _ = cluster.until_given_up(20)
    assert budget_s <= after <= budget_s + 0.5
    assert cluster.machine.state.suspected == 1


@pytest.mark.parametrize(("stall_s", "busy_s", "fence_s"), [(None, 300, 60), (4.0, 300, 60), (100.0, 1500, 200)])
def test_the_other_bounds_follow_from_the_stall_budget(stall_s: float | None, busy_s: float, fence_s: float) -> None:
    assert suspicion.longest_busy_s(stall_s) == busy_s
    assert suspicion.fence_after_s(stall_s) == fence_s


def test_a_judge_that_was_held_up_blames_nobody() -> None:
    cluster = Cluster()
    cluster.waits(W[0], W[1])
    cluster.now += 5.0  # nothing was heard of anybody, because the judge itself stood still
    cluster.take(e.HeldUp(5.0 - suspicion.SILENT_S))
    cluster.take(e.TimePassed())
    assert cluster.kills == []


def test_members_that_all_wait_are_asked_who_can_reach_whom() -> None:
    cluster = Cluster()
    cluster.unreachable = None
    cluster.waits(*W[:3])
    cluster.pass_time(1.5)
    asked = [each for each in cluster.effects if isinstance(each, f.ProbeHosts)]
    assert [each.nodes for each in asked] == [("n0", "n1", "n2")]
    cluster.take(e.HostsProbed(("n0", "n1", "n2"), (("n0", "n2"),)))
    assert [each.worker for each in cluster.kills] == [W[2]]
    abort = next(each for each in cluster.effects if isinstance(each, f.AbortGeneration))
    assert abort.reason == "w2.0 lost while training: host0 (10.0.0.0) and host2 (10.0.0.2) cannot reach each other"


def test_of_a_newcomer_and_the_one_that_has_the_state_the_newcomer_goes() -> None:
    cluster = Cluster(workers=2)
    cluster.silent.add(W[0])
    cluster.waits(W[1])
    cluster.until_given_up(5)
    cluster.silent.clear()
    cluster.take(e.GroupLeft(W[1], TOKEN, e.Left.ORDERED, 5))
    cluster.moving.clear()
    cluster.pass_time(0.3)
    cluster.take(e.GenerationJoined(W[1], Token(1, 2), 5))
    cluster.moving.add(W[1])
    again = Worker(0, 1)
    cluster.where[again] = cluster.where.pop(W[0])
    cluster.take(e.WorkerPlaced(again))
    cluster.beat(again)
    cluster.take(e.WorkerWarm(again, 0, None))
    cluster.pass_time(0.3)
    cluster.take(e.GroupLeft(W[1], Token(1, 2), e.Left.ORDERED, 6))
    cluster.pass_time(0.3)
    assert [each.ranks for each in cluster.effects if isinstance(each, f.FormGeneration)][-1] == (W[1], again)
    cluster.effects.clear()

    cluster.unreachable = (("n0", "n1"),)
    cluster.moving.clear()
    for w in (again, W[1]):
        cluster.enter(w, e.TaskPhase.STATE)
    _, killed, _ = cluster.until_given_up(5)

    assert killed == [again]


def test_a_long_exchange_between_hosts_that_reach_each_other_is_let_go_on() -> None:
    cluster = Cluster()
    for w in W[:3]:
        cluster.enter(w, e.TaskPhase.REDUCE, stays=2)
    cluster.moving.clear()
    cluster.pass_time(30)
    assert not [each for each in cluster.effects if isinstance(each, f.AbortGeneration)]


def test_an_exchange_that_hangs_between_hosts_that_reach_each_other_is_tried_again() -> None:
    cluster = Cluster()
    for w in W[:3]:
        cluster.enter(w, e.TaskPhase.REDUCE, stays=50, longest_s=0.1)
    cluster.moving.clear()
    cluster.pass_time(4.5)
    assert [type(each) for each in cluster.effects if not isinstance(each, f.ProbeHosts)] == [f.AbortGeneration]
    assert cluster.kills == []


def test_one_that_works_while_the_others_wait_is_no_case_for_a_probe() -> None:
    cluster = Cluster()
    cluster.waits(W[1], W[2])
    cluster.pass_time(30)
    assert cluster.effects == []


def test_whose_hosts_cannot_reach_each_other_are_not_taken_together_until_they_can() -> None:
    cluster = Cluster()
    cluster.unreachable = (("n0", "n2"),)
    cluster.waits(*W[:3])
    cluster.until_given_up(5)
    for w in (W[0], W[1]):
        cluster.take(e.GroupLeft(w, TOKEN, e.Left.ORDERED, 5))
    cluster.pass_time(0.3)
    second = Token(1, 2)
    formed = [each for each in cluster.effects if isinstance(each, f.FormGeneration)]
    assert [each.ranks for each in formed] == [(W[0], W[1])]
    for w in (W[0], W[1]):
        cluster.take(e.GenerationJoined(w, second, 5))
    cluster.moving |= {W[0], W[1]}
    again = Worker(2, 1)
    cluster.where[again] = cluster.where.pop(W[2])
    cluster.take(e.WorkerPlaced(again))
    cluster.beat(again)
    cluster.take(e.WorkerWarm(again, 0, None))
    cluster.effects.clear()

    cluster.pass_time(5)
    assert not [each for each in cluster.effects if isinstance(each, f.ParkGeneration)]

    cluster.unreachable = ()
    cluster.pass_time(suspicion.AGAIN_S)
    assert [each.reason for each in cluster.effects if isinstance(each, f.ParkGeneration)] == ["w2.1 joins"]


def test_a_host_that_is_new_is_tried_before_its_workers_join() -> None:
    cluster = Cluster()
    state = cluster.machine.state
    state.reached = ["n0", "n1"]
    cluster.effects.clear()
    cluster.pass_time(0.3)
    assert [each.nodes for each in cluster.effects if isinstance(each, f.ProbeHosts)] == [("n0", "n1", "n2")]
    assert state.reached == ["n0", "n1", "n2"]


@pytest.mark.parametrize("last_told", [e.TaskPhase.REDUCE, e.TaskPhase.APPLY, e.TaskPhase.LOSS])
def test_one_that_tells_nothing_any_more_is_not_taken_to_be_where_it_was(last_told: e.TaskPhase) -> None:
    cluster = Cluster()
    cluster.enter(W[1], last_told)
    cluster.mute.add(W[1])  # something holds its interpreter
    cluster.waits(W[0], W[2])
    cluster.moving.discard(W[1])
    after, killed, why = cluster.until_given_up(5)
    assert 2.0 <= after <= 2.5
    assert killed == [W[1]]
    assert f"after phase {last_told.value!r}" in why


def test_one_that_does_not_leave_a_broken_group_is_judged_too() -> None:
    cluster = Cluster()
    cluster.moving.clear()
    cluster.take(e.GroupLeft(W[0], TOKEN, e.Left.COLLECTIVE_FAILED, 5, "connection reset"))
    cluster.take(e.GroupLeft(W[2], TOKEN, e.Left.ORDERED, 5))
    cluster.effects.clear()
    cluster.pass_time(3.0)
    assert [each.worker for each in cluster.kills] == [W[1]]


def test_where_no_host_is_heard_nobody_is_given_up() -> None:
    cluster = Cluster()
    cluster.silent = set(W[:3])  # the controller's own cable
    cluster.pass_time(30)
    assert [each.reason for each in cluster.effects] == [
        "no host is heard any more: the controller itself may be cut off"
    ]
    cluster.silent.clear()
    cluster.pass_time(5)
    assert cluster.kills == []
    cluster.silent = {W[0]}
    cluster.waits(W[1], W[2])
    assert cluster.until_given_up(5)[1] == [W[0]]


def test_state_that_takes_minutes_to_arrive_is_let_go_on() -> None:
    cluster = Cluster()
    for w in W[:3]:
        cluster.enter(w, e.TaskPhase.STATE, stays=0)
    cluster.moving.clear()
    cluster.pass_time(700)
    assert not [each for each in cluster.effects if isinstance(each, f.AbortGeneration)]


def test_one_that_waits_well_and_is_mute_for_a_moment_is_not_judged_by_its_waiting() -> None:
    cluster = Cluster()
    cluster.waits(W[0], W[2])  # for a slow one, which goes on
    cluster.pass_time(20)
    cluster.mute.add(W[0])
    cluster.told_s = 1.2
    cluster.pass_time(0.3)
    cluster.mute.clear()
    cluster.pass_time(5)
    assert cluster.kills == []
