from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import TaskError
from elastic_trainer.training.task import NamedTask, TaskFacts, TrainTask, code_digest

MODULE = """
from elastic_trainer import TrainTask
import torch

class Good(TrainTask):
    def __init__(self, width: int = 3):
        if width < 1: raise ValueError("width is below 1")
        self.width = width
    def build_model(self): return torch.nn.Linear(self.width, 1)
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)

class Lacking(TrainTask):
    def build_model(self): return torch.nn.Linear(1, 1)

class Foreign: pass
number = 3
def train(run): pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_tasks_x.py").write_text(MODULE)
    (tmp_path / "broken_x.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "raising_x.py").write_text("def f():\n    raise KeyError('colour')\n\nf()\n")
    (tmp_path / "unfinished_x.py").write_text("class Good(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_tasks_x"
    sys.modules.pop("my_tasks_x", None)


def test_a_class_gets_its_arguments(module: str) -> None:
    task = NamedTask("my_tasks_x:Good", {"width": 5}).load()

    assert isinstance(task, TrainTask)
    assert task.width == 5


def test_a_function_is_a_task_too(module: str) -> None:
    assert callable(NamedTask("my_tasks_x:train", {}).load())


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("my_tasks_x", {}, "is not of the form module:Class"),
        ("my_task_x:Good", {}, "no module 'my_task_x'. Did you mean 'my_tasks_x'?"),
        ("my_tasks_x:God", {}, "has no 'God'. Did you mean 'Good'?"),
        ("my_tasks_x:Foreign", {}, "is not a TrainTask. Derive it"),
        ("my_tasks_x:Lacking", {}, "lacks build_optimizer"),
        ("my_tasks_x:number", {}, "is a int, not a TrainTask or a function"),
        ("my_tasks_x:Good", {"widht": 5}, "do not fit my_tasks_x:Good"),
        ("my_tasks_x:train", {"a": 1}, "is a function, which takes none"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(name: str, args: dict[str, Any], told: str, module: str) -> None:
    with pytest.raises(TaskError) as caught:
        NamedTask(name, args).load()
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("broken_x:Good", {}, r"importing broken_x raised ModuleNotFoundError: .*'module_that_is_not_there' .*x.py:1"),
        ("raising_x:Good", {}, r"importing raising_x raised KeyError: 'colour' \(.*raising_x.py:2\)"),
        ("unfinished_x:Good", {}, r"syntax error: .*\(.*unfinished_x.py:1\)"),
        ("my_tasks_x:Good", {"width": -1}, r"Good\(\*\*task_args\) raised ValueError: width .*my_tasks_x.py:7"),
    ],
)
def test_what_a_task_raises_is_told_with_its_place(name: str, args: dict[str, Any], told: str, module: str) -> None:
    with pytest.raises(TaskError, match=told):
        NamedTask(name, args).load()


def test_data_for_an_evaluation_that_is_not_there_is_refused() -> None:
    class Silent(TrainTask):
        def build_model(self) -> nn.Module:
            return nn.Linear(2, 1)

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(TaskError, match=r"data.evaluation = 'held-out' is set, but Silent has no evaluate\(model"):
        TaskFacts.of(Silent()).check("held-out")
    TaskFacts.of(Silent()).check(None)
    TaskFacts.of(lambda run: None).check("held-out")  # a function says so only while it runs


def test_inputs_and_criterion_stand_for_loss() -> None:
    class Split(TrainTask):
        def build_model(self) -> nn.Module:
            return nn.Linear(2, 1)

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def inputs(self, batch: Any) -> tuple[torch.Tensor]:
            return (batch["x"],)

        def criterion(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
            return output.mean()

    task = Split()
    model = task.build_model()
    batch: Any = {"x": torch.ones(3, 2)}

    assert torch.equal(task.loss(model, batch), model(batch["x"]).mean())  # type: ignore[arg-type]


def test_a_task_without_any_loss_is_told() -> None:
    class Mute(TrainTask):
        def build_model(self) -> nn.Module:
            return nn.Linear(2, 1)

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(TaskError, match=r"Mute has neither loss\(\) nor inputs\(\) and criterion\(\)"):
        Mute().loss(nn.Linear(2, 1), {})  # type: ignore[arg-type]


def test_a_task_of_a_script_has_no_files_to_tell_apart() -> None:
    """`python train.py`: Python's own module of the script has no spec."""
    assert len(code_digest("__main__:Task")) == 16
