"""One pass over the evaluation data by the whole group, its sums reduced at the end.

Rows are dealt by logical rank and in micro-batches, so neither the shapes nor the parts of the sums depend on the world
size. A death on the way shows at the latest in the reduction, and earlier by the controller's order; then the pass
starts again in the next generation.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_trainer.control.events import TaskPhase
from elastic_trainer.data.batch_plan import MicroBatchPlan, evaluation_rows
from elastic_trainer.data.dataset import Named
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import TaskError
from elastic_trainer.training import precision
from elastic_trainer.training.batches import Batch

if TYPE_CHECKING:
    from elastic_trainer.training.run import Evaluate, Run

Sums = dict[str, tuple[float, float]]


def evaluate(
    run: Run, reader: DatasetReader, modules: Sequence[torch.nn.Module], evaluate_batch: Evaluate
) -> dict[str, float]:
    """The task's values over all evaluation data: for each name the sum over the weight.

    Raises:
        StepAborted: The generation is to be given up.
        RuntimeError: A collective failed.
        TaskError: The task returned something else than `{name: (sum, weight)}`.
    """
    sums: Sums = {}
    run.buffers.begin()
    with _evaluating(modules), torch.no_grad(), precision.forward(run.settings.precision, run.device):
        for batch in _batches(run, reader):
            run.position.enter(TaskPhase.EVALUATE)
            run.raise_if_evaluation_is_pointless()
            _add(sums, evaluate_batch(batch))
        run.position.enter(TaskPhase.EVALUATE)
        if not sums:  # without rows of its own a rank learns the names from a row that it does not count
            probe = evaluate_batch(_batch(run, reader, 0, range(1)))
            sums = dict.fromkeys(_checked(probe), (0.0, 0.0))
    run.buffers.restore()
    return _reduced(sums, run)


@contextmanager
def _evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    # of each part by itself: a task may have set some of them to eval() for good
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, was_training in zip(parts, modes, strict=True):
            part.training = was_training


def _batches(run: Run, reader: DatasetReader) -> Iterator[Batch]:
    plan = run.settings.plan
    for logical_rank in run.logical_ranks:
        rows = evaluation_rows(reader.index.rows, logical_rank, plan.order.logical_ranks)
        for low in range(rows.start, rows.stop, plan.micro_batch):
            yield _batch(run, reader, logical_rank, range(low, min(low + plan.micro_batch, rows.stop)))


def _batch(run: Run, reader: DatasetReader, logical_rank: int, rows: range) -> Batch:
    ids = np.arange(rows.start, rows.stop, dtype=np.int64)
    planned = MicroBatchPlan(run.steps_done, logical_rank, 0, ids, len(ids))
    if run.settings.plan.fixed_shapes:
        planned = MicroBatchPlan(
            run.steps_done, logical_rank, 0, np.resize(ids, run.settings.plan.micro_batch), len(ids)
        )
    columns = reader.rows(planned.ids)
    data: Any = columns
    if run.preprocess is not None:
        rng = [np.random.Generator(np.random.Philox(key=int(sample))) for sample in planned.ids]
        named = [Named({name: values[i] for name, values in columns.items()}) for i in range(len(planned.ids))]
        data = [run.preprocess(row, each) for row, each in zip(named, rng, strict=True)]
    return run.feed.make(planned, data)


def _checked(found: object) -> Mapping[str, tuple[Any, Any]]:
    ok = isinstance(found, Mapping) and all(isinstance(v, tuple) and len(v) == 2 for v in found.values())
    if not ok or not found:
        raise TaskError(
            f"evaluate() returned {found!r}. Return a dict of pairs: {{'accuracy': (number right, number of rows)}}."
        )
    assert isinstance(found, Mapping)
    return found


def _add(sums: Sums, found: object) -> None:
    for name, (total, weight) in _checked(found).items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + float(total), before[1] + float(weight))


def _reduced(sums: Sums, run: Run) -> dict[str, float]:
    run.position.enter(TaskPhase.REDUCE)
    names = sorted(sums)
    agreed = torch.tensor([zlib.crc32("\n".join(names).encode())], dtype=torch.float64)
    mine = float(agreed)
    run.backend.all_reduce(agreed).wait_on_host()
    if float(agreed) != mine * run.world_size:
        raise TaskError(
            f"evaluate() returned other names on other ranks; here {names}. Return the same for each batch."
        )
    pairs = torch.tensor([sums[name] for name in names], dtype=torch.float64)  # (names, 2)
    run.backend.all_reduce(pairs).wait_on_host()
    return {name: float(total / weight) for name, (total, weight) in zip(names, pairs, strict=True)}
