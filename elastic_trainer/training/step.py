"""One optimizer step of the loop API, from its micro-batches to the applied update.

with step:
    for batch in step:
        step.backward(loss_sum, weight)
    step.apply(optimizer)
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastic_trainer.control.events import TaskPhase
from elastic_trainer.errors import CollectiveFailed, StepAborted, TaskError
from elastic_trainer.training import precision
from elastic_trainer.training.batches import Batch
from elastic_trainer.training.device import Fetched
from elastic_trainer.training.feed import StepWork
from elastic_trainer.training.process_group import Pending
from elastic_trainer.training.randomness import seed_everything
from elastic_trainer.training.rider import LOSS_SUM, WEIGHT, Rider

if TYPE_CHECKING:
    from elastic_trainer.training.gate import Gate
    from elastic_trainer.training.reducer import Reducer
    from elastic_trainer.training.run import Run


class Step:
    """A step in progress. Not made by users: `run.steps()` yields it.

    Attributes:
        number: Counted from 0 over the whole run; the same number comes again after a change of membership.
    """

    def __init__(self, run: Run, number: int, *, overlap: bool) -> None:
        self._run = run
        self.number = number
        self._overlap = overlap
        self._consumed = 0
        self._weight = 0.0
        self._loss_sum = 0.0
        self._sums_there: torch.Tensor | None = None  # (weight, loss sum), as far as only the device knows them
        self._rider_tensor: torch.Tensor | None = None
        self._rider_work: Pending | None = None
        self._is_last_done = False  # the last backward, whose gradients are sent as they come
        self.applies = 0
        self.is_done = False  # the last micro-batch, `apply()` and the block are behind it
        self.total: Rider | None = None  # over all ranks, once the host has it
        self.skipped: str = ""  # why its update was left out; such a step counts as done
        self.left_because: str | None = None  # set when the step was given up
        self._verdict: Fetched | None = None  # of a step that is judged on the device
        self.host_part: dict[str, Any] = {}  # of the state before such a step
        self.is_mixed = False  # such a step, and the task changed the state behind its update, which may be none
        self.started = time.perf_counter()

    def __iter__(self) -> Iterator[Batch]:
        """This worker's micro-batches, each with its own random stream and its logical rank's buffers."""
        run = self._run
        self._consumed = 0
        for place, planned in enumerate(self._work.planned):
            run.position.enter(TaskPhase.DATA)
            run.raise_if_aborted()
            seed_everything(self._work.streams[place])
            batch = run.feed.batch(self._work, place, run.raise_if_aborted)
            run.buffers.enter(planned.logical_rank)
            self._consumed += 1
            run.position.enter(TaskPhase.LOSS)
            with precision.forward(run.settings.precision, run.device):
                yield batch

    def backward(self, loss_sum: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Add a micro-batch's gradients.

        Args:
            loss_sum: Scalar; the sum of the losses of the micro-batch's samples or tokens, not their mean.
            weight: How many samples or tokens it sums over; the step's gradient is divided by the sum of the weights.

        Raises:
            TaskError: The loss is not a scalar or has no gradient.
        """
        _check_loss(loss_sum)
        if self._is_last_done:
            raise TaskError(
                f"backward ran twice on the last micro-batch of step {self.number}, and gradients were on their way "
                "already. Pass run.steps(overlap=False)."
            )
        self._add(weight, loss_sum.detach())
        reducers = self._run.reducers.values()
        for reducer in reducers:
            reducer.check_kept()
        if self._overlap and len(reducers) == 1 and self._consumed == len(self._work.planned):
            self._is_last_done = True
            for reducer in reducers:
                reducer.arm()
        with precision.backward(self._run.settings.precision, self._run.device):
            loss_sum.backward()
        for reducer in reducers:
            reducer.keep()

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the gradients of all ranks, scale and clip them, and step `optimizer`.

        Where the loss or a gradient of any rank is not a finite number, no rank updates anything in this step.

        Raises:
            TaskError: The optimizer is not registered, or micro-batches were left out.
        """
        run = self._run
        run.position.enter(TaskPhase.APPLY)
        reducer = run.reducers.get(id(optimizer))
        if reducer is None:
            raise TaskError("step.apply() got an optimizer that is not registered. Use run.register(optimizer=...).")
        if self.applies and len(run.reducers) == 1:
            raise TaskError(
                f"step.apply() ran twice in step {self.number} with one optimizer. A step is one update of each "
                "optimizer: begin another step, or register several optimizers."
            )
        if self._consumed < len(self._work.planned):
            raise TaskError(
                f"step {self.number} consumed {self._consumed} of {len(self._work.planned)} micro-batches before "
                "step.apply(). Go through all of them: for batch in step: ..."
            )
        if run.gate is not None:
            run.position.enter(TaskPhase.REDUCE)  # the device may be behind, and wait for others
        reducer.launch()
        self._launch_rider()
        if len(run.reducers) == 1 and self.number + 1 < run.settings.steps:
            run.feed.look_ahead(self.number + 1, run.logical_ranks)  # while the gradients travel
        run.position.enter(TaskPhase.REDUCE)
        if run.gate is not None and self._can_be_judged_there(run.gate, optimizer, reducer):
            self._apply_there(run.gate, optimizer, reducer)
        else:
            self._apply_here(optimizer, reducer)
        self.applies += 1
        self._weight = self._loss_sum = 0.0
        self._sums_there = None
        for each in run.reducers.values():
            each.zero()
        run.buffers.begin()
        if run.gate is not None:
            self._versions = run.held.registered.versions()
        run.position.enter(TaskPhase.BETWEEN)  # schedulers, logs: whatever the task does until it goes on

    def _apply_here(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        """Wait for everything, judge it on the host, and update."""
        run = self._run
        work, tensor = self._take_rider()
        work.wait_on_host()
        total = Rider.from_tensor(tensor.cpu())
        total.check_steps(self.number, run.world_size)
        if total.changed_buffers:
            run.buffers.agree()
        run.buffers.reduce()
        reducer.wait()
        if run.gate is not None:
            run.gate.launch(self.number)
            run.gate.confirm()
        run.position.enter(TaskPhase.APPLY)
        # from here on the step is whole on this rank: no collective of it is left
        self._judge(total, reducer)
        if not self.skipped:
            run.held.begin_update()
            run.buffers.commit()
            optimizer.step()
            reducer.has_updated = reducer.has_updated or reducer.uses_everything
        if self.applies == 0:
            self.total = total

    def _can_be_judged_there(self, gate: Gate, optimizer: torch.optim.Optimizer, reducer: Reducer) -> bool:
        """Whether this step's update can depend on what the device finds; each rank decides for itself.

        Not before the optimizer has made all of its state: a fused one whose first step is left out keeps what lay in
        memory. Nor with parameters of low precision, where a scale on the device would be rounded as they are.
        """
        run = self._run
        return (
            gate.is_open
            and len(run.reducers) == 1
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in optimizer.param_groups)  # as loaded, whatever it was made with
            and reducer.is_precise
            and run.held.registered.lies_on_device
            and run.buffers.are_agreed
            and reducer.has_updated
            and reducer.uses_everything
        )

    @torch.no_grad()
    def _apply_there(self, gate: Gate, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        """The same on the device, which judges when it gets there; waits for nothing."""
        run = self._run
        work, rider = self._take_rider()
        run.buffers.reduce()
        gate.launch(self.number)
        work.wait()
        reducer.wait()
        has_arrived = gate.verdict()
        weight = rider[WEIGHT : WEIGHT + 1]
        is_finite_loss = torch.isfinite(rider[LOSS_SUM : LOSS_SUM + 1])
        is_finite = reducer.scale_and_clip_there(1.0 / weight.reshape(()), run.settings.clip_norm)
        # none counts behind one that does not
        is_complete = has_arrived & (gate.count == float(self.number)) & ((weight > 0) | ~is_finite_loss)
        is_update = is_complete & is_finite & is_finite_loss
        if self.number in run.left_out:
            is_update = torch.zeros_like(is_update)
        run.held.begin_update()
        run.buffers.commit(is_update.reshape(()))
        optimizer.found_inf = (~is_update).to(torch.float32).reshape(())  # type: ignore[attr-defined]  # 1: no update, exactly
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
        gate.count.add_(is_complete)
        flags = [flag.to(torch.float64) for flag in (has_arrived, is_complete, is_finite)]
        self._verdict = run.backend.device.fetch(torch.cat([*flags, rider]))

    @property
    def has_arrived(self) -> bool:
        """Whether the host knows how the step ended."""
        return self._verdict is None or self._verdict.is_there()

    def settle(self) -> bool:
        """Take what the device found, once it has arrived; returns whether the step is complete on this rank.

        Raises:
            TaskError: The step has no weight.
            AssertionError: The ranks are not where they believe to be.
        """
        if self._verdict is None:
            return True
        has_arrived, is_complete, is_finite, *_ = self._verdict.value().numpy().tolist()
        if not has_arrived:
            return False
        total = Rider.from_tensor(self._verdict.value()[3:])
        total.check_steps(self.number, self._run.world_size)
        if total.changed_buffers:
            raise AssertionError(f"buffers changed in step {self.number} that ranks had not agreed to reduce")
        self._find_reason(total, bool(is_finite))
        if not is_complete:
            total.scale(self.number)  # raises where there is no weight; else it follows one that is not complete
            return False
        self.total, self._verdict = total, None
        return True

    def _judge(self, total: Rider, reducer: Reducer) -> None:
        """Scale the gradients, or say why the step is left out; every rank comes to the same, from the same sums."""
        if self.skipped:
            return
        self._find_reason(total, True)
        if not self.skipped:
            is_finite = reducer.scale_and_clip(total.scale(self.number), self._run.settings.clip_norm)
            self._find_reason(total, is_finite)
        if self.skipped and self.applies:
            self._run.held.take_back()  # what other optimizers have done in this step

    def _find_reason(self, total: Rider, is_finite: bool) -> None:
        if self.number in self._run.left_out:
            self.skipped = "the run went back to leave it out"
        elif not math.isfinite(total.loss_sum):
            self.skipped = "the loss is not a finite number"
        elif not is_finite:
            self.skipped = "a gradient is not a finite number"

    def _add(self, weight: float | torch.Tensor, loss_sum: torch.Tensor) -> None:
        if self._run.gate is None:
            self._weight += float(weight)
            self._loss_sum += float(loss_sum)
            return
        is_known = not isinstance(weight, torch.Tensor)
        values = [torch.zeros_like(loss_sum) if is_known else torch.as_tensor(weight).detach(), loss_sum]
        sums = torch.stack([value.reshape(()).to(loss_sum.device, torch.float64) for value in values])
        self._weight += float(weight) if is_known else 0.0
        self._sums_there = sums if self._sums_there is None else self._sums_there + sums

    def _take_rider(self) -> tuple[Pending, torch.Tensor]:
        assert self._rider_work is not None
        assert self._rider_tensor is not None
        taken = self._rider_work, self._rider_tensor
        self._rider_work = self._rider_tensor = None
        return taken

    def _launch_rider(self) -> None:
        run = self._run
        # a further apply() of the same step, by another optimizer, trains the same samples
        samples, digest = (self._work.samples, self._work.digest) if self.applies == 0 else (0, 0)
        rider = Rider(
            self._weight,
            self._loss_sum,
            self.number,
            samples,
            digest,
            int(run.mailbox.wants_park(run.token)),
            int(run.mailbox.wants_stop(run.token)),
            run.buffers.unagreed,
            int(run.saver.is_due(self.number + 1)),
            int(run.saver.is_busy),
        )
        self._rider_tensor = run.backend.device.upload(rider.to_tensor())
        if self._sums_there is not None:
            self._rider_tensor[WEIGHT : LOSS_SUM + 1].add_(self._sums_there)
        self._rider_work = run.backend.all_reduce(self._rider_tensor)

    def __enter__(self) -> Step:
        run = self._run
        self.started = time.perf_counter()
        run.position.enter(TaskPhase.DATA, self.number)
        if run.sees_change():  # behind the block of the step before
            run.given_out.mix()
        self._waited = run.feed.wait_s
        self._work = run.feed.begin(self.number, run.logical_ranks)
        run.buffers.begin()
        run.renew_reducers()
        for reducer in run.reducers.values():
            reducer.zero()
        if len(run.reducers) > 1:  # the step can stop in between their updates
            run.held.take_snapshot()
        if run.gate is not None:
            self.host_part = run.held.registered.host_part()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool:
        if error is None:
            if self.applies == 0:
                raise TaskError(f"step {self.number} ended without step.apply(optimizer).")
            self.is_done = True
            if self._run.gate is not None and self._verdict is None:  # where the device judged it, it has counted it
                self._run.gate.count.add_(1)
            self.is_mixed = self._run.sees_change(self._versions) and self._verdict is not None
            self.data_wait_s = self._run.feed.wait_s - self._waited
            self._run.give_out(self)
            return False
        is_ours = isinstance(error, StepAborted | CollectiveFailed) or self._run.backend.is_collective_error(error)
        self._rider_work = self._rider_tensor = None
        if is_ours:
            self.left_because = "" if isinstance(error, StepAborted) else str(error)
            # the frames hold works and tensors of the group, and with them its sockets
            traceback.clear_frames(frames)
            error.__traceback__ = None
        return is_ours

    def note(self, text: str) -> None:
        """Tell people something: it appears among the run's news and in its events."""
        self._run.note(text)

    data_wait_s: float = 0.0  # that the step waited for data, once it is over

    # from __enter__ on
    _waited: float = 0.0
    _versions: int = 0
    _work: StepWork


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"the loss is a {type(loss).__name__}, not a tensor. Return a scalar tensor.")
    if loss.numel() != 1:
        raise TaskError(
            f"the loss has shape {tuple(loss.shape)}, not one element. Reduce it: loss.mean(), or (loss.sum(), weight)."
        )
    if not loss.requires_grad:
        raise TaskError(
            "the loss has no gradient: it depends on no parameter that requires one. Check for detach(), .item(), "
            "torch.no_grad() or frozen parameters between the model and the loss."
        )
