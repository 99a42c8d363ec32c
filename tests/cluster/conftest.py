"""Runs of the command line that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rayrun import CommandRun, job_config

Start = Callable[..., CommandRun]


@pytest.fixture
def start(tmp_path: Path, dataset: str, held_out: str) -> Iterator[Start]:
    runs: list[CommandRun] = []

    def begin(**fields: Any) -> CommandRun:
        runs.append(CommandRun(tmp_path, job_config(tmp_path, dataset, held_out, **fields)))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()
