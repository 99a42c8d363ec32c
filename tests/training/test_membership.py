"""What was reported of other systems' process groups, in real processes."""

from __future__ import annotations

import functools
import itertools
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from elastic_trainer.control import effects as f
from elastic_trainer.control.state import Limits
from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Worker
from tests.harness import Harness, Outcome, settings_for
from tests.rotation import turn
from tests.tasks import ExactTask, NetTask
from tests.training.groups import backend, on_ranks
from tests.training.test_run import assert_same_run

STEPS = 60


@pytest.fixture(scope="module")
def settings(dataset: str) -> TrainSettings:
    return settings_for(dataset, steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(settings: TrainSettings) -> Outcome:
    return Harness(NetTask, settings, workers=3).run()


class Unlucky(GlooBackend):
    """Its second formation fails half-way: the group stands on this rank, and it says that it does not."""

    tries = 0

    def form(self, *arguments: Any) -> None:
        super().form(*arguments)
        self.tries += 1
        if self.tries == 2:
            self.destroy()
            raise CollectiveFailed("the second formation fails here")


def unlucky(worker: Worker, settings: TrainSettings) -> ProcessGroupBackend:
    kind = Unlucky if worker == Worker(0, 0) else GlooBackend
    return kind("test", settings.form_s, settings.collective_s)


def test_a_formation_that_fails_on_one_worker_is_tried_again_under_another_name(
    settings: TrainSettings, undisturbed: Outcome
) -> None:
    """As in pytorch#192275, and in Ray Train 2.60, where an error while the group is set up ends the run."""
    killed: list[int] = []

    def on_step(harness: Harness, done: int) -> None:
        if done == 20 and not killed:
            killed.append(done)
            harness.kill(2)

    outcome = Harness(NetTask, settings, workers=3, backend=unlucky, on_step=on_step).run()

    assert_same_run(outcome, undisturbed)


@dataclass(frozen=True)
class LateAt:
    """A task that one worker is late in at one step."""

    step: int
    seconds: float

    def __call__(self) -> NetTask:
        return _Late(self.step, self.seconds)


class _Late(NetTask):
    def __init__(self, step: int, seconds: float) -> None:
        super().__init__()
        self._at, self._seconds = step, seconds

    def loss(self, model: Any, batch: Any) -> Any:
        if self.run.worker.worker_id == 0 and self.run.steps_done == self._at:
            self._at = -1
            time.sleep(self._seconds)
        return super().loss(model, batch)

    def train(self, run: Any) -> None:
        self.run = run
        super().train(run)


@turn(0, 2)
def test_a_worker_lost_while_another_is_in_a_long_step_is_noticed_at_once(
    settings: TrainSettings, undisturbed: Outcome
) -> None:
    """As in skypilot#825; the survivor that waits is free at once, the busy one when its code comes back."""
    times: dict[str, float] = {}

    def on_step(harness: Harness, done: int) -> None:
        if done == 20 and not times:
            times["due"] = time.monotonic()

            def kill() -> None:
                times["killed"] = time.monotonic()
                harness.kill(2)

            threading.Timer(1.0, kill).start()

    class Timed(Harness):
        def _carry_out(self, effect: f.Effect) -> None:
            if isinstance(effect, f.AbortGeneration):
                times.setdefault("aborted", time.monotonic())
            super()._carry_out(effect)

    outcome = Timed(LateAt(20, 5.0), settings, workers=3, on_step=on_step).run()

    assert_same_run(outcome, undisturbed)
    assert times["aborted"] - times["killed"] < 1.0


@turn(1, 2)
def test_survivors_are_free_within_their_budget_whatever_the_time_out_of_a_collective(
    dataset: str, undisturbed: Outcome
) -> None:
    """As in torchft#196: one stops inside an all-reduce whose time-out is 600 s."""
    settings = settings_for(dataset, steps=STEPS, collective_s=600.0)
    stopped: list[float] = []

    def on_step(harness: Harness, done: int) -> None:
        if done == 20 and not stopped:
            stopped.append(time.monotonic())
            worker = harness.kill(2, signal.SIGSTOP)
            assert worker is not None
            # what watches processes would say so; without it the process is given up here
            threading.Timer(0.5, lambda: harness.kill(2)).start()
        if done == 21 and len(stopped) == 1:
            stopped.append(time.monotonic())

    limits = Limits(1, 3, place_s=60.0, form_s=20.0, leave_s=60.0, save_s=60.0)
    outcome = Harness(NetTask, settings, workers=3, on_step=on_step, limits=limits).run()

    assert_same_run(outcome, undisturbed)
    assert stopped[1] - stopped[0] < 10.0


def _collectives(rank: int, world_size: int) -> list[list[float]]:
    group = backend()
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        mine = torch.arange(5).to(dtype) + rank
        group.all_reduce(mine).wait_on_host()
        given = torch.full((3,), rank, dtype=dtype)
        group.broadcast(given, world_size - 1).wait_on_host()
        gathered = [torch.empty(2, dtype=dtype) for _ in range(world_size)]
        group.all_gather(gathered, torch.full((2,), rank + 1, dtype=dtype)).wait_on_host()
        found.append([*mine.tolist(), *given.tolist(), *itertools.chain(*(each.tolist() for each in gathered))])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_equals_what_one_process_works_out(world_size: int) -> None:
    """As in torchft#286."""
    ranks = range(world_size)
    expected = [float(sum(i + rank for rank in ranks)) for i in range(5)]
    expected += [float(world_size - 1)] * 3
    expected += [float(rank + 1) for rank in ranks for _ in range(2)]
    for found in on_ranks(world_size, _collectives):
        assert found == [expected] * 4


def test_a_peer_that_dies_before_the_first_collective_ends_no_wait_by_time(
    settings: TrainSettings, undisturbed: Outcome
) -> None:
    """As in gloo#520: it dies as soon as the group stands."""
    killed: list[Worker] = []

    def on_event(harness: Harness, event: Any) -> None:
        if type(event).__name__ == "GroupFormed" and event.worker.worker_id == 1 and not killed:
            killed.append(event.worker)
            harness.kill(1)

    start = time.monotonic()
    task = functools.partial(NetTask)
    outcome = Harness(task, settings, workers=3, on_event=on_event).run()

    assert_same_run(outcome, undisturbed)
    assert time.monotonic() - start < 30.0  # a collective's time-out is 60 s


def test_neither_the_store_nor_rank_0_is_needed_for_the_same_bits(settings: TrainSettings) -> None:
    """As in pytorch#67742 and ray#59989: the store's process dies, and soon after the worker that has rank 0."""
    done: list[str] = []

    def on_step(harness: Harness, steps: int) -> None:
        if steps >= 5 and not done:
            done.append("store")
            harness.lose_store()
        elif steps >= 8 and done == ["store"]:
            done.append("rank 0")
            harness.kill(harness.machine.state.group[0].worker_id)

    outcome = Harness(ExactTask, settings, workers=3, on_step=on_step).run()

    reference = Harness(ExactTask, settings, workers=1).run()
    assert outcome.status == "finished", outcome.reason
    assert outcome.generations[1][1] >= 8, "the store's death alone is noticed by nobody"
    assert outcome.losses == reference.losses
    assert {each["digest"] for each in outcome.last_members} == {reference.final[0]["digest"]}
