"""Between two steps: what the ranks agreed on in their riders is taken up in the same step on every rank."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from elastic_trainer.control.events import Left, TaskPhase
from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.rider import Rider

if TYPE_CHECKING:
    from elastic_trainer.training.run import Run
    from elastic_trainer.training.step import Step


class Boundary:
    """Waits for what has to be known at the end of a step, and finds what all ranks do there."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._undecided: deque[tuple[int, Rider]] = deque()  # what ranks said in steps that the host knows of
        self._leaves: Left | None = None

    def forget(self) -> None:
        """A generation begins: what an earlier one said and did not come to holds no more."""
        self._undecided.clear()
        self._leaves = None
        self._run.saver.forget_agreement()

    def heard(self, number: int, total: Rider) -> None:
        """What all ranks said in this step, which is done."""
        self._undecided.append((number, total))

    def come_to(self, step: Step, *, evaluates: bool) -> Left | None:
        """Find what is to be done after this step; returns why the ranks leave the group here, if they do.

        What they said in a step is looked at when the host has given out so many more as it may be ahead, and not
        before. Where all are to do something together, everything given out is waited for first.

        Raises:
            StepAborted: The step was ordered to be given up.
            CollectiveFailed: A step that was given out did not arrive.
        """
        run, next_number = self._run, step.number + 1
        ahead, settings = run.backend.device.ahead, run.settings
        self._settle(ahead)
        self._decide(next_number - ahead)
        if (
            self._leaves is not None
            or run.saver.is_agreed
            or settings.save_is_due(next_number)
            or (evaluates and settings.evaluation_is_due(next_number))
            or next_number == settings.steps
        ):
            self._settle(0)
            self._decide(next_number)
        if step.is_mixed:
            self._settle(0)
        if self._leaves is Left.PARKED and next_number == settings.steps:
            self._leaves = None  # all is done
        return self._leaves

    def _settle(self, most: int) -> None:
        if len(self._run.given_out) > most:
            self._run.position.enter(TaskPhase.REDUCE)
            self._run.given_out.settle(most, self._raise_if_broken)

    def _raise_if_broken(self) -> None:
        self._run.raise_if_aborted()
        if self._run.backend.is_broken:
            raise CollectiveFailed("the group was aborted")

    def _decide(self, before: int) -> None:
        """Take up what the ranks said in the steps before this number."""
        run = self._run
        while self._undecided and self._undecided[0][0] < before:
            number, total = self._undecided.popleft()
            if run.saver.agree(total) and run.rank == 0:
                run.note(f"the save due after step {number + 1} waits for the one in flight")
            if total.stop:
                self._leaves = Left.STOPPED
            elif total.park and self._leaves is None:
                self._leaves = Left.PARKED
