"""Rows that cannot be used: fail at the first one, skip them, or keep them in a side file. All are counted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elastic_trainer.errors import DataError

POLICIES = ("fail", "skip", "quarantine")
NAMED = 20  # so many are named to people; the side file has all


@dataclass(frozen=True)
class DamagedRow:
    """A row that was left out. `content` is the row as far as it could be read, as text."""

    file: str
    row: int
    problem: str
    content: str

    def to_json(self) -> str:
        """A line of the side file."""
        return json.dumps({"file": self.file, "row": self.row, "problem": self.problem, "content": self.content})

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.problem}"


class Damage:
    """What happens to damaged rows of a part."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.count = 0
        self.rows: list[DamagedRow] = []

    def found(self, file: str, row: int, problem: str, content: Any = "") -> None:
        """A row cannot be used.

        Args:
            file: Its name.
            row: Counted from 0 in the file.
            problem: In words.
            content: What there is of it.

        Raises:
            DataError: The policy is to fail.
        """
        each = DamagedRow(file, row, problem, content if isinstance(content, str) else repr(content))
        if self.policy == "fail":
            raise DataError(
                f"{each}. Mend the row, or leave such rows out: --on-error skip, or --on-error quarantine, which "
                "keeps them in a file of their own."
            )
        self.count += 1
        if self.policy == "quarantine" or len(self.rows) < NAMED:
            self.rows.append(each)
