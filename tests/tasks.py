"""Tasks that tests train; small, in float64, and able to misbehave at a chosen place."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from elastic_trainer.control.events import TaskPhase
from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.run import Run
from elastic_trainer.training.task import TrainTask
from elastic_trainer.vocabulary import Worker
from tests import harness_worker


class Net(nn.Module):
    """With batch-norm, dropout, a constant buffer, and parameters that are used by no sample or by some only."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(features, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, features) -> (rows, 1)."""
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        if float(x[0, 0]) > 0:
            hidden = hidden * self.sometimes
        return self.last(hidden)


def state_digest(*parts: Any) -> str:
    """Digest of all tensors of state dicts."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)

    for part in parts:
        add(part.state_dict())
    return digest.hexdigest()


class NetTask(TrainTask):
    """Regression on columns x (rows, 6) and y (rows,)."""

    def __init__(self, *, evaluate: bool = True, delay_s: float = 0.0, dtype: str = "float64") -> None:
        self.delay_s = delay_s
        self.dtype = getattr(torch, dtype)
        self._evaluates = evaluate

    def build_model(self) -> nn.Module:
        self.model = Net().to(self.dtype)
        return self.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return self.optimizer

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20], gamma=0.5)
        return self.scheduler

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return functional.mse_loss(model(batch["x"].to(self.dtype)).squeeze(1), batch["y"].to(self.dtype))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        error = functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="sum")
        return {"error": (error, batch.rows), "rows": (batch.rows, 1)}

    def train(self, run: Run) -> None:
        super().train(run)
        harness_worker.RESULT.update(
            digest=state_digest(self.model, self.optimizer),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            pid=os.getpid(),
        )


class ExactNet(nn.Module):
    """With batch-norm and dropout; its forward asks the device for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, 6) -> (rows, 1)."""
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class ExactTask(NetTask):
    """Its gradients lie on a grid, so that their sums are exact in any order: the same bits for any number of ranks."""

    def __init__(self, *, optimizer: str = "adamw", delay_s: float = 0.0, fused: bool = True) -> None:
        super().__init__(evaluate=False, delay_s=delay_s, dtype="float32")
        self._name = optimizer
        self._fused = fused

    def build_model(self) -> nn.Module:
        self.model = ExactNet()
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: torch.round(gradient.clamp(-128, 128) * 4096) / 4096)
        return self.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._name == "sgd":
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=self._fused)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=self._fused)
        return self.optimizer


class PoisonedTask(NetTask):
    """Some samples make the loss something else than a number."""

    def __init__(self, samples: list[int], delay_s: float = 0.0) -> None:
        super().__init__(delay_s=delay_s)
        self.samples = set(samples)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss * float("nan") if self.samples & set(batch.sample_ids.tolist()) else loss


class DrawingTask(NetTask):
    """Its preprocess draws, so that Ray Data has something to do."""

    def preprocess(self, row: Any, rng: Any) -> Any:
        return {**row, "x": row["x"] + 0.01 * rng.normal(size=row["x"].shape)}


class TokenTask(NetTask):
    """A loss that is weighted by something else than rows."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = batch["y"].abs()
        error = (model(batch["x"]).squeeze(1) - batch["y"]) ** 2
        return (error * weight).sum(), weight.sum()


class FixedShapeTask(NetTask):
    """Gets short micro-batches filled up."""

    fixed_shapes = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(batch["x"]) == 3, "shapes are not constant"
        weight = batch["row_weight"].double()
        error = (model(batch["x"]).squeeze(1) - batch["y"]) ** 2
        return (error * weight).sum(), weight.sum()


class PlainTask(NetTask):
    """Without batch-norm and dropout, so that one process can do a whole batch at once."""

    def build_model(self) -> nn.Module:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        return self.model


class RaisingTask(NetTask):
    """Raises in a phase, from a step on, on some ranks, some times."""

    def __init__(
        self,
        phase: str,
        *,
        step: int = 0,
        rank: int | None = None,
        worker_id: int | None = None,
        times: int = 1 << 30,
    ) -> None:
        super().__init__()
        self.phase = phase
        self.step = step
        self.rank = rank
        self.worker_id = worker_id
        self.times = times

    def build_model(self) -> nn.Module:
        self._maybe("build")
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.run.steps_done >= self.step:
            self._maybe("loss")
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        self._maybe("evaluate")
        return super().evaluate(model, batch)

    def on_step(self, step: Any) -> None:
        self._maybe("on_step")

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def _maybe(self, phase: str) -> None:
        counted = harness_worker.RESULT.setdefault("raised", 0)
        right_rank = self.rank is None or self.rank == self.run.rank
        right_rank = right_rank and (self.worker_id is None or self.worker_id == self.run.worker.worker_id)
        if phase == self.phase and right_rank and counted < self.times:
            harness_worker.RESULT["raised"] = counted + 1
            raise ValueError(f"raised on purpose in {phase}")


class KillingTask(NetTask):
    """Kills its own process in a phase, once for each first life of the named worker."""

    def __init__(self, phase: str, worker_id: int, step: int = 0) -> None:
        super().__init__()
        self.phase = phase
        self.worker_id = worker_id
        self.step = step

    def build_model(self) -> nn.Module:
        self._maybe("build")
        return super().build_model()

    def preprocess(self, row: Any, rng: Any) -> Any:
        self._maybe("read")
        return row

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        self._maybe("evaluate")
        return super().evaluate(model, batch)

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def _maybe(self, phase: str) -> None:
        worker = self.run.worker
        is_first = worker.worker_id == self.worker_id and worker.incarnation == 0
        if phase == self.phase and is_first and self.run.steps_done >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def gan_like(run: Run) -> None:
    """The loop API with two optimizers that step one after the other within a step."""
    one, two = nn.Linear(6, 4).double(), nn.Linear(4, 1).double()
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9), torch.optim.Adam(two.parameters(), lr=1e-2)]
    run.register(one=one, two=two, first=optimizers[0], second=optimizers[1])
    for step in run.steps():
        with step:
            for optimizer in optimizers:
                for batch in step:
                    error = (two(torch.tanh(one(batch["x"]))).squeeze(1) - batch["y"]) ** 2
                    step.backward(error.sum(), batch.rows)
                step.apply(optimizer)
    harness_worker.RESULT.update(digest=state_digest(one, two, *optimizers))


class SlowEvaluationTask(NetTask):
    """Evaluates for long."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        print("evaluating now", flush=True)
        time.sleep(0.5)
        return super().evaluate(model, batch)


class StuckTask(NetTask):
    """Never comes back from a step."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        print("stuck now", flush=True)
        time.sleep(600)
        return super().loss(model, batch)


class HangingTask(NetTask):
    """Comes to a stand in one way, once, on the first life of a worker."""

    def __init__(self, how: str, worker_id: int, step: int) -> None:
        super().__init__(delay_s=0.002)
        self.how = how
        self.worker_id = worker_id
        self.step = step

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def preprocess(self, row: Any, rng: Any) -> Any:
        if self._is_due("loader", ahead=6):
            threading.Event().wait()
        return row

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        for how in ("deadlock", "spin", "holds the interpreter", "collects garbage"):
            if self._is_due(how):
                getattr(self, f"_{how.replace(' ', '_')}")()
        return super().loss(model, batch)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        self.scheduler = telling_scheduler(optimizer, self._collects)
        return self.scheduler

    def _collects(self) -> None:
        if self._is_due("save") and self.run.position.phase is TaskPhase.SAVE:
            threading.Event().wait()

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        if self._is_due("evaluates long"):
            time.sleep(20)
            self.worker_id = -1
        return super().evaluate(model, batch)

    def on_step(self, step: Any) -> None:
        if self._is_due("calls back long"):
            time.sleep(20)
            self.worker_id = -1

    def _is_due(self, how: str, ahead: int = 0) -> bool:
        worker = self.run.worker
        is_first = worker.worker_id == self.worker_id and worker.incarnation == 0
        return how == self.how and is_first and self.run.steps_done + ahead >= self.step

    def _deadlock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def _spin(self) -> None:
        while True:
            pass

    def _holds_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(3600)  # a call that does not let other threads of Python run

    def _collects_garbage(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            ctypes.PyDLL(None).usleep(0)
            sum(range(2_000_000))
        self.worker_id = -1


def telling_scheduler(optimizer: torch.optim.Optimizer, collects: Callable[[], None]) -> Any:
    """A scheduler that calls `collects` whenever its state is asked for."""

    class Telling(torch.optim.lr_scheduler.MultiStepLR):
        def state_dict(self) -> dict[str, Any]:
            collects()
            return super().state_dict()

    return Telling(optimizer, [10, 20], gamma=0.5)


class SlowToCollectTask(NetTask):
    """Takes its time whenever its state is collected on a worker, and tells in a file in which phase that is."""

    def __init__(self, told: str, seconds: float, delay_s: float = 0.002) -> None:
        super().__init__(evaluate=False, delay_s=delay_s)
        self.told = told
        self.seconds = seconds

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        self.scheduler = telling_scheduler(optimizer, self._collects)
        return self.scheduler

    def _collects(self) -> None:
        with open(self.told, "a") as told:
            told.write(f"{self.run.worker} {self.run.position.phase.value}\n")
        time.sleep(self.seconds)


class SlowBuildTask(NetTask):
    """A worker that replaces another builds its model for long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(delay_s=0.003)
        self.seconds = seconds

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def build_model(self) -> nn.Module:
        if self.run.worker.incarnation > 0:
            time.sleep(self.seconds)
        return super().build_model()


class SlowWorkerTask(NetTask):
    """One worker becomes slow at a step."""

    def __init__(self, worker_id: int, from_step: int) -> None:
        super().__init__(delay_s=0.01)
        self.worker_id = worker_id
        self.from_step = from_step

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.run.worker.worker_id == self.worker_id and self.run.steps_done >= self.from_step:
            time.sleep(0.03)
        return super().loss(model, batch)


class ForkingTask(NetTask):
    """Each worker has a child that would outlive it, in a session of its own."""

    def build_model(self) -> nn.Module:
        subprocess.Popen(["sleep", "1234"], start_new_session=True)
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.002)
        return super().loss(model, batch)


class ShapelessLossTask(NetTask):
    """Forgets to reduce its loss."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]).squeeze(1) - batch["y"]) ** 2


class UnreachableLossTask(NetTask):
    """Detaches its loss."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch).detach()


class WrongColumnTask(NetTask):
    """Wants a column that the data lacks."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch["x"]).squeeze(1), batch["target"])


class RestoredTask(NetTask):
    """Leaves the digest of the state with which each of its attempts begins."""

    def train(self, run: Run) -> None:
        self.run = run
        super().train(run)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if "began_at" not in harness_worker.RESULT:
            harness_worker.RESULT.update(
                began_at=self.run.steps_done, began_with=state_digest(self.model, self.optimizer)
            )
        return super().loss(model, batch)


class UnluckyTask(NetTask):
    """The first group of one worker stands, and it says that it does not."""

    def train(self, run: Run) -> None:
        form, tries = run.backend.form, []

        def form_in_vain(*arguments: Any) -> None:
            form(*arguments)
            tries.append(arguments)
            if len(tries) == 1:
                run.backend.destroy()
                raise CollectiveFailed("the first formation fails here")

        if run.worker == Worker(1, 0):
            run.backend.form = form_in_vain
        super().train(run)
