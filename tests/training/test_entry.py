from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from elastic_trainer.control.events import TaskPhase
from elastic_trainer.errors import TaskError
from elastic_trainer.training.entry import describe
from elastic_trainer.training.settings import TrainSettings
from tests.harness import Harness, settings_for
from tests.tasks import RaisingTask


def raise_in_library() -> None:
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))


def test_the_innermost_line_is_the_users_not_the_librarys() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise_in_library()

    failure = describe(caught.value, TaskPhase.LOSS)

    assert failure.kind == "RuntimeError"
    assert failure.line == f"{__file__}:{raise_in_library.__code__.co_firstlineno + 1}"
    assert "raise_in_library" in failure.text


def test_a_rule_of_ours_that_was_broken_shows_the_users_line_only() -> None:
    with pytest.raises(TaskError) as caught:
        raise TaskError("do it otherwise")

    assert describe(caught.value, TaskPhase.BUILD).text.endswith("TaskError: do it otherwise")


@pytest.fixture
def settings(dataset: str, held_out: str) -> TrainSettings:
    return settings_for(dataset, steps=20, evaluation=held_out)


@pytest.mark.parametrize("phase", ["build", "loss", "evaluate"])
def test_an_exception_that_passes_costs_no_process_and_no_step(phase: str, settings: TrainSettings) -> None:
    task = functools.partial(RaisingTask, phase, step=5, worker_id=1, times=1)
    outcome = Harness(task, settings, workers=2).run()

    assert outcome.status == "finished", outcome.reason
    assert outcome.audit.bad_steps() == []
    assert outcome.audit.steps_redone == 0
    processes: dict[int, Any] = {}
    for pids in outcome.pids:
        for worker_id, pid in pids.items():
            assert processes.setdefault(worker_id, pid) == pid
    assert len({result["digest"] for result in outcome.last_members}) == 1


@pytest.mark.parametrize("phase", ["build", "loss", "evaluate"])
def test_an_exception_that_stays_ends_the_run_with_its_words(phase: str, settings: TrainSettings) -> None:
    outcome = Harness(functools.partial(RaisingTask, phase), settings, workers=2).run()

    assert outcome.status == "failed"
    assert f"ValueError: raised on purpose in {phase}" in outcome.reason
    assert f"({phase})" in outcome.reason
