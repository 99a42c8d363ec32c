"""The loop API: what a training function gets, and the life of a worker through generations.

    def train(run):
        model, optimizer = run.register(model=build(), optimizer=...)
        for step in run.steps():
            with step:
                for batch in step:
                    step.backward(*loss_and_weight(model, batch))
                step.apply(optimizer)

A generation here is: wait for the order, form the group, agree on whose state is most advanced, bring the others up to
it, then step until the last step, a fault, or a step boundary at which the group is to change.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_trainer.control.effects import EndRun, FormGeneration, RunTaskAgain
from elastic_trainer.control.events import (
    GenerationJoined,
    GroupFormed,
    GroupLeft,
    Left,
    TaskPhase,
    WorkerFinished,
    WorkerWarm,
)
from elastic_trainer.data.batch_plan import range_of
from elastic_trainer.data.direct import DirectSource, Preprocess
from elastic_trainer.data.engine import DataEngine, SpanSource
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import CollectiveFailed, StepAborted, TaskError
from elastic_trainer.observability.lines import EvaluationLine, NoteLine, StepLine
from elastic_trainer.training.batches import Batch, Collate
from elastic_trainer.training.boundary import Boundary
from elastic_trainer.training.buffers import LogicalBuffers
from elastic_trainer.training.evaluation import evaluate
from elastic_trainer.training.feed import Feed
from elastic_trainer.training.gate import Gate
from elastic_trainer.training.given_out import GivenOut
from elastic_trainer.training.held_state import CarriedState, HeldState, NotRestored
from elastic_trainer.training.mailbox import Mailbox
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.reducer import Reducer, check_parameters, parameters_of
from elastic_trainer.training.saver import Place, Saver
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.state import RegisteredState, Stateful
from elastic_trainer.training.step import Step
from elastic_trainer.vocabulary import RunStatus, Token, Worker

Evaluate = Callable[[Batch], Mapping[str, tuple[Any, Any]]]
NEVER_S = (
    3600.0  # one look at the mailbox; the wait as a whole is bounded by the controller's life, which the agent sees
)


class RunEnded(BaseException):
    """Unwinds the user's function when the run has failed elsewhere; not an Exception, so that nobody catches it."""


class Run:
    """A worker's view of the run. Users take `register()`, `steps()` and the public attributes.

    Attributes:
        settings: The run's fixed numbers.
        rank: Data rank in the present generation.
        world_size: Data ranks of the present generation.
        device: Where this worker computes; batches come there by themselves.
        on_done: Called with each done step in turn, on every rank. On a GPU the code behind `with step:` runs before
            it is known whether the step is done, so that it may run again for the same number.
    """

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        mailbox: Mailbox,
        backend: ProcessGroupBackend,
        *,
        saver: Saver,
        attempt: int = 0,
        carried: CarriedState | None = None,
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.mailbox = mailbox
        self.backend = backend
        self.saver = saver
        self.attempt = attempt
        self.position = mailbox.position
        self.position.has_pace = backend.device.ahead == 0
        self.position.enter(TaskPhase.BUILD)
        self.device = backend.device.torch_device
        self.rank = 0
        self.world_size = 0
        self.token = Token(0, 0)
        self.logical_ranks = range(0)
        self.held = HeldState(carried)
        self.reducers: dict[int, Reducer] = {}
        self.buffers = LogicalBuffers([], backend)
        self.collate: Collate | None = None
        self.preprocess: Preprocess | None = None
        self.is_in_group = False
        self.has_ended = False  # the run, for a reason that is no failure
        self.left_out: frozenset[int] = frozenset()  # steps that update nothing, since the run went back for them
        self.gate: Gate | None = None  # where the device runs behind the host
        self.on_done: Callable[[Step], None] | None = None
        self.given_out = GivenOut(self._complete, settings.collective_s)
        self._boundary = Boundary(self)
        self._is_judged_here = False  # the task changes state behind updates, where no verdict of the device reaches it
        self._versions: int | None = None  # of the registered tensors when the last step ended
        self._last_done_at = 0.0
        self._feed: Feed | None = None
        self._evaluation_reader: DatasetReader | None = None

    # ---- for the user

    def register(self, **parts: Stateful) -> Any:
        """Name what is broadcast to newcomers and survives a replacement: models, optimizers, schedulers, others.

        Nothing else outlives a worker's process. Call it once, before `steps()`.

        Returns:
            The parts in the order given; a single part by itself.

        Raises:
            TaskError: Called twice, or a part has no `state_dict()` and `load_state_dict()`.
        """
        if self.held.is_registered:
            raise TaskError("run.register() was called twice. Register everything in one call.")
        state = RegisteredState(parts)
        if not state.optimizers():
            raise TaskError("run.register() got no optimizer. Register the model and its optimizer.")
        check_parameters(state.optimizers(), self.device)
        self.held.register(state)
        values = tuple(parts.values())
        return values[0] if len(values) == 1 else values

    def steps(self, *, evaluate: Evaluate | None = None, overlap: bool = True) -> Iterator[Step]:
        """The run's steps, in order; a step that a change of membership interrupts comes again.

        Args:
            evaluate: Gets a batch of evaluation data, returns `{name: (sum, weight)}`; called with gradients off.
            overlap: Reduce gradients during the last backward of a step.

        Raises:
            TaskError: Nothing was registered.
        """
        if not self.held.is_registered:
            raise TaskError("run.steps() needs run.register(model=..., optimizer=...) before it.")
        self._make_ready(self.held.registered)
        self.mailbox.report(WorkerWarm(self.worker, self.attempt, self.held.holds))
        while (order := self._next_order()) is not None:
            try:
                self._join(order)
                yield from self._generation(evaluate, overlap)
            except NotRestored as error:
                self._leave(Left.NOT_RESTORED, str(error))
            except (StepAborted, CollectiveFailed) as error:
                self._leave(Left.ORDERED if isinstance(error, StepAborted) else Left.COLLECTIVE_FAILED, str(error))
            except RuntimeError as error:
                if not self.backend.is_collective_error(error):
                    raise
                detail = str(error)
                error.__traceback__ = None
                del error
                self._leave(Left.COLLECTIVE_FAILED, detail)

    @property
    def steps_done(self) -> int:
        """Done steps that the registered state contains."""
        return self.held.steps

    # ---- for Step

    @property
    def feed(self) -> Feed:
        """Makes this worker's micro-batches."""
        assert self._feed is not None
        return self._feed

    def raise_if_aborted(self) -> None:
        """Give the step up when that has been ordered."""
        if self.mailbox.is_aborted(self.token):
            raise StepAborted(self.mailbox.abort_reason)

    def raise_if_evaluation_is_pointless(self) -> None:
        """Give an evaluation up for an abort, and for a stop too: the state stands at a step boundary already."""
        if self.mailbox.wants_stop(self.token):
            raise StepAborted("stopped")
        self.raise_if_aborted()

    def renew_reducers(self) -> None:
        """Reduce what is trained now: a task may freeze parameters, or add some, at a step that its code names."""
        for optimizer in self.held.registered.optimizers():
            present = self.reducers.get(id(optimizer))
            if present is None or not present.fits(optimizer):
                if present is not None:
                    present.release()
                self.reducers[id(optimizer)] = Reducer(parameters_of(optimizer), self.backend)

    # ---- a worker's life

    def carry(self) -> CarriedState | None:
        """The state to enter the task with again after it raised; None when there is no whole one."""
        self._undo()
        return self.held.carry()

    def close(self) -> None:
        """Free the group and the data engine."""
        if self.is_in_group:
            self.backend.abort()
            self._leave_group()
        for reducer in self.reducers.values():
            reducer.release()
        if self._feed is not None:
            self._feed.close()

    def _make_ready(self, state: RegisteredState) -> None:
        settings = self.settings
        engine = DataEngine(settings.plan, self._span_source(), self.note)
        self._feed = Feed(engine, settings.seed, self.collate, self.device)
        if settings.evaluation_data is not None:
            self._evaluation_reader = DatasetReader(settings.evaluation_data, options=settings.data_options)
        self.renew_reducers()
        self.buffers = LogicalBuffers(state.modules(), self.backend)

    def _span_source(self) -> SpanSource:
        settings, order = self.settings, self.settings.plan.order
        reader = DatasetReader(settings.train_data, options=settings.data_options)
        direct = DirectSource(reader, order, self.preprocess)
        if settings.routing is None:
            return direct
        from elastic_trainer.data.routed import RoutedSource  # Ray Data takes a second to import

        return RoutedSource(settings.run_name, order, direct, self.note)

    def _next_order(self) -> FormGeneration | None:
        self.position.enter(TaskPhase.WAIT)
        while True:
            order = self.mailbox.take(NEVER_S)
            match order:
                case FormGeneration() if self.worker in order.ranks:
                    return order
                case EndRun():
                    if order.status is RunStatus.FAILED:
                        raise RunEnded
                    self.has_ended = True
                    return None
                case FormGeneration() | RunTaskAgain() | None:
                    continue  # not for a worker that waits outside the group

    def _join(self, order: FormGeneration) -> None:
        self.token = order.token
        self.rank = order.ranks.index(self.worker)
        self.world_size = len(order.ranks)
        self.logical_ranks = range_of(self.rank, self.world_size, self.settings.plan.order.logical_ranks, order.shares)
        self.position.enter(TaskPhase.FORM, self.steps_done)
        self.backend.form(
            order.token, self.rank, self.world_size, order.store, lambda: self.mailbox.is_superseded(order.token)
        )
        self.is_in_group = True
        self._boundary.forget()
        self.left_out = frozenset(order.rollback.skipped) if order.rollback is not None else frozenset()
        self.mailbox.report(GroupFormed(self.worker, self.token))
        self.buffers.forget_agreement()
        self.position.enter(TaskPhase.STATE)
        self.held.come_up_to(
            order, self.rank, self.settings, self.backend, self.saver, check=self.raise_if_aborted, note=self.note
        )
        if self.backend.device.ahead > 0:
            self.gate = Gate(self.backend, self.world_size, self.steps_done)
            self._versions = None
            if self._is_judged_here:
                self.gate.close()
        self.mailbox.report(GenerationJoined(self.worker, self.token, self.steps_done, os.getpid()))

    def _generation(self, evaluate_batch: Evaluate | None, overlap: bool) -> Iterator[Step]:
        self._evaluate_if_due(evaluate_batch)
        while (number := self.steps_done + len(self.given_out)) < self.settings.steps:
            self.raise_if_aborted()
            step = Step(self, number, overlap=overlap)
            yield step
            if not step.is_done:
                self._give_up(step)
            leaves = self._boundary.come_to(step, evaluates=evaluate_batch is not None)
            if leaves is Left.STOPPED:
                self.saver.save_last(self.held.registered, self._place(), self.raise_if_aborted)
            elif leaves is None:
                self._evaluate_if_due(evaluate_batch)
            if self.saver.is_agreed:
                self.saver.save(self.held.registered, self._place())
            self.position.enter(TaskPhase.BETWEEN, step.number + 1)
            if leaves is not None:
                return self._leave(leaves, "")
        self.saver.save_last(self.held.registered, self._place(), self.raise_if_aborted)
        self.position.enter(TaskPhase.END)
        self.mailbox.report(WorkerFinished(self.worker, self.token))
        # a member to the end: another rank may die in its last step and need this one's state
        self.mailbox.await_verdict(self.token)
        self.raise_if_aborted()

    def _give_up(self, step: Step) -> None:
        if step.left_because is None:
            raise TaskError(f"step {step.number} was not entered. Write: for step in run.steps(): with step: ...")
        if step.left_because:
            raise CollectiveFailed(step.left_because)
        raise StepAborted(self.mailbox.abort_reason)

    def sees_change(self, versions: int | None = None) -> bool:
        """Whether the task has changed what is registered since then: from now on steps are judged on the host.

        `versions`: of the tensors, behind the update; None: when the last step ended.
        """
        if self.gate is None:
            return False
        before = self._versions if versions is None else versions
        self._versions = self.held.registered.versions()
        has_changed = before is not None and before != self._versions
        if has_changed:
            self._is_judged_here = True
            self.gate.close()
        return has_changed

    def give_out(self, step: Step) -> None:
        """The host is through with this step; it is done when the device is."""
        self.held.end_update()
        self.buffers.end()
        self.given_out.add(step)

    def _complete(self, step: Step) -> None:
        """The step is done on this rank."""
        assert step.total is not None
        total = step.total
        self.held.complete_step()
        now = time.perf_counter()
        seconds, self._last_done_at = now - max(step.started, self._last_done_at), now
        self._boundary.heard(step.number, total)
        self.mailbox.record(
            StepLine(
                step=step.number,
                token=self.token,
                samples=total.samples,
                digest=total.digest,
                loss=total.loss_sum / total.weight if total.weight else math.nan,
                world_size=self.world_size,
                done_at=time.time(),
                step_s=seconds,
                data_wait_s=step.data_wait_s,
                skipped=step.skipped,
            )
        )
        if self.on_done is not None:
            self.position.enter(TaskPhase.BETWEEN)
            self.on_done(step)

    def _evaluate_if_due(self, evaluate_batch: Evaluate | None) -> None:
        if evaluate_batch is None or self._evaluation_reader is None:
            return
        if self.held.evaluated_at == self.steps_done or not self.settings.evaluation_is_due(self.steps_done):
            return
        values = evaluate(self, self._evaluation_reader, self.held.registered.modules(), evaluate_batch)
        self.held.evaluated_at = self.steps_done
        self._versions = None  # it resets buffers
        self.mailbox.record(EvaluationLine(self.steps_done, self.token, values))

    def note(self, text: str) -> None:
        """Tell people something through the run's events."""
        self.mailbox.record(NoteLine(str(self.worker), text))

    def _leave(self, cause: Left, detail: str) -> None:
        if cause in (Left.COLLECTIVE_FAILED, Left.ORDERED):
            self.backend.abort()
        self._undo()
        self._leave_group()
        holds = self.held.holds
        if holds is not None and cause is Left.ORDERED and self.mailbox.wants_stop(self.token):
            # an evaluation was given up because the run ends: the state stands at a step boundary
            self.saver.save_last(self.held.registered, self._place(), lambda: None)
        self.mailbox.report(GroupLeft(self.worker, self.token, cause, holds, detail))

    def _place(self) -> Place:
        return Place(self.steps_done, self.token, self.held.evaluated_at, self.rank, self.world_size)

    def _leave_group(self) -> None:
        self.backend.destroy()
        self.is_in_group = False
        self.gate = None

    def _undo(self) -> None:
        """Take back what unfinished steps changed; where the device runs behind the host, the group is aborted."""
        self.backend.device.synchronize()
        self.given_out.give_up(self.held)
        for reducer in self.reducers.values():
            reducer.abandon()
        self.buffers.restore()
        self.held.undo()
