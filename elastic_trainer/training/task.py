"""The task API: a model, an optimizer and a loss, as a thin layer over the loop API; and how a task is named."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from elastic_trainer.errors import TaskError, did_you_mean
from elastic_trainer.training.batches import Batch
from elastic_trainer.training.run import Run
from elastic_trainer.training.step import Step

TrainFunction = Callable[[Run], None]
Loss = torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]


class TrainTask(ABC):
    """What to train. Override `build_model`, `build_optimizer` and `loss`; everything else is optional.

    Optional methods: `transform(columns) -> columns` (while data is prepared, once for all: at most 1,024 raw rows as
    numpy arrays by name; may drop or add rows), `build_scheduler(optimizer)`, `preprocess(row, rng) -> row` (each time
    that a row is trained: a dict, and a numpy Generator that depends on seed, epoch and sample alone; may not drop
    rows), `collate(rows) -> dict of tensors`, `evaluate(model, batch) -> {name: (sum, weight)}`, `on_step(step)` (after
    each done step, on data rank 0).
    Instead of `loss`: `inputs(batch) -> tuple` and `criterion(output, batch)`.

    Attributes:
        fixed_shapes: Fill a short micro-batch up with repeated rows; `batch["row_weight"]` is then 1 for real rows and
            0 for the others, and `loss` must return (sum, weight).
    """

    fixed_shapes: ClassVar[bool] = False
    transform: ClassVar[Callable[..., Any] | None] = None
    build_scheduler: ClassVar[Callable[..., Any] | None] = None
    preprocess: ClassVar[Callable[..., Any] | None] = None
    collate: ClassVar[Callable[..., Any] | None] = None
    evaluate: ClassVar[Callable[..., Any] | None] = None
    on_step: ClassVar[Callable[..., Any] | None] = None
    inputs: ClassVar[Callable[..., Any] | None] = None
    criterion: ClassVar[Callable[..., Any] | None] = None

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, on the CPU: every worker builds it and moves it to its device; newcomers get the run's weights."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The mean loss over the micro-batch, or (sum, weight) for losses that are weighted, by tokens say."""
        if self.inputs is None or self.criterion is None:
            raise TaskError(f"{type(self).__name__} has neither loss() nor inputs() and criterion(). Define loss().")
        result: Loss = self.criterion(model(*self.inputs(batch)), batch)
        return result

    def train(self, run: Run) -> None:
        """The whole of training, in terms of the loop API."""
        run.preprocess, run.collate = self.preprocess, self.collate
        model = self.build_model().to(run.device)
        optimizer = self.build_optimizer(model)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        scheduler = self.build_scheduler(optimizer) if self.build_scheduler is not None else None
        if scheduler is not None:
            parts["scheduler"] = scheduler
        run.register(**parts)
        run.on_done = lambda step: self._call_on_step(run, step)
        for step in run.steps(evaluate=self._evaluate_with(model)):
            with step:
                for batch in step:
                    step.backward(*self._loss_sum(model, batch))
                step.apply(optimizer)
                if scheduler is not None:
                    scheduler.step()

    def _loss_sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float | torch.Tensor]:
        found = self.loss(model, batch)
        if isinstance(found, tuple):
            return found
        if self.fixed_shapes:
            raise TaskError(
                f"{type(self).__name__} has fixed_shapes, so loss() must return (sum, weight), both over "
                "batch['row_weight']."
            )
        return found * batch.rows, batch.rows

    def _evaluate_with(self, model: nn.Module) -> Callable[[Batch], Mapping[str, tuple[Any, Any]]] | None:
        evaluate = self.evaluate
        return None if evaluate is None else lambda batch: evaluate(model, batch)

    def _call_on_step(self, run: Run, step: Step) -> None:
        if self.on_step is None or run.rank != 0:
            return
        try:
            self.on_step(step)
        except Exception as error:  # a callback that raises must not end a run
            run.note(f"on_step raised at step {step.number}, training goes on: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class TaskFacts:
    """What a task asks for, as far as it can be told before it runs; None: only its own code knows."""

    name: str
    fixed_shapes: bool
    preprocesses: bool | None
    evaluates: bool | None

    @classmethod
    def of(cls, task: TrainTask | TrainFunction) -> TaskFacts:
        """Of a task or of a training function."""
        if not isinstance(task, TrainTask):
            return cls(getattr(task, "__name__", type(task).__name__), False, None, None)
        return cls(type(task).__name__, task.fixed_shapes, task.preprocess is not None, task.evaluate is not None)

    def check(self, evaluation_data: str | None) -> None:
        """Hold it against the job.

        Raises:
            TaskError: There is data for an evaluation that the task does not have.
        """
        if evaluation_data is not None and self.evaluates is False:
            raise TaskError(
                f"data.evaluation = {evaluation_data!r} is set, but {self.name} has no evaluate(model, batch). Define "
                "it, such as `return {'loss': self.loss(model, batch)}` with a loss of (sum, weight), or leave "
                "data.evaluation out."
            )


@dataclass(frozen=True)
class NamedTask:
    """A task by `module:Class` or `module:function`, with JSON arguments for a class."""

    name: str
    args: dict[str, Any]

    def load(self) -> TrainTask | TrainFunction:
        """Import and make it.

        Raises:
            TaskError: No such module or name, its arguments do not fit, or what it does when it is imported or made
                raises: says where.
        """
        module_name, separator, attribute = self.name.partition(":")
        if not separator or not attribute:
            raise TaskError(f"task = {self.name!r} is not of the form module:Class, such as my_package.tasks:MyTask.")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise _raised(f"task = {self.name!r}: importing {module_name}", error) from error
            raise TaskError(
                f"task = {self.name!r}: there is no module {error.name!r}.{_nearest_module(module_name)} "
                "Run from the folder that holds it, or install its package."
            ) from None
        except Exception as error:
            raise _raised(f"task = {self.name!r}: importing {module_name}", error) from error
        found = getattr(module, attribute, None)
        if found is None:
            hint = did_you_mean(attribute, (name for name in vars(module) if not name.startswith("_")))
            raise TaskError(f"task = {self.name!r}: module {module_name!r} has no {attribute!r}.{hint}")
        return self._make(found)

    def _make(self, found: Any) -> TrainTask | TrainFunction:
        if not inspect.isclass(found):
            if not callable(found):
                raise TaskError(f"task = {self.name!r} is a {type(found).__name__}, not a TrainTask or a function.")
            if self.args:
                raise TaskError(f"task_args are given, but task = {self.name!r} is a function, which takes none.")
            return found  # type: ignore[no-any-return]
        if not issubclass(found, TrainTask):
            raise TaskError(f"task = {self.name!r} is not a TrainTask. Derive it: class {found.__name__}(TrainTask).")
        if missing := sorted(found.__abstractmethods__):
            raise TaskError(f"task = {self.name!r} lacks {', '.join(missing)}. Define them.")
        try:
            inspect.signature(found).bind(**self.args)
        except TypeError as error:
            raise TaskError(f"task_args = {self.args} do not fit {self.name}: {error}.") from None
        try:
            return found(**self.args)
        except Exception as error:
            raise _raised(f"task = {self.name!r}: {found.__name__}(**task_args)", error) from error


def _raised(what: str, error: Exception) -> TaskError:
    """The user's own error, with the place in the user's own file."""
    if isinstance(error, TaskError):
        return error
    if isinstance(error, SyntaxError):
        return TaskError(f"{what} found a syntax error: {error.msg} ({error.filename}:{error.lineno}).")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return TaskError(f"{what} raised {type(error).__name__}: {error}{where}.")


def code_digest(task: TrainTask | TrainFunction | str | None) -> str:
    """Tells the code of a task from another version of it, for people: the files of its top-level package.

    Args:
        task: The object, or its name `module:Class`.
    """
    module_name = (
        task.partition(":")[0] if isinstance(task, str) else getattr(task, "__module__", type(task).__module__)
    )
    digest = hashlib.sha256()
    for path in _source_files(str(module_name)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _source_files(module_name: str) -> list[Path]:
    if module_name == "__main__":
        return []  # a script or a notebook: what it holds travels with the task
    spec = importlib.util.find_spec(module_name.partition(".")[0])
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        return []  # of a notebook, or an interactive session
    if spec.submodule_search_locations:
        return sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))
    path = Path(str(spec.origin))
    return [path] if path.suffix == ".py" and path.exists() else []


@contextlib.contextmanager
def importable(path: str) -> Iterator[None]:
    """The folder in which a command was started comes first when its task is imported, as in the workers."""
    if path in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)


def _nearest_module(name: str) -> str:
    import pkgutil

    parent, _, last = name.rpartition(".")
    try:
        path = importlib.import_module(parent).__path__ if parent else None
    except (ImportError, AttributeError):
        return ""
    return did_you_mean(last, (module.name for module in pkgutil.iter_modules(path)))
