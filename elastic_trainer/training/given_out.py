"""Steps that the host has given to the device and does not know to be done: none where the device is the CPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_trainer.errors import CollectiveFailed, TaskError

if TYPE_CHECKING:
    from elastic_trainer.training.held_state import HeldState
    from elastic_trainer.training.step import Step

LOOK_S = 0.0002  # between two looks whether the device is done: small beside any step, and keeps no core busy


class GivenOut:
    """Given-out steps, in order.

    Args:
        complete: Called with each one that turns out to be done.
        bound_s: Of the wait for one of them; faults are told by orders long before.
    """

    def __init__(self, complete: Callable[[Step], None], bound_s: float) -> None:
        self._complete = complete
        self._bound_s = bound_s
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """The host is through with this step; it is done when the device is."""
        self._steps.append(step)
        if step.total is not None:  # the device had to come to it, and so to those before it
            self.settle_arrived()

    def settle(self, most: int, check: Callable[[], None]) -> None:
        """Wait until at most so many are left; `check` may raise to give the wait up.

        Raises:
            CollectiveFailed: One of them is not complete here.
        """
        while len(self._steps) > most:
            step, deadline = self._steps[0], time.monotonic() + self._bound_s
            while not step.has_arrived:
                check()
                if time.monotonic() > deadline:
                    raise CollectiveFailed(f"the device did not come to the end of step {step.number} in time")
                time.sleep(LOOK_S)
            if not step.settle():
                raise CollectiveFailed(f"step {step.number} did not arrive whole")
            self._complete(self._steps.popleft())

    def settle_arrived(self) -> None:
        """Take as done what the device has done; whether later ones are is for others to find out."""
        while self._steps and self._steps[0].has_arrived and self._steps[0].settle():
            self._complete(self._steps.popleft())

    def mix(self) -> None:
        """The task has changed state behind the update of the newest one."""
        if self._steps:
            self._steps[-1].is_mixed = True

    def give_up(self, held: HeldState) -> None:
        """Take those as done that the device has done, now that it has come to all their ends; the others are not.

        What the host changed for these goes back.
        """
        try:
            self.settle_arrived()
        except TaskError:
            pass  # the step without weight: it updated nothing, and nothing behind it did
        except AssertionError:
            held.lose()
        if not self._steps:
            return
        held.registered.restore_host_part(self._steps[0].host_part)
        if any(step.is_mixed for step in self._steps):
            held.lose()
        self._steps.clear()
