"""Whole runs on a real cluster of three raylets: kills, bad tasks, and what is left in Ray afterwards."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_trainer import ClusterError, JobConfig, LocalCluster, ResourcesError, RunFailed
from elastic_trainer.data.dataset import read_index
from elastic_trainer.observability.standing import Standing
from elastic_trainer.resolve import resolve
from tests.cluster.fits import STEPS, Fit, KillAt, ledger
from tests.rayrun import job_config
from tests.rotation import rotating, turn
from tests.tasks import (
    NetTask,
    PoisonedTask,
    RaisingTask,
    ShapelessLossTask,
    UnluckyTask,
    UnreachableLossTask,
    WrongColumnTask,
)

SLOW = functools.partial(NetTask, delay_s=0.005)


@pytest.fixture(scope="module")
def undisturbed(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory, dataset: str, held_out: str
) -> dict[int, tuple[int, str]]:
    return ledger(Fit(cluster, tmp_path_factory.mktemp("reference"), dataset, held_out)(NetTask(), name="reference"))


@turn(0, 6)
def test_steps_that_are_not_finite_are_left_out_and_three_in_a_row_sent_the_run_back_once(
    fit: Fit, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JobConfig(**job_config(tmp_path, dataset, None, task=None, task_args={}, steps=40))
    order = resolve(config, read_index(dataset), None, fits=3, fixed_shapes=False).settings.plan.order
    bad = [int(order.ids(step, 0)[0]) for step in (20, 31, 32, 33)]

    result = fit(PoisonedTask(bad, delay_s=0.01), steps=40, checkpoint={"every_steps": 10})

    summary, out = result.summary, capsys.readouterr().out
    assert summary["status"] == "finished"
    assert set(summary["skipped_steps"]) >= {20, 31, 32, 33}
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    assert [generation["resume_step"] for generation in summary["generations"]] == [0, 30]
    assert "step 20 updates nothing: the loss is not a finite number; it had samples" in out
    assert "not finite in steps 31, 32, 33: back to step 30, to leave them out on the way" in out
    assert "step 31 updates nothing: the run went back to leave it out" in out


def check_kills(fit: Fit, undisturbed: dict[int, tuple[int, str]], kills: list[tuple[int, tuple[int, ...]]]) -> None:
    killer = KillAt(kills)

    result = fit(SLOW(), killer)

    summary = result.summary
    assert len(killer.killed) >= 1, "nobody was killed"
    assert summary["status"] == "finished"
    assert summary["survivor_pids_unchanged"]
    assert (summary["samples_missing"], summary["samples_repeated"], summary["steps_redone"]) == (0, 0, 0)
    assert ledger(result) == undisturbed
    assert len(summary["recovery_s"]) >= 1


def random_kills(seed: int, count: int) -> list[tuple[int, tuple[int, ...]]]:
    chooser = random.Random(seed)
    steps = sorted(chooser.sample(range(2, STEPS // 2), count))
    return [(step, tuple(chooser.sample(range(3), chooser.choice([1, 1, 2])))) for step in steps]


@turn(0, 2)
def test_kills_at_random_moments_leave_the_ledger_of_an_undisturbed_run(
    fit: Fit, undisturbed: dict[int, tuple[int, str]], seed_of_the_day: int
) -> None:
    check_kills(fit, undisturbed, random_kills(seed_of_the_day, 1))


@turn(1, 6)
def test_two_of_three_killed_at_once_leave_one_that_goes_on(fit: Fit, undisturbed: dict[int, tuple[int, str]]) -> None:
    check_kills(fit, undisturbed, [(20, (0, 1))])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_ten_random_campaigns(fit: Fit, undisturbed: dict[int, tuple[int, str]], seed: int) -> None:
    check_kills(fit, undisturbed, random_kills(seed, 2))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_killed(fit: Fit, undisturbed: dict[int, tuple[int, str]], rank: int) -> None:
    check_kills(fit, undisturbed, [(30, (rank,))])


@turn(2, 6)
def test_a_replacement_is_back_before_the_end(fit: Fit) -> None:
    result = fit(SLOW(), KillAt([(20, (1,))]), steps=300)

    sizes = [generation["world_size"] for generation in result.summary["generations"]]
    assert sizes == [3, 2, 3]
    assert "joins" in result.summary["generations"][2]["reason"]


def fails(fit: Fit, task: Any, **fields: Any) -> str:
    start = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        fit(task, **fields)
    assert time.monotonic() - start < 60, "a bad task must be told within seconds"
    return str(caught.value)


@turn(3, 6)
def test_an_error_while_the_group_is_set_up_is_tried_again_and_the_next_run_can_start(fit: Fit) -> None:
    """Ray Train 2.60 ends the run and leaks its placement group, so that the next one waits for ever."""
    first, second = fit(UnluckyTask(), steps=30), fit(NetTask(), steps=30, name="next")

    assert first.summary["status"] == second.summary["status"] == "finished"
    assert len(first.summary["generations"]) >= 1
    assert (first.summary["samples_missing"], first.summary["samples_repeated"]) == (0, 0)


@turn(4, 6)
def test_an_exception_in_build_model_is_told_with_the_users_traceback(fit: Fit) -> None:
    message = fails(fit, RaisingTask("build"))

    assert "raised on every worker at first start" in message
    assert "raised on purpose in build" in message
    assert "tests/tasks.py" in message
    assert "elastic_trainer/training" not in message.split("ValueError")[0].replace("training/task.py", "")


@turn(5, 6)
def test_an_exception_in_loss_names_rank_and_step(fit: Fit) -> None:
    message = fails(fit, RaisingTask("loss", step=3, rank=1))

    assert "rank 1" in message
    assert "at step 3 (loss)" in message
    assert "raised on purpose in loss" in message


@turn(0, 6)
def test_a_deterministic_exception_at_step_7_stops_after_three_tries(fit: Fit) -> None:
    message = fails(fit, RaisingTask("loss", step=7))

    assert "the same exception 3 times without a step done in between" in message
    assert "at step 7 (loss)" in message


@turn(1, 6)
def test_an_exception_that_passes_does_not_end_the_run(fit: Fit) -> None:
    summary = fit(RaisingTask("loss", step=7, worker_id=1, times=2)).summary

    assert (summary["status"], summary["samples_missing"]) == ("finished", 0)
    assert summary["survivor_pids_unchanged"]


@turn(2, 6)
def test_a_callback_that_raises_is_a_warning(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(RaisingTask("on_step", times=1)).summary["status"] == "finished"
    assert "on_step raised at step 0, training goes on: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "told"),
    rotating(
        [
            (ShapelessLossTask(), "the loss has shape (2,), not one element"),
            (UnreachableLossTask(), "the loss has no gradient"),
            (WrongColumnTask(), "the data has no column 'target'; it has 'x', 'y', 'number'"),
        ],
        1,
    ),
)
def test_a_task_that_breaks_a_rule_is_told_what_to_do(fit: Fit, task: Any, told: str) -> None:
    assert told in fails(fit, task)


@turn(3, 6)
def test_a_batch_norm_that_meets_a_single_row_says_what_to_change(fit: Fit) -> None:
    message = fails(fit, NetTask(), micro_batch=1, logical_ranks=24)

    assert "A batch-norm met a micro-batch of a single row" in message


@turn(4, 6)
def test_a_damaged_data_file_is_named(fit: Fit, dataset: str, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "damaged"
    shutil.copytree(dataset, copy)
    file = copy / "data-00000.arrow"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(bytes(raw))

    message = fails(fit, NetTask(), data={"train": str(copy)})

    assert str(file) in message
    assert "is damaged" in message


def test_too_few_resources_are_told_with_what_was_asked_and_what_there_is(fit: Fit) -> None:
    with pytest.raises(ResourcesError) as caught:
        fit(NetTask(), scaling={"min_workers": 4, "max_workers": 4, "resources_per_worker": {"CPU": 1}})

    assert "asked were 4 workers or more with {CPU: 1} each; the cluster has 3 nodes" in str(caught.value)
    assert "3 fit" in str(caught.value)


@turn(5, 6)
def test_too_few_resources_are_waited_for_as_configured(fit: Fit) -> None:
    scaling = {"min_workers": 4, "max_workers": 4, "resources_per_worker": {"CPU": 1}, "wait_s": 3.0}
    message = fails(fit, NetTask(), scaling=scaling)

    assert "only 3 of at least 4 workers found their resources" in message


@turn(0, 6)
def test_a_controller_that_is_gone_for_good_is_replaced_by_the_next_submission(
    fit: Fit, undisturbed: dict[int, tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gives up, workers go on, and running the same name again takes over from them."""
    monkeypatch.setattr("elastic_trainer.following.BACK_S", 1.0)

    def on_standing(standing: Standing) -> None:
        if standing.step > 5:
            ray.kill(ray.get_actor("controller:job"))  # without a restart

    slower = functools.partial(NetTask, delay_s=0.02)
    with pytest.raises(ClusterError, match="controller of run 'job' did not answer"):
        fit(slower(), on_standing)

    result = fit(slower())

    assert result.summary["terms"] == 2
    assert result.summary["generations"][-1]["reason"] == "term 2 takes over"
    assert result.summary["survivor_pids_unchanged"]
    assert ledger(result) == undisturbed


@turn(1, 6)
def test_without_any_controller_everything_ends_by_itself(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be left is found by the fixture that follows every test here."""
    monkeypatch.setattr("elastic_trainer.following.BACK_S", 1.0)

    def on_standing(standing: Standing) -> None:
        if standing.step > 5:
            ray.kill(ray.get_actor("controller:job"))

    with pytest.raises(ClusterError, match="did not answer"):
        fit(functools.partial(NetTask, delay_s=0.02)(), on_standing, timeouts={"orphan_s": 3.0})


@turn(2, 6)
def test_a_task_defined_where_it_is_used_travels_to_the_workers(fit: Fit) -> None:
    class Local(NetTask):
        pass

    assert fit(Local(), steps=5).summary["status"] == "finished"


@turn(3, 6)
def test_a_spare_takes_over_without_the_time_that_a_new_process_needs(fit: Fit) -> None:
    spare: list[str] = []

    def kill(standing: Standing) -> None:
        if not spare and standing.step >= 40 and standing.spares == 1 and standing.world_size == 2:
            spare.extend(set(standing.pids) - set(standing.members))
            os.kill(standing.pids[standing.members[0]], signal.SIGKILL)

    result = fit(SLOW(), kill, scaling={"max_workers": 2, "spares": 1}, steps=300)
    summary = result.summary
    assert summary["status"] == "finished"
    assert [generation["world_size"] for generation in summary["generations"]] == [2, 2]
    before, after = (set(generation["workers"]) for generation in summary["generations"])
    assert after - before == set(spare)
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)


@turn(4, 6)
def test_a_run_goes_on_with_fewer_and_with_more_workers(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def scale(standing: Standing) -> None:
        controller = ray.get_actor("controller:job", namespace="elastic_trainer")
        if not said and standing.step >= 40 and standing.world_size == 3:
            said.append(ray.get(controller.scale.remote(1, 13, "a test")))
            said.append(ray.get(controller.scale.remote(1, 2, "a test")))
        if len(said) == 2 and standing.step >= 100 and standing.world_size == 2:
            said.append(ray.get(controller.scale.remote(2, 3, "a test")))

    result = fit(SLOW(), scale, steps=500)

    assert said == ["at most 12 workers have something to do: the run has 12 logical ranks, not 13.", "", ""]
    summary = result.summary
    assert [generation["world_size"] for generation in summary["generations"]] == [3, 2, 3]
    assert (summary["samples_missing"], summary["samples_repeated"], summary["steps_redone"]) == (0, 0, 0)
