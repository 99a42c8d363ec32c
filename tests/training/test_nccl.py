"""The path that workers with a GPU take, on a device and a group with NCCL's semantics."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.control import events as e
from elastic_trainer.control.state import Limits, Phase
from elastic_trainer.training.settings import TrainSettings
from tests import harness_worker
from tests.harness import Harness, Outcome, settings_for
from tests.nccl_like import Faults, NcclLike
from tests.rotation import rotating, turn
from tests.tasks import ExactTask, NetTask, gan_like, state_digest

STEPS = 120
SEEDS = 10
CHANGES = 10  # of a seed: a hundred in all
GARBAGE = ("partial", "nan", "zero")


class WatchedTask(ExactTask):
    """Tells how far its host was ahead."""

    def train(self, run: Any) -> None:
        self.run = run
        self.ahead: list[int] = []
        super().train(run)
        harness_worker.RESULT["ahead"] = self.ahead

    def loss(self, model: Any, batch: Any) -> Any:
        self.ahead.append(len(self.run.given_out))
        return super().loss(model, batch)


@pytest.fixture(scope="module")
def settings(dataset: str) -> TrainSettings:
    return settings_for(dataset, steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(settings: TrainSettings) -> Outcome:
    return Harness(ExactTask, settings, workers=1).run()


def is_same(outcome: Outcome, reference: Outcome) -> bool:
    digests = {result["digest"] for result in outcome.last_members}
    return outcome.losses == reference.losses and digests == {reference.final[0]["digest"]}


def assert_same_bits(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []
    assert outcome.losses == reference.losses
    assert {result["digest"] for result in outcome.last_members} == {reference.final[0]["digest"]}


@pytest.mark.parametrize("workers", rotating([1, 2, 3], 1))
def test_a_device_that_runs_behind_gives_the_same_bits(
    workers: int, settings: TrainSettings, undisturbed: Outcome
) -> None:
    outcome = Harness(WatchedTask, settings, workers=workers, backend=NcclLike()).run()

    assert_same_bits(outcome, undisturbed)
    assert max(outcome.final[0]["ahead"]) == 2


@turn(0, 3)
@pytest.mark.parametrize(
    "task",
    [
        functools.partial(ExactTask, optimizer="sgd"),
        functools.partial(ExactTask, fused=False),  # judged on the host: its optimizer cannot leave a step out
    ],
)
def test_other_optimizers_give_the_same_bits_through_a_loss(task: Any, settings: TrainSettings) -> None:
    reference = Harness(task, settings, workers=1).run()
    outcome = Harness(task, settings, workers=3, backend=NcclLike(), on_step=kill_once(50)).run()

    assert_same_bits(outcome, reference)
    assert len(outcome.generations) >= 2


def kill_once(at: int, worker_id: int = 1) -> Any:
    done: list[int] = []

    def on_step(harness: Harness, steps: int) -> None:
        if steps >= at and not done:
            done.append(steps)
            harness.kill(worker_id)

    return on_step


class Changes:
    """Random losses, stops and planned changes, each some steps after the run has come back from the one before.

    A `ragged` loss is one while another worker never hears that a step was complete which all others have.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._chooser = random.Random(seed)
        self._folder = folder  # `Faults.misses_when`
        self.made: list[str] = []
        self._next = self._chooser.randint(3, 12)
        self._most = 3

    def __call__(self, harness: Harness, done: int) -> None:
        state = harness.machine.state
        settled = state.phase is Phase.RUNNING and len(state.group) >= min(2, self._most)
        if len(self.made) == CHANGES or done < self._next or not settled:
            return
        self._next = done + self._chooser.randint(3, 12)
        kind = self._chooser.choice(["kill", "kill", "ragged", "ragged", "stop", "scale"])
        self.made.append(kind)
        if kind == "scale":
            self._most = 5 - self._most  # 3 and 2 by turns
            harness.put(e.ScaleRequested(1, self._most, "the test"))
            return
        victim, other = self._chooser.sample(state.group, 2)
        delay = self._chooser.uniform(0.0, 0.05)
        process, pid = harness._processes[victim], harness._processes[other].pid
        threading.Timer(delay, self._harm, (process, kind, self._folder / str(pid))).start()

    @staticmethod
    def _harm(process: Any, kind: str, misses: Path) -> None:
        if kind == "stop":  # whoever watches it gives it up a little later
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(0.3, process.kill).start()
            return
        if kind == "ragged":
            misses.touch()
            deadline = time.monotonic() + 20.0  # it may be anywhere in its step
            while misses.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
        process.kill()


@pytest.mark.parametrize("seed", rotating(range(SEEDS), 1))
def test_random_losses_stops_and_planned_changes_leave_every_bit_as_it_was(
    seed: int, dataset: str, tmp_path: Path
) -> None:
    changes = Changes(seed, tmp_path)
    outcome, reference = changed_at_random(changes, dataset, Faults(GARBAGE[seed % 3], misses_when=str(tmp_path)))

    assert_same_bits(outcome, reference)
    assert len(changes.made) == CHANGES
    assert max(outcome.last_members[0]["ahead"]) == 2


def changed_at_random(changes: Changes, dataset: str, faults: Faults, *, gated: bool = True) -> tuple[Outcome, Outcome]:
    """A run with these changes, and an undisturbed one."""
    settings = settings_for(dataset, steps=260, save_every=30)
    task = functools.partial(WatchedTask, delay_s=0.002)
    limits = Limits(1, 3, place_s=60.0, form_s=20.0, leave_s=20.0, save_s=60.0, settle_s=(0.0,))
    backend = NcclLike(default=faults, gated=gated)
    outcome = Harness(task, settings, workers=3, backend=backend, on_step=changes, limits=limits).run(200)
    return outcome, Harness(ExactTask, settings, workers=1).run()


def ragged(garbage: str, at: int, *, gated: bool = True) -> NcclLike:
    """Worker 1 dies just after step `at - 1` was complete on it and worker 0; worker 2 never hears of that."""
    faults = {(1, 0): Faults(garbage, dies_at=(at, 0.001)), (2, 0): Faults(garbage, misses=at)}
    return NcclLike(faults, Faults(garbage), gated)


@pytest.mark.parametrize(("garbage", "at"), rotating([(g, at) for g in GARBAGE for at in (2, 30, 77)], 1, 0, 2))
def test_a_step_that_is_complete_on_some_survivors_only(
    garbage: str, at: int, settings: TrainSettings, undisturbed: Outcome
) -> None:
    outcome = Harness(ExactTask, settings, workers=3, backend=ragged(garbage, at)).run()

    assert_same_bits(outcome, undisturbed)
    assert outcome.generations[1][1] == at  # the survivor that had it gave it to the others


@pytest.mark.parametrize(("at", "fused"), rotating([(2, True), (30, True), (77, True), (30, False)], 1, 1, 2))
def test_a_collective_that_ends_with_what_an_earlier_step_left_counts_for_nothing(
    at: int, fused: bool, settings: TrainSettings
) -> None:
    task = functools.partial(ExactTask, fused=fused)
    faults = {(1, 0): Faults(stale=at)}
    outcome = Harness(task, settings, workers=3, backend=NcclLike(faults)).run()

    assert_same_bits(outcome, Harness(task, settings, workers=1).run())
    assert outcome.generations[1] == (3, at)  # the others had it, and gave it to the one that had not


class WeightlessTask(ExactTask):
    """One step has no weight at all, again and again."""

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss * batch.rows, 0.0 if self.run.steps_done + len(self.run.given_out) == 20 else float(batch.rows)

    def train(self, run: Any) -> None:
        self.run = run
        super().train(run)


def test_a_step_without_weight_ends_the_run_with_its_message(settings: TrainSettings) -> None:
    outcome = Harness(WeightlessTask, settings, workers=2, backend=NcclLike()).run()

    assert outcome.status == "failed"
    assert "the weights of step 20 sum to 0" in outcome.reason


class AveragingTask(ExactTask):
    """Keeps an average of the model, updated behind the optimizer, where no verdict reaches it."""

    def train(self, run: Any) -> None:
        model = self.build_model()
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = self.build_optimizer(model)
        run.register(model=model, average=average, optimizer=optimizer)
        for step in run.steps():
            with step:
                for batch in step:
                    step.backward(self.loss(model, batch) * batch.rows, batch.rows)
                step.apply(optimizer)
                average.update_parameters(model)
        harness_worker.RESULT.update(digest=state_digest(model, average, optimizer))


@turn(2, 3)
def test_what_a_task_changes_behind_the_update_is_exact_too(settings: TrainSettings) -> None:
    reference = Harness(AveragingTask, settings, workers=1).run()
    outcome = Harness(AveragingTask, settings, workers=3, backend=NcclLike(), on_step=kill_once(40)).run()

    assert_same_bits(outcome, reference)


@pytest.mark.parametrize("at", rotating([30, 55, 77], 1))
def test_without_the_verdict_the_same_loss_leaves_other_weights(
    at: int, settings: TrainSettings, undisturbed: Outcome
) -> None:
    """A test of the tests above: they see what the verdict prevents. Garbage that is not finite is seen otherwise."""
    outcome = Harness(ExactTask, settings, workers=3, backend=ragged("partial", at, gated=False)).run()

    assert outcome.status == "finished", outcome.reason
    assert not is_same(outcome, undisturbed)


@pytest.mark.soak
def test_without_the_verdict_the_random_changes_leave_other_weights(dataset: str, tmp_path: Path) -> None:
    changes = Changes(0, tmp_path)
    outcome, reference = changed_at_random(changes, dataset, Faults("partial", misses_when=str(tmp_path)), gated=False)

    assert outcome.status == "finished", outcome.reason
    assert not is_same(outcome, reference)


def test_steps_that_are_not_finite_are_left_out_on_the_device_too(dataset: str) -> None:
    settings = settings_for(dataset, steps=40)
    task = functools.partial(PoisonedExactTask, [3, 200])
    reference = Harness(task, settings, workers=2).run()
    outcome = Harness(task, settings, workers=2, backend=NcclLike()).run()

    skipped = outcome.audit.skipped
    assert skipped == reference.audit.skipped != {}
    assert {each["digest"] for each in outcome.last_members} == {reference.final[0]["digest"]}


class PoisonedExactTask(ExactTask):
    """Some samples make the loss something else than a number."""

    def __init__(self, samples: list[int]) -> None:
        super().__init__()
        self._samples = set(samples)

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss * float("nan") if self._samples & set(batch.sample_ids.tolist()) else loss


@turn(1, 3)
def test_whole_runs_with_evaluation_saves_and_a_task_that_reads_from_the_device(dataset: str, held_out: str) -> None:
    settings = settings_for(dataset, steps=100, evaluation=held_out, evaluate_every=40, save_every=30)
    reference = Harness(NetTask, settings, workers=3).run()
    task = functools.partial(NetTask, delay_s=0.002)
    outcome = Harness(task, settings, workers=3, backend=NcclLike(), on_step=kill_once(50)).run()

    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-9)
    assert outcome.evaluations.keys() == reference.evaluations.keys()
    for steps, values in reference.evaluations.items():
        assert outcome.evaluations[steps]["error"] == pytest.approx(values["error"], rel=1e-6)
    assert [saved.steps for saved in outcome.saved] == [30, 60, 90, 100]


@turn(2, 3)
def test_several_optimizers_are_judged_on_the_host(settings: TrainSettings) -> None:
    reference = Harness(lambda_gan, settings, workers=2).run()
    outcome = Harness(lambda_gan, settings, workers=2, backend=NcclLike(), on_step=kill_once(40)).run()

    assert outcome.status == "finished", outcome.reason
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-9)


def lambda_gan() -> Any:
    return gan_like


@turn(0, 3)
def test_a_worker_whose_device_fails_for_good_is_replaced(settings: TrainSettings, undisturbed: Outcome) -> None:
    faults = {(1, 0): Faults(device_fails_at=40)}
    outcome = Harness(ExactTask, settings, workers=3, backend=NcclLike(faults)).run()

    assert_same_bits(outcome, undisturbed)
    assert len(outcome.generations) > 1


@turn(1, 3)
def test_a_communicator_that_is_never_ready_costs_its_processes_and_not_the_run(
    settings: TrainSettings, undisturbed: Outcome
) -> None:
    limits = Limits(1, 3, place_s=60.0, form_s=2.0, leave_s=2.0, save_s=60.0)
    faults = {(worker_id, 0): Faults(hangs_in_init=2) for worker_id in range(3)}
    task = functools.partial(ExactTask, delay_s=0.002)
    outcome = Harness(task, settings, workers=3, backend=NcclLike(faults), on_step=kill_once(40), limits=limits).run()

    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []
    assert outcome.audit.samples_trained == undisturbed.audit.samples_trained
