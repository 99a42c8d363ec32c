"""The part of a full set of cases that the suite runs today; all of them run with `make soak`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TODAY = int(time.time() // 86400)


def rotating(cases: Sequence[Any], count: int, part: int = 0, parts: int = 1) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `count` of the cases, others each time, and the rest marked `soak`.

    With `parts` they take turns with other tests, as `turn` says. Both in one place: a test with a turn every third day
    and three cases that change daily would run the same case for ever.
    """
    begin = TODAY // parts * count
    today = {(begin + i) % len(cases) for i in range(count)} if TODAY % parts == part else set()
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if i in today else pytest.mark.soak)
        for i, case in enumerate(cases)
    ]


def turn(part: int, parts: int) -> Callable[[T], T]:
    """Decorates a test that takes its turn with others: the suite runs it every `parts` days, `make soak` always."""
    return (lambda test: test) if TODAY % parts == part else pytest.mark.soak
