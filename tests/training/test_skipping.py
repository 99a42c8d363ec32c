"""A step whose loss or gradient is not finite updates nothing, on any number of workers, and counts as done."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.training.randomness import seed_everything, stream
from tests import harness_worker
from tests.harness import Harness, Outcome, settings_for
from tests.rotation import rotating
from tests.tasks import state_digest

STEPS = 30
BAD = (77, 301)  # samples that poison a step of each epoch


def poisoned(loss: torch.Tensor, how: str, weight: torch.Tensor) -> torch.Tensor:
    if how == "loss":
        return loss * math.nan
    if how == "infinite loss":
        return loss + math.inf
    return loss + torch.sqrt(weight.sum() * 0)  # adds zero, and has no finite gradient


def loop(how: str, run: Any) -> None:
    """A linear model, whose learning rate falls every 10 steps."""
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps():
        with step:
            for batch in step:
                loss = ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).sum()
                if set(BAD) & set(batch.sample_ids.tolist()):
                    loss = poisoned(loss, how, model.weight)
                step.backward(loss, batch.rows)
            step.apply(optimizer)
            scheduler.step()
    harness_worker.RESULT.update(digest=state_digest(model, optimizer), weight=model.weight.detach().numpy().copy())


def make(how: str) -> Any:
    return functools.partial(loop, how)


def plain(dataset: str) -> tuple[dict[int, float], list[int], np.ndarray]:
    """Losses of the steps that count, the steps that do not, and the weights in the end, without our loop."""
    settings = settings_for(dataset, steps=STEPS)
    rows = DatasetReader(dataset).rows(np.arange(508))
    x, y = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])
    seed_everything(stream(settings.seed))
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, skipped = {}, []
    for step in range(STEPS):
        ids = np.concatenate([settings.plan.order.ids(step, rank) for rank in range(12)])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 ** (step // 10)
        if set(BAD) & set(ids.tolist()):
            skipped.append(step)
            continue
        optimizer.zero_grad()
        loss = ((model(x[ids]).squeeze(1) - y[ids]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses[step] = float(loss.detach())
    return losses, skipped, model.weight.detach().numpy().copy()


def assert_as_plain(outcome: Outcome, dataset: str) -> None:
    losses, skipped, weight = plain(dataset)
    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []
    assert sorted(outcome.audit.skipped) == skipped
    assert len(skipped) in (2, 3, 4)
    assert outcome.audit.samples_trained + sum(outcome.audit.skipped.values()) == sum(
        outcome.audit.order.samples_in(step) for step in range(STEPS)
    )
    for step, loss in losses.items():
        assert outcome.losses[step] == pytest.approx(loss, rel=1e-9)
    assert len({result["digest"] for result in outcome.last_members}) == 1, "ranks ended with different state"
    for result in outcome.last_members:
        assert np.allclose(result["weight"], weight, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("how", "workers"),
    rotating([(how, workers) for how in ("loss", "infinite loss", "gradient") for workers in (1, 2, 3)], 4),
)
def test_a_step_that_is_not_finite_is_left_out_by_all(how: str, workers: int, dataset: str) -> None:
    assert_as_plain(
        Harness(functools.partial(make, how), settings_for(dataset, steps=STEPS), workers=workers).run(), dataset
    )


def test_a_worker_killed_around_such_a_step_changes_nothing(dataset: str) -> None:
    _, skipped, _ = plain(dataset)

    def kill(harness: Harness, done: int) -> None:
        if done in (skipped[0], skipped[1] + 1):
            harness.kill(1)

    settings = settings_for(dataset, steps=STEPS)
    assert_as_plain(Harness(functools.partial(make, "gradient"), settings, workers=3, on_step=kill).run(), dataset)


def bad_at(how: str, steps: tuple[int, ...], marker: str, run: Any) -> None:
    """The same model; at some steps the loss is no number: always, or as long as the marker is not there."""
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.register(model=model, optimizer=optimizer)
    for step in run.steps():
        time.sleep(0.03)  # for a save to stand before the next one
        with step:
            for batch in step:
                loss = ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).sum()
                if step.number in steps and not (how == "once" and Path(marker).exists()):
                    loss = loss * math.nan
                step.backward(loss, batch.rows)
            step.apply(optimizer)
        if step.number == max(steps):
            Path(marker).touch()
    harness_worker.RESULT.update(digest=state_digest(model, optimizer))


def make_bad(how: str, steps: tuple[int, ...], marker: str) -> Any:
    return functools.partial(bad_at, how, steps, marker)


def ended(how: str, steps: tuple[int, ...], dataset: str, marker: Path, **others: Any) -> tuple[Outcome, Harness]:
    settings = settings_for(dataset, steps=STEPS, **others)
    harness = Harness(functools.partial(make_bad, how, steps, str(marker)), settings, workers=2)
    return harness.run(), harness


@pytest.mark.parametrize("how", ["always", "once"])
def test_after_three_in_a_row_the_run_goes_back_and_leaves_them_out(how: str, dataset: str, tmp_path: Path) -> None:
    """Also when they would be good now: what was named stays out, and the outcome is the same."""
    steps = (12, 13, 14)
    outcome, harness = ended(how, steps, dataset, tmp_path / "marker", save_every=5)
    without, _ = ended("always", steps, dataset, tmp_path / "other", save_every=5)

    assert outcome.status == "finished", outcome.reason
    assert [resumed for _, resumed in outcome.generations] == [0, 10]
    assert sorted(outcome.audit.skipped) == list(steps)
    assert outcome.audit.bad_steps() == []
    assert {each["digest"] for each in outcome.last_members} == {each["digest"] for each in without.last_members}
    rollback = harness.committer.history.rollback
    assert rollback is not None
    assert rollback.skipped == steps


def test_a_second_time_to_the_same_step_ends_the_run(dataset: str, tmp_path: Path) -> None:
    outcome, _ = ended("always", (12, 13, 14, 15, 16, 17), dataset, tmp_path / "marker", save_every=10)

    assert outcome.status == "failed"
    assert "not finite in steps 15, 16, 17, although the run had gone back to step 10" in outcome.reason
    assert "left steps 12, 13, 14 out" in outcome.reason


def test_without_anything_saved_there_is_nothing_to_go_back_to(dataset: str, tmp_path: Path) -> None:
    outcome, _ = ended("always", (2, 3, 4), dataset, tmp_path / "marker")

    assert outcome.status == "failed"
    assert "not finite in steps 2, 3, 4, and nothing was saved to go back to" in outcome.reason


def test_fewer_in_a_row_do_not_make_it_go_back(dataset: str, tmp_path: Path) -> None:
    outcome, _ = ended("always", (12, 13, 15, 16), dataset, tmp_path / "marker", save_every=5)

    assert outcome.status == "finished"
    assert len(outcome.generations) == 1


def test_the_first_update_of_a_step_goes_back_with_the_second(dataset: str) -> None:
    """Of two optimizers the second meets a bad gradient: the first has stepped already."""
    outcome = Harness(make_two, settings_for(dataset, steps=STEPS), workers=2).run()

    assert outcome.status == "finished", outcome.reason
    assert sorted(outcome.audit.skipped) == plain(dataset)[1]
    (changes,) = {result["changes"] for result in outcome.final.values()}
    assert changes == STEPS - len(outcome.audit.skipped)


def make_two() -> Any:
    return two_optimizers


def two_optimizers(run: Any) -> None:
    model, other = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()
    first, second = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, other))
    run.register(model=model, other=other, first=first, second=second)
    changes = 0
    for step in run.steps(overlap=False):
        before = state_digest(model)
        with step:
            for which, optimizer in ((model, first), (other, second)):
                for batch in step:
                    loss = ((which(batch["x"]).squeeze(1) - batch["y"]) ** 2).sum()
                    if which is other and set(BAD) & set(batch.sample_ids.tolist()):
                        loss = loss * math.nan
                    step.backward(loss, batch.rows)
                step.apply(optimizer)
        changes += state_digest(model) != before
    harness_worker.RESULT.update(changes=changes)
