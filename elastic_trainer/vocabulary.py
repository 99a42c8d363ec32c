"""Words that every layer shares: who a worker is, which generation a message belongs to, where a run stands."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


class Worker(NamedTuple):
    """One life of a worker: a replacement keeps the `worker_id` and takes the next incarnation."""

    worker_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"w{self.worker_id}.{self.incarnation}"


class Token(NamedTuple):
    """Fences everything that belongs to one generation; ordered: a later token replaces an earlier one."""

    term: int
    generation: int

    def __str__(self) -> str:
        return f"{self.term}-{self.generation}"


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
