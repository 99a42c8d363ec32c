"""Hosts that are lost, cut off, frozen or cannot reach each other: in namespaces, with real raylets.

Where namespaces are refused raylets on this machine stand in, and tests that need more are skipped and say why.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.rig import Rig, why_not
from tests.cluster.hosts_run import FAULTS, HOSTS, STEP_S, HostsRun
from tests.raylets import Raylets
from tests.rayrun import await_value
from tests.rotation import TODAY, rotating, turn


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    refused = why_not()
    made = Raylets(HOSTS, refused) if refused else Rig(HOSTS)
    try:
        made.start()
        yield made
    finally:
        made.close()


@turn(0, 9)
def test_survivors_of_a_host_that_loses_power_go_on_in_place(train: Callable[..., HostsRun]) -> None:
    run = train()
    run.await_step(20)
    lost = run.hosts()[1]
    before = {host.index: run.worker_on(host) for host in run.hosts() if host is not lost}

    lost.power_off()

    run.await_loss_of(lost)
    run.command.await_line("generation 2: 2 workers from step", 10)
    assert {host.index: run.worker_on(host) for host in run.hosts() if host is not lost} == before
    run.finish()
    assert run.longest_pause() < 3.0  # Ray itself takes longer to notice


@turn(1, 9)
def test_a_host_that_is_cut_off_is_given_up_and_fenced_when_it_is_back(train: Callable[..., HostsRun]) -> None:
    run = train(steps=300)
    run.await_step(20)
    lost = run.hosts()[1]
    fenced = run.worker_on(lost)

    lost.cut()
    run.command.await_line("waited for it in a collective", 10)
    run.command.await_line("generation 2: 2 workers from step", 10)
    assert os.path.exists(f"/proc/{fenced}")  # it hangs in its collective and knows nothing
    lost.heal()

    run.command.await_line("its host is back", 20)
    await_value(lambda: None if os.path.exists(f"/proc/{fenced}") else True, 20, lambda: "it was not ended")
    run.command.await_line("generation 3: 3 workers from step", 60)  # another incarnation of it
    run.finish()
    assert run.longest_pause() < 3.0


@turn(2, 9)
def test_a_blip_is_no_reason_to_give_anybody_up(train: Callable[..., HostsRun]) -> None:
    run = train(steps=300)
    run.await_step(20)
    before = {host.index: run.worker_on(host) for host in run.hosts()}
    for host in run.hosts()[:2]:
        host.blip(0.1)
        time.sleep(1.5)
    assert {host.index: run.worker_on(host) for host in run.hosts()} == before
    assert len(run.finish()["generations"]) == 1


@pytest.mark.parametrize("ways", rotating([1, 2], 1, 3, 9))
def test_hosts_that_cannot_reach_each_other_are_told_and_the_largest_set_goes_on(
    train: Callable[..., HostsRun], ways: int
) -> None:
    run = train(steps=300)
    run.await_step(20)
    before = {host.index: run.worker_on(host) for host in run.hosts()}
    apart = run.hosts()[:2]

    if ways == 2:
        for host in apart:
            host.isolate()
    else:
        apart[0].cut_to(apart[1])

    said = run.command.await_line("cannot reach each other", 15)
    assert all(host.name in said for host in apart)
    run.command.await_line("generation 2: 2 workers from step", 10)
    left = {host.index: run.worker_on(host) for host in run.hosts() if host.pids("ray::WorkerActor")}
    gone = [host for host in apart if left.get(host.index) != before[host.index]]
    assert len(gone) == 1
    assert all(pid == left[index] for index, pid in before.items() if index != gone[0].index)
    run.finish()


@turn(4, 9)
def test_a_host_whose_words_do_not_reach_the_head_is_given_up_though_it_trains(train: Callable[..., HostsRun]) -> None:
    run = train()
    run.await_step(20)
    lost = run.hosts()[2]

    lost.cut_to(run.rig.hosts[0])

    assert lost.name in run.command.await_line("takes no orders", 15)
    run.finish()


@turn(5, 9)
def test_a_host_that_stands_still_is_given_up(train: Callable[..., HostsRun]) -> None:
    run = train()
    run.await_step(20)
    lost = run.hosts()[0]

    lost.freeze()

    assert lost.name in run.command.await_line("has said nothing", 10)
    run.finish()


@turn(6, 9)
def test_a_worker_that_is_stopped_is_given_up_and_replaced(train: Callable[..., HostsRun]) -> None:
    run = train(steps=300)
    run.await_step(20)
    stopped = run.worker_on(run.hosts()[1])

    os.kill(stopped, signal.SIGSTOP)

    run.command.await_line("its process is stopped", 10)
    await_value(lambda: None if os.path.exists(f"/proc/{stopped}") else True, 20, lambda: "it was not ended")
    run.command.await_line("generation 3: 3 workers from step", 60)
    assert run.finish()["survivor_pids_unchanged"]
    assert run.longest_pause() < 3.0


@turn(7, 9)
def test_workers_leave_a_host_that_is_announced_to_go_and_are_started_elsewhere(
    train: Callable[..., HostsRun],
) -> None:
    run = train(steps=400, scaling={"min_workers": 1, "max_workers": 2, "resources_per_worker": {"CPU": 1}})
    run.await_step(20)
    going = run.hosts()[0]

    going.announce_preemption()

    run.command.await_line(f"host {going.name} is being taken away in", 10)
    run.command.await_line("generation 3: 2 workers from step", 60)  # one of them is new
    assert going not in run.hosts()
    run.finish()
    assert "lost while" not in run.command.output
    assert run.longest_pause() < 3.0


@turn(8, 9)
def test_a_host_that_comes_is_taken_in_at_a_step_boundary(train: Callable[..., HostsRun]) -> None:
    run = train(steps=500)
    run.await_step(20)
    new = run.hosts()[1]
    new.power_off()
    run.command.await_line("generation 2: 2 workers from step", 10)

    new.boot()

    run.command.await_line("generation 3: 3 workers from step", 90)
    run.finish()
    assert run.longest_pause() < 3.0


@pytest.mark.parametrize("seed", rotating(range(16), 1, 1, 3))
def test_two_faults_at_random_moments_leave_the_ledger_of_an_undisturbed_run(
    train: Callable[..., HostsRun], seed: int
) -> None:
    """The second one comes within a second of the first: inside the rebuild, a save, or after it."""
    chooser = random.Random(seed)
    run = train(steps=250, checkpoint={"every_steps": 7}, scaling=scaling_of(2 + seed % 3))
    run.await_step(chooser.randint(15, 40))
    hosts = run.hosts()
    # of two hosts one keeps the state
    victims = chooser.sample(hosts, 2) if len(hosts) > 2 else [chooser.choice(hosts)] * 2
    faults = [FAULTS[seed % len(FAULTS)], chooser.choice(FAULTS)]
    for host, fault in zip(victims, faults, strict=True):
        run.strike(host, fault)
        time.sleep(chooser.uniform(0.0, 1.0))

    summary = run.finish(180)

    assert summary["steps"] == 250
    assert len(summary["generations"]) > 1 or set(faults) == {"slow"}


def scaling_of(workers: int) -> dict[str, Any]:
    """So many workers on the hosts; four of them two by two."""
    return {
        "min_workers": 1,
        "max_workers": workers,
        "resources_per_worker": {"CPU": 0.5 if workers > HOSTS else 1},
    }


COLLECT_S = 0.6  # long enough to strike in


@pytest.mark.parametrize(
    ("fault", "workers", "phase"),
    rotating(
        [(fault, workers, phase) for phase in ("save", "state") for workers in (2, 3, 4) for fault in FAULTS],
        1,
        0,
        3,
    ),
)
def test_a_fault_inside_a_save_or_a_rebuild_leaves_the_ledger_of_an_undisturbed_run(
    train: Callable[..., HostsRun], tmp_path: Path, fault: str, workers: int, phase: str
) -> None:
    """In a save: while its state is copied, or written. In a rebuild: while a newcomer is given the state."""
    chooser = random.Random(TODAY)
    told = tmp_path / "told"
    told.touch()
    run = train(
        steps=400,
        task="tests.tasks:SlowToCollectTask",
        task_args={"told": str(told), "seconds": COLLECT_S, "delay_s": STEP_S},
        scaling=scaling_of(workers),
        checkpoint={"every_steps": 100} if phase == "save" else {},
    )
    run.await_step(10)
    before = told.stat().st_size
    victims = run.hosts()
    workers_before = {pid for host in victims for pid in host.pids("ray::WorkerActor")}
    if phase == "state":
        os.kill(chooser.choice(sorted(workers_before)), signal.SIGKILL)
    await_value(lambda: True if f" {phase}\n" in told.read_text()[before:] else None, 60.0, lambda: run.command.output)
    if phase == "state" and len(victims) == 2:  # nobody else has the state of the other one
        victims = [h for h in run.hosts() if not workers_before.intersection(h.pids("ray::WorkerActor"))] or victims[:1]
    time.sleep(chooser.uniform(0.0, COLLECT_S / 2))
    run.strike(chooser.choice(victims), fault)

    summary = run.finish(180)

    assert summary["steps"] == 400
    # a generation that was struck before it had formed is not among the listed ones, but has its number
    assert summary["generations"][-1]["generation"] > (1 if phase == "save" else 3) or fault == "slow"
