"""The head of the Ray cluster is lost: it comes back with its state, or the run goes on in another cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.rig import Rig, why_not
from tests.rayrun import CommandRun, await_value, job_config
from tests.rotation import turn

HOSTS = 2


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    if problem := why_not():
        pytest.skip(problem)
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(HOSTS, **options))
        made[-1].start()
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def train(tmp_path: Path, dataset: str) -> Iterator[Callable[..., CommandRun]]:
    runs: list[CommandRun] = []

    def begin(rig: Rig, **fields: Any) -> CommandRun:
        scaling = {"max_workers": HOSTS, "resources_per_worker": {"CPU": 1}}
        values = {"data": {"train": dataset}, "scaling": scaling, "task_args": {"delay_s": 0.01, "evaluate": False}}
        config = job_config(tmp_path, dataset, None, **{**values, **fields})
        # its driver is not on the head: it would be lost with it
        runs.append(CommandRun(tmp_path, config, "--address", rig.address, inside=rig.hosts[1].inside))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@turn(2, 8)
def test_training_goes_on_while_a_head_that_keeps_its_state_is_away(
    make_rig: Callable[..., Rig], train: Callable[..., CommandRun]
) -> None:
    rig = make_rig(remembers=True)
    run = train(rig, steps=500)
    run.await_line("2 workers from step 0", 60)
    run.await_line("running", 30)
    before = [host.pids("ray::WorkerActor") for host in rig.hosts[1:]]

    rig.hosts[0].power_off()
    run.await_line("the run's controller died; training goes on", 30)
    rig.hosts[0].boot()

    run.await_line("term 2 takes over", 60)
    assert [host.pids("ray::WorkerActor") for host in rig.hosts[1:]] == before
    assert run.end(120) == 0, run.output
    summary = run.summary()
    assert summary["status"] == "finished"
    assert (summary["samples_missing"], summary["samples_repeated"], summary["steps_redone"]) == (0, 0, 0)


@turn(6, 8)
def test_without_it_the_run_resumes_by_name_in_the_next_cluster(
    make_rig: Callable[..., Rig], train: Callable[..., CommandRun]
) -> None:
    rig = make_rig()
    run = train(rig, steps=400, checkpoint={"every_steps": 20})
    run.await_line("workers  saved", 60)

    rig.hosts[0].power_off()  # and with it the cluster: the other hosts are used again
    for host in rig.hosts[1:]:
        host.power_off()
    await_value(lambda: run.process.poll(), 60, lambda: run.output)
    rig.start()

    again = train(rig, steps=400, checkpoint={"every_steps": 20})
    again.await_line("from step", 60)
    assert again.end(120) == 0, again.output
    summary = again.summary()
    assert summary["status"] == "finished"
    assert summary["generations"][-1]["resume_step"] >= 20
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
