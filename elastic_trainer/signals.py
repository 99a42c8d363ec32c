"""SIGINT and SIGTERM while a driver follows a run: they ask the run to stop instead of ending the driver."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignals:
    """Use as a context manager. Before `take_over` a signal interrupts, afterwards it asks.

    The first asks to stop after the step, the second at once, a third one interrupts.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._stop: Callable[[str, bool], object] | None = None
        self._count = 0
        self._asked_by = ""

    def __enter__(self) -> StopSignals:
        self._before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        self.renew()
        return self

    def renew(self) -> None:
        """Take the signals again: connecting to Ray gives SIGTERM a handler that aborts the process."""
        if threading.current_thread() is threading.main_thread():
            for each in self._before:
                signal.signal(each, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def take_over(self, stop: Callable[[str, bool], object]) -> None:
        """From now on signals go to `stop(by, at_once)`."""
        self._stop = stop

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt
        self._count += 1
        name = signal.Signals(signum).name
        if self._count > 2:
            raise KeyboardInterrupt("left without waiting for the end of the run")
        self._asked_by = name
        self.ask_again()

    def ask_again(self) -> None:
        """Repeat what was asked for, if anything was: whoever heard it may be gone."""
        if self._stop is None or not self._asked_by:
            return
        # a signal handler may interrupt anything of Ray's, so the call goes from a thread
        threading.Thread(target=self._stop, args=(self._asked_by, self._count > 1), daemon=True).start()
