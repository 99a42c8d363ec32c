"""Rules of the loop API, as told to a user who breaks one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import Harness, settings_for


def broken_loop(how: str, run: Any) -> None:
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    if how == "no optimizer":
        run.register(model=model)
    if how == "steps before register":
        list(run.steps())
    if how == "registered twice":
        run.register(model=model, optimizer=optimizer)
    run.register(model=model, optimizer=optimizer)
    for step in run.steps():
        if how == "not entered":
            continue
        if how == "left early":
            break
        with step:
            for number, batch in enumerate(step):
                loss = ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).sum()
                step.backward("loss" if how == "no tensor" else loss, 0.0 if how == "no weight" else batch.rows)
                if how == "some micro-batches" and number == 2:
                    break
            if how == "not applied":
                continue
            step.apply(other if how == "foreign optimizer" else optimizer)


def make(how: str) -> Any:
    return functools.partial(broken_loop, how)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("no optimizer", "run.register() got no optimizer"),
        ("steps before register", "run.steps() needs run.register"),
        ("registered twice", "run.register() was called twice"),
        ("not entered", "step 0 was not entered. Write: for step in run.steps(): with step: ..."),
        ("left early", "returned before the run's last step"),
        ("no tensor", "the loss is a str, not a tensor"),
        ("no weight", "the weights of step 0 sum to 0"),
        ("some micro-batches", "consumed 3 of 12 micro-batches"),
        ("not applied", "step 0 ended without step.apply"),
        ("foreign optimizer", "an optimizer that is not registered"),
    ],
)
def test_a_broken_rule_is_told_with_its_remedy(how: str, told: str, dataset: str) -> None:
    outcome = Harness(functools.partial(make, how), settings_for(dataset, steps=3), workers=1).run()

    assert outcome.status == "failed"
    assert told in outcome.reason


def test_a_loop_that_keeps_the_rules_finishes(dataset: str) -> None:
    outcome = Harness(functools.partial(make, ""), settings_for(dataset, steps=3), workers=1).run()

    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []


def test_losses_and_weights_equal_a_plain_loop(dataset: str) -> None:
    """Independent reference: the whole batch at once, mean loss, torch's own SGD."""
    from elastic_trainer.data.reader import DatasetReader

    settings = settings_for(dataset, steps=30)
    outcome = Harness(functools.partial(make, ""), settings, workers=2).run()

    torch.manual_seed(0)
    rows = DatasetReader(dataset).rows(torch.arange(508).numpy())
    x, y = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])
    from elastic_trainer.training.randomness import seed_everything, stream

    seed_everything(stream(settings.seed))
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = settings.plan.order
    for step in range(30):
        ids = torch.cat([torch.from_numpy(order.ids(step, rank)) for rank in range(12)])
        optimizer.zero_grad()
        loss = ((model(x[ids]).squeeze(1) - y[ids]) ** 2).mean()
        loss.backward()
        optimizer.step()
        assert outcome.losses[step] == pytest.approx(float(loss.detach()), rel=1e-9)
