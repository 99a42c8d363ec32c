"""The ledger: for each done step how many samples were trained and the digest of their ids; and its audit.

A line of a newer token replaces an older one: the step was done by ranks that all died before it could count.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.data.batch_plan import expected_digest
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.vocabulary import Token


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """A done step of the surviving history."""

    step: int
    token: Token
    samples: int
    digest: int

    def to_json(self) -> dict[str, Any]:
        """As a line of the ledger's files; 64 bits go as text, since many readers of JSON keep only 53."""
        return {"step": self.step, "token": str(self.token), "samples": self.samples, "digest": f"{self.digest:016x}"}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> LedgerLine:
        """The line that `to_json` gave."""
        term, generation = line["token"].split("-")
        return cls(line["step"], Token(int(term), int(generation)), line["samples"], int(line["digest"], 16))


@dataclass
class Audit:
    """The ledger held against the arithmetic of the data order, line by line as they come."""

    order: SampleOrder
    steps_redone: int = 0
    _lines: dict[int, tuple[Token, int]] = field(default_factory=dict)
    _bad: set[int] = field(default_factory=set)

    def add(self, line: LedgerLine) -> bool:
        """Take a line; False when it was known already or an older token's."""
        known = self._lines.get(line.step)
        if known is not None:
            if line.token <= known[0]:
                return False
            self.steps_redone += 1
        self._lines[line.step] = (line.token, line.samples)
        is_right = line.samples == self.order.samples_in(line.step)
        is_right = is_right and line.digest == expected_digest(self.order, line.step)
        (self._bad.discard if is_right else self._bad.add)(line.step)
        return True

    @property
    def steps(self) -> int:
        """Done steps without a gap from the first."""
        count = len(self._lines)
        return count if not count or max(self._lines) == count - 1 else min(set(range(count)) - set(self._lines))

    @property
    def bad_steps(self) -> list[int]:
        """Steps whose line is missing or contradicts the arithmetic."""
        last = max(self._lines, default=-1)
        return sorted(self._bad | (set(range(last + 1)) - set(self._lines)))

    @property
    def samples_trained(self) -> int:
        """Samples of all done steps, each sample of each epoch counted once."""
        return sum(samples for _, samples in self._lines.values())

    def summary(self) -> dict[str, Any]:
        """The facts that `summary.json` tells; null where the digests do not agree, since then nobody can know."""
        is_exact = not self.bad_steps
        return {
            "steps_redone": self.steps_redone,
            "samples_trained": self.samples_trained,
            "samples_skipped": 0,
            "samples_missing": 0 if is_exact else None,
            "samples_repeated": 0 if is_exact else None,
            **({} if is_exact else {"bad_steps": self.bad_steps}),
        }


def audit(order: SampleOrder, lines: Iterable[dict[str, Any]]) -> Audit:
    """The audit of a whole ledger."""
    result = Audit(order)
    for line in lines:
        result.add(LedgerLine.from_json(line))
    return result
