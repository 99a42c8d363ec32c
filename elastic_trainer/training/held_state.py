"""What a worker holds of the run: its registered state, how many steps that contains, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.control.effects import FormGeneration
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.training import state as transfer
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.saver import Saver, restore_from
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.state import RegisteredState
from elastic_trainer.vocabulary import NO_GENERATION, Token


class NotRestored(Exception):
    """No member of a generation that begins at a saved step could restore one."""


@dataclass(frozen=True)
class CarriedState:
    """What a task that raised had registered, for the next attempt in the same process."""

    state: dict[str, Any]
    steps: int
    evaluated_at: int
    joined: Token


class HeldState:
    """The state of one attempt at the task.

    Attributes:
        steps: Done steps that it contains.
        evaluated_at: Steps after which it was last evaluated.
        joined: The generation in which it last agreed with others.
    """

    def __init__(self, carried: CarriedState | None) -> None:
        self.steps = carried.steps if carried else 0
        self.evaluated_at = carried.evaluated_at if carried else 0
        self.joined = carried.joined if carried else NO_GENERATION
        self._is_present = carried is not None
        self._is_whole = True  # False while an update is half applied
        self._carried = carried
        self._registered: RegisteredState | None = None
        self._snapshot: dict[str, Any] | None = None

    @property
    def is_registered(self) -> bool:
        """Whether the task has registered its parts."""
        return self._registered is not None

    @property
    def registered(self) -> RegisteredState:
        """The parts that the task registered."""
        assert self._registered is not None
        return self._registered

    @property
    def holds(self) -> int | None:
        """Done steps of the state, None when this worker has none that counts."""
        return self.steps if self._is_present else None

    def register(self, state: RegisteredState) -> None:
        """The task's parts; they get what an earlier attempt carried over."""
        self._registered = state
        if self._carried is not None:
            state.restore(self._carried.state)
            self._carried = None

    def carry(self) -> CarriedState | None:
        """The state to enter the task with again after it raised; None when there is no whole one."""
        if self._carried is not None or self._registered is None:
            return self._carried  # not restored yet, or not wholly
        if not self._is_present:
            return None
        return CarriedState(transfer.copied(self._registered.collect()), self.steps, self.evaluated_at, self.joined)

    # ---- a step

    def take_snapshot(self) -> None:
        """Keep a copy, for a step that can stop half applied."""
        self._snapshot = transfer.copied(self.registered.collect())

    def begin_update(self) -> None:
        """From here until the step is complete the state is neither that before the step nor that after it."""
        self._is_whole = False

    def end_update(self) -> None:
        """The step is over: the state is whole, before that step or after it."""
        self._is_whole = True
        self._snapshot = None

    def complete_step(self) -> None:
        """A step more has been applied."""
        self.steps += 1

    def lose(self) -> None:
        """What is held is no state of the run."""
        self._is_present = False

    def take_back(self) -> None:
        """Undo the updates of the step so far; the step goes on."""
        assert self._snapshot is not None
        self.registered.restore(self._snapshot)
        self._is_whole = True

    def undo(self) -> None:
        """Take back what an unfinished step changed; without a copy of it the state is lost."""
        if not self._is_whole:
            if self._snapshot is not None:
                self.registered.restore(self._snapshot)
            else:
                self.lose()
            self._is_whole = True
        self._snapshot = None

    # ---- a generation

    def come_up_to(
        self,
        order: FormGeneration,
        rank: int,
        settings: TrainSettings,
        backend: ProcessGroupBackend,
        saver: Saver,
        *,
        check: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """Bring all members to one state: the newest that a member holds or that was saved.

        Raises:
            NotRestored: The generation begins at a saved step, and no member could read one.
        """
        if order.rollback is not None and self.joined < order.rollback.since:
            self._is_present = False
        backend.device.synchronize()  # what is read goes into the tensors past the device
        problems = self._restore(order, saver, check)
        for problem in problems:
            note(f"cannot restore {problem}")
        mine = torch.tensor([self.steps if self._is_present else -1, self.evaluated_at], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in order.ranks]
        backend.all_gather(gathered, mine).wait_on_host()
        steps = [int(each[0]) for each in gathered]
        newest = max(steps)
        if newest < 0 and not order.is_fresh:
            raise NotRestored("; ".join(problems) or "no member of the generation has state")
        source = steps.index(newest)
        if newest < 0 and rank == source and settings.start_from is not None:
            url, saved = settings.start_from
            store = ObjectStore(url, settings.storage_options, timeout_s=settings.storage_s)
            restore_from(store, saved, self.registered, check)
        if min(steps) < newest or newest < 0:
            is_behind = rank != source and (steps[rank] < newest or newest < 0)
            mine_to_share = self.registered.collect() if rank == source else None
            received = transfer.share(mine_to_share, source, backend)
            if is_behind:
                self._is_present = False  # until the last part is in place
                self.registered.restore(received)
        self.steps = max(newest, 0)
        self.evaluated_at = max(int(each[1]) for each in gathered if int(each[0]) == newest)
        self.joined = order.token
        self._is_present = True

    def _restore(self, order: FormGeneration, saver: Saver, check: Callable[[], None]) -> list[str]:
        """Read the newest saved state that verifies, if none so new is held; returns what did not verify."""
        if not order.sources or (self._is_present and self.steps >= order.sources[0].steps):
            return []
        self._is_present = False  # what is read goes straight into the tensors
        manifest, problems = saver.restore(order.sources, self.registered, check)
        if manifest is not None:
            self.steps, self.evaluated_at, self._is_present = manifest.steps, manifest.evaluated_at, True
        return problems
