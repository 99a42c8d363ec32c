"""Calls that hang are given up, those that fail for a while are repeated."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.storage.deadline import Overdue, retried, within


def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    with pytest.raises(Overdue):
        within(0.05, release.wait)

    release.set()


def test_a_passing_error_is_repeated_and_a_final_one_is_not() -> None:
    calls: list[int] = []

    def twice_wrong() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("for a while")
        return "right"

    assert retried(twice_wrong, try_s=5, whole_s=10, is_final=lambda error: False) == "right"
    assert len(calls) == 3

    with pytest.raises(OSError, match="for a while"):
        retried(lambda: calls.clear() or twice_wrong(), try_s=5, whole_s=10, is_final=lambda error: True)
    assert len(calls) == 1


def test_a_last_try_that_is_cut_short_does_not_hide_what_is_wrong() -> None:
    release = threading.Event()
    calls: list[int] = []

    def refused_then_silent() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("nobody listens there")
        release.wait()

    with pytest.raises(ConnectionError, match="nobody listens"):
        retried(refused_then_silent, try_s=5, whole_s=0.3, is_final=lambda error: False)

    assert len(calls) == 2
    release.set()
