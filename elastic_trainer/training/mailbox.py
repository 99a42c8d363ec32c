"""Where a worker's threads meet: orders come in from its control thread, reports go out to the controller.

The newest order supersedes older ones. An abort acts at once, in the thread that brings it: the main thread may be
blocked inside the very collective that has to be given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic_trainer.control.effects import (
    AbortGeneration,
    EndRun,
    FormGeneration,
    Order,
    ParkGeneration,
    RunTaskAgain,
    SaveGeneration,
    SettleSave,
    StopGeneration,
    WritePieces,
)
from elastic_trainer.control.events import Event
from elastic_trainer.observability.lines import Line
from elastic_trainer.training.position import Position
from elastic_trainer.vocabulary import Token

SaveOrder = SaveGeneration | WritePieces | SettleSave


class Mailbox:
    """The orders and reports of one worker process.

    Args:
        report: Sends an event to the controller at once; called from the main thread.
        record: Keeps a line for the run's folder until the controller has acknowledged it.
    """

    def __init__(self, report: Callable[[Event], None], record: Callable[[Line], None]) -> None:
        self.report = report
        self.record = record
        self.position = Position()  # of the main thread, for the control thread to tell
        self._abort: Callable[[], None] = lambda: None
        self._save: Callable[[SaveOrder], None] = lambda order: None
        self._changed = threading.Condition()
        self._next: FormGeneration | RunTaskAgain | EndRun | None = None
        self._aborted = Token(0, 0)
        self._parked = Token(0, 0)
        self._stopped = Token(0, 0)
        self._abort_reason = ""

    def on_abort(self, abort: Callable[[], None]) -> None:
        """Call `abort` whenever a generation has to be given up."""
        self._abort = abort

    def on_save(self, save: Callable[[SaveOrder], None]) -> None:
        """Call `save` with every order about a save."""
        self._save = save

    def put(self, order: Order) -> None:
        """Take an order; called from the control thread."""
        with self._changed:
            match order:
                case AbortGeneration():
                    self._aborted = max(self._aborted, order.token)
                    self._abort_reason = order.reason
                case ParkGeneration():
                    self._parked = max(self._parked, order.token)
                case StopGeneration():
                    self._stopped = max(self._stopped, order.token)
                case FormGeneration() | RunTaskAgain():
                    if not isinstance(self._next, EndRun):
                        self._next = order
                case EndRun():
                    self._next = order
                case SaveGeneration() | WritePieces() | SettleSave():
                    pass  # for the saver, below: it has a lock of its own
            self._changed.notify_all()
        if isinstance(order, AbortGeneration | EndRun):
            self._abort()
        elif isinstance(order, SaveGeneration | WritePieces | SettleSave):
            self._save(order)

    def take(self, timeout_s: float) -> FormGeneration | RunTaskAgain | EndRun | None:
        """The order to form, to run the task again or to end, waiting for it at most so long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._next is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            order = self._next
            if not isinstance(order, EndRun):  # the end stays: every later look finds it
                self._next = None
            return order

    def await_verdict(self, token: Token) -> None:
        """Wait until the run ends or this generation is aborted; the controller does one or the other."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_aborted(token))

    def is_aborted(self, token: Token) -> bool:
        """Whether this generation is to be given up: ordered, or overtaken by the order that ends the run."""
        return token <= self._aborted or isinstance(self._next, EndRun)

    def is_superseded(self, token: Token) -> bool:
        """Whether a formation of this generation is pointless by now."""
        order = self._next
        return self.is_aborted(token) or (isinstance(order, FormGeneration) and order.token > token)

    def wants_park(self, token: Token) -> bool:
        """Whether this generation is to leave at a step boundary."""
        return token <= self._parked

    def wants_stop(self, token: Token) -> bool:
        """Whether this generation is to leave at a step boundary for good."""
        return token <= self._stopped

    @property
    def abort_reason(self) -> str:
        """Of the last abort."""
        return self._abort_reason
