"""The part of a full set of cases that the suite runs today; all of them run with `make soak`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

TODAY = int(time.time() // 86400)


def rotating(cases: Sequence[Any], count: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `count` of the cases, others each day, and the rest marked `soak`."""
    today = {(TODAY * count + i) % len(cases) for i in range(count)}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if i in today else pytest.mark.soak)
        for i, case in enumerate(cases)
    ]
