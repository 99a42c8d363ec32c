"""Hosts that are lost, cut off, frozen or cannot reach each other: real ones, in namespaces, with real raylets."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.object_store import ObjectStore
from jobs.rig import Host, Rig, why_not
from tests.rayrun import CommandRun, await_value, job_config
from tests.rotation import rotating, turn

HOSTS = 3
STEP_S = 0.01  # of each micro-batch; some 50 ms a step


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if problem := why_not():
        pytest.skip(problem)
    made = Rig(HOSTS)
    try:
        made.start()
        yield made
    finally:
        made.close()


class HostsRun:
    """A run whose workers are on the rig's hosts."""

    def __init__(self, rig: Rig, command: CommandRun, folder: Path) -> None:
        self.rig = rig
        self.command = command
        self.folder = folder

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of done steps, by the time at which they were done."""
        store = ObjectStore(str(self.folder))
        lines = [line for line in read_stream(store.names("metrics"), store.read) if "step" in line]
        return sorted(lines, key=lambda line: line["done_at"])

    def await_step(self, step: int, within_s: float = 60.0) -> None:
        """Until the driver has shown that many done steps."""

        def look() -> bool | None:
            assert self.command.process.poll() is None, self.command.output
            return True if self.steps_done() >= step else None

        await_value(look, within_s, lambda: f"no step {step}:\n{self.command.output}\n{self.rig.logs()}")

    def steps_done(self) -> int:
        """As `elastic-trainer status` would say."""
        if not (self.folder / "metrics").exists():
            return 0
        return max((line["step"] + 1 for line in self.metrics()), default=0)

    def worker_on(self, host: Host) -> int:
        """The process of the worker there."""
        (pid,) = host.pids("ray::WorkerActor")
        return pid

    def hosts(self) -> list[Host]:
        """Those that have a worker."""
        return [host for host in self.rig.hosts if host.pids("ray::WorkerActor")]

    def finish(self, within_s: float = 120.0) -> dict[str, Any]:
        """The summary of the run that has done all its steps, with nothing lost, repeated or done again."""
        status = self.command.end(within_s)
        assert status == 0, self.command.output
        summary = self.command.summary()
        assert summary["status"] == "finished", summary
        assert summary["steps_redone"] == 0, self.command.output
        return summary

    def longest_pause(self) -> float:
        """Seconds between two done steps that follow each other."""
        times = [line["done_at"] for line in self.metrics()]
        return max(later - earlier for earlier, later in pairwise(times))


@pytest.fixture
def train(rig: Rig, tmp_path: Path, dataset: str, held_out: str) -> Iterator[Callable[..., HostsRun]]:
    rig.mend()
    runs: list[CommandRun] = []

    def begin(**fields: Any) -> HostsRun:
        scaling = {"min_workers": 1, "max_workers": HOSTS, "resources_per_worker": {"CPU": 1}}
        values: dict[str, Any] = {"scaling": scaling, "steps": 150, "task_args": {"delay_s": STEP_S, "evaluate": False}}
        values["data"] = {"train": dataset}
        values["name"] = name = f"job{uuid.uuid4().hex[:6]}"  # a run of a test that failed may live on in the cluster
        config = job_config(tmp_path, dataset, None, **{**values, **fields})
        runs.append(CommandRun(tmp_path, config, "--address", rig.address, inside=rig.hosts[0].inside))
        return HostsRun(rig, runs[-1], tmp_path / "runs" / name)

    yield begin
    for run in runs:
        try:
            if run.process.poll() != 0:
                rig.end_actors()
        finally:
            run.clean_up()


@turn(0, 9)
def test_survivors_of_a_host_that_loses_power_go_on_in_place(train: Callable[..., HostsRun]) -> None:
    run = train()
    run.await_step(20)
    lost = run.hosts()[1]
    before = {host.name: run.worker_on(host) for host in run.hosts() if host is not lost}

    lost.power_off()

    assert lost.name in run.command.await_line("has said nothing", 10)
    run.await_step(60)
    assert {host.name: run.worker_on(host) for host in run.hosts() if host is not lost} == before
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
    run.await_step(60)
    assert os.path.exists(f"/proc/{fenced}")  # it hangs in its collective and knows nothing
    lost.heal()

    run.command.await_line("its host is back", 20)
    await_value(lambda: None if os.path.exists(f"/proc/{fenced}") else True, 20, lambda: "it was not ended")
    run.finish()
    assert run.longest_pause() < 3.0


@turn(2, 9)
def test_a_blip_is_no_reason_to_give_anybody_up(train: Callable[..., HostsRun]) -> None:
    run = train()
    run.await_step(20)
    before = {host.name: run.worker_on(host) for host in run.hosts()}
    for host in run.hosts()[:2]:
        host.blip(0.1)
        time.sleep(1.5)
    assert {host.name: run.worker_on(host) for host in run.hosts()} == before
    assert len(run.finish()["generations"]) == 1


@turn(3, 9)
def test_hosts_that_cannot_reach_each_other_are_told_and_the_largest_set_goes_on(
    train: Callable[..., HostsRun],
) -> None:
    run = train()
    run.await_step(20)
    apart = run.hosts()[:2]

    for host in apart:
        host.isolate()

    said = run.command.await_line("cannot reach each other", 15)
    assert all(host.name in said for host in apart)
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
    run.command.await_line("3 workers from step", 60)
    run.finish()
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
    run.await_step(60)
    assert len(run.hosts()) == HOSTS - 1

    new.boot()

    run.command.await_line("3 workers from step", 90)
    run.finish()
    assert run.longest_pause() < 3.0


FAULTS = ("power_off", "cut", "freeze", "cut_to_head", "slow", "stop_worker", "announce_preemption")


@turn(1, 2)
@pytest.mark.parametrize("seed", rotating(range(14), 1))
def test_two_faults_at_random_moments_leave_the_ledger_of_an_undisturbed_run(
    train: Callable[..., HostsRun], seed: int
) -> None:
    """The second one comes within a second of the first: inside the rebuild, a save, or after it."""
    chooser = random.Random(seed)
    run = train(steps=200, checkpoint={"every_steps": 7})
    run.await_step(chooser.randint(15, 40))
    victims = chooser.sample(run.hosts(), 2)
    faults = [FAULTS[seed % len(FAULTS)], chooser.choice(FAULTS)]
    for host, fault in zip(victims, faults, strict=True):
        if fault == "cut_to_head":
            host.cut_to(run.rig.hosts[0])
        elif fault == "slow":
            host.slow("100mbit")
        elif fault == "stop_worker":
            for pid in host.pids("ray::WorkerActor"):
                os.kill(pid, signal.SIGSTOP)
        else:
            getattr(host, fault)()
        time.sleep(chooser.uniform(0.0, 1.0))

    summary = run.finish(180)

    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    assert summary["steps"] == 200
