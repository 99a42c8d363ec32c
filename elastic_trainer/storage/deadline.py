"""A bound on a call that may hang for ever, and one retry for what may pass: around every call of a storage client.

Some clients wait without end for a server that accepts and then says nothing, whatever their own time-outs say. So a
call runs in a thread of its own that is left behind when its time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
PAUSE_S = (0.1, 0.3, 1.0, 2.0)  # between tries; a store that says "slow down" is told again after seconds


class Overdue(TimeoutError):
    """A call did not come back within its time; whether it took effect is unknown."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, in a thread that is given up after `seconds`.

    Raises:
        Overdue: It did not come back.
        Exception: Whatever the call raised.
    """
    outcome: list[tuple[bool, Any]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))
        done.set()

    threading.Thread(target=run, name="storage", daemon=True).start()
    if not done.wait(seconds):
        raise Overdue(f"no answer within {seconds:.1f} s")
    is_good, value = outcome[0]
    if is_good:
        return value  # type: ignore[no-any-return]
    raise value


def retried(
    call: Callable[[], T], *, try_s: float | None, whole_s: float, is_final: Callable[[BaseException], bool]
) -> T:
    """`call` until it succeeds, each try at most `try_s`, all of them at most `whole_s` seconds.

    Args:
        call: May be repeated without harm.
        try_s: Bound of one try; None when the caller watches over it and the thread it is made in.
        whole_s: Bound of all tries and the pauses between them.
        is_final: Whether an error will come back however often it is tried.

    Raises:
        Exception: That of the last try; when that was cut short, of the last one that said what is wrong.
    """
    end = time.monotonic() + whole_s
    tries = 0
    telling: Exception | None = None
    while True:
        try:
            return call() if try_s is None else within(max(0.05, min(try_s, end - time.monotonic())), call)
        except Exception as error:
            pause = PAUSE_S[min(tries, len(PAUSE_S) - 1)]
            if not isinstance(error, Overdue):
                telling = error
            if is_final(error) or time.monotonic() + pause >= end:
                raise telling or error from error.__cause__
        tries += 1
        time.sleep(pause)
