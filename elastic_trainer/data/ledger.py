"""The ledger: for each done step how many samples were trained and the digest of their ids; and its audit.

A line of a newer token replaces an older one: the step was done by ranks that all died before it could count.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
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
    skipped: str = ""  # why the step updated nothing

    def to_json(self) -> dict[str, Any]:
        """As a line of the ledger's files; 64 bits go as text, since many readers of JSON keep only 53."""
        line = {"step": self.step, "token": str(self.token), "samples": self.samples, "digest": f"{self.digest:016x}"}
        return line | ({"skipped": self.skipped} if self.skipped else {})

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> LedgerLine:
        """The line that `to_json` gave."""
        term, generation = line["token"].split("-")
        token = Token(int(term), int(generation))
        return cls(line["step"], token, line["samples"], int(line["digest"], 16), line.get("skipped", ""))


REDONE_WITHIN = 1000  # steps; ranks differ by one step at a fault, so an older step never comes again


@dataclass
class Audit:
    """The ledger held against the arithmetic of the data order, line by line as they come.

    Keeps a line for the last `REDONE_WITHIN` steps only; a run of any length needs bounded memory.
    """

    order: SampleOrder
    steps: int = 0  # done steps without a gap from the first
    steps_redone: int = 0
    samples_trained: int = 0  # of all done steps that were not skipped, each sample of each epoch counted once
    skipped: dict[int, int] = field(default_factory=dict)  # steps that updated nothing, and their samples
    _lines: dict[int, tuple[Token, int]] = field(default_factory=dict)  # token and samples that were trained
    _bad: set[int] = field(default_factory=set)
    _last: int = -1

    def add(self, line: LedgerLine) -> bool:
        """Take a line; False when it was known already or an older token's."""
        known = self._lines.get(line.step)
        if line.step < self.steps and (known is None or line.token <= known[0]):
            return False
        if known is not None:
            if line.token <= known[0]:
                return False
            self.steps_redone += 1
            self.samples_trained -= known[1]
        trained = 0 if line.skipped else line.samples
        self._lines[line.step] = (line.token, trained)
        self.samples_trained += trained
        self.skipped.pop(line.step, None)
        if line.skipped:
            self.skipped[line.step] = line.samples
        self._last = max(self._last, line.step)
        is_right = line.samples == self.order.samples_in(line.step)
        is_right = is_right and line.digest == expected_digest(self.order, line.step)
        (self._bad.discard if is_right else self._bad.add)(line.step)
        while self.steps in self._lines:
            self.steps += 1
            self._lines.pop(self.steps - 1 - REDONE_WITHIN, None)
        return True

    def to_dict(self, steps: int) -> dict[str, Any]:
        """The account up to `steps` done steps, for `from_dict`."""
        beyond = [self._lines[step][1] for step in self._lines if step >= steps]
        return {
            "steps": steps,
            "steps_redone": self.steps_redone,
            "samples_trained": self.samples_trained - sum(beyond),
            "skipped": sorted([step, samples] for step, samples in self.skipped.items() if step < steps),
            "bad": sorted(step for step in self._bad if step < steps),
        }

    @classmethod
    def from_dict(cls, order: SampleOrder, found: dict[str, Any]) -> Audit:
        """The audit that goes on where `to_dict` was taken."""
        if not found:
            return cls(order)
        audit = cls(order, found["steps"], found["steps_redone"], found["samples_trained"], _last=found["steps"] - 1)
        audit.skipped = dict(found["skipped"])
        audit._bad = set(found["bad"])
        return audit

    def go_back_to(self, steps: int) -> None:
        """The run goes on after `steps` done steps: lines of later ones are void and will come again."""
        if steps >= self._last + 1:
            return
        self.steps_redone += self._last + 1 - steps
        for step in range(steps, self._last + 1):
            if (known := self._lines.pop(step, None)) is not None:
                self.samples_trained -= known[1]
            elif step < self.steps and step not in self.skipped:  # so long ago that its line is forgotten
                self.samples_trained -= self.order.samples_in(step)
            self.skipped.pop(step, None)
        self._bad = {step for step in self._bad if step < steps}
        self.steps, self._last = min(self.steps, steps), steps - 1

    def skipped_in_a_row(self, known: Collection[int]) -> tuple[int, ...]:
        """The newest steps that updated nothing, without a step that did in between; `known` ones do not count."""
        step = self.steps - 1
        while step in self.skipped and step not in known:
            step -= 1
        return tuple(range(step + 1, self.steps))

    def bad_steps(self, up_to: int = 0) -> list[int]:
        """Steps whose line is missing or contradicts the arithmetic, of at least the first `up_to`."""
        missing = set(range(self.steps, max(self._last + 1, up_to))) - set(self._lines)
        return sorted(self._bad | missing)

    def summary(self, up_to: int = 0) -> dict[str, Any]:
        """The facts that `summary.json` tells; null where the digests do not agree, since then nobody can know."""
        bad = self.bad_steps(up_to)
        return {
            "steps_redone": self.steps_redone,
            "samples_trained": self.samples_trained,
            "samples_skipped": sum(self.skipped.values()),
            **({"skipped_steps": sorted(self.skipped)} if self.skipped else {}),
            "samples_missing": None if bad else 0,
            "samples_repeated": None if bad else 0,
            **({"bad_steps": bad} if bad else {}),
        }


def surviving(lines: Iterable[dict[str, Any]], returns: Sequence[tuple[Token, int]]) -> Iterator[LedgerLine]:
    """The lines of the history that survived.

    Args:
        lines: Of the ledger's files.
        returns: Each time that the run went back: the token from which on it was, and to how many done steps.
    """
    for found in lines:
        line = LedgerLine.from_json(found)
        if not any(line.token < token and line.step >= steps for token, steps in returns):
            yield line


def audit(order: SampleOrder, lines: Iterable[dict[str, Any]], returns: Sequence[tuple[Token, int]] = ()) -> Audit:
    """The audit of a whole ledger; `lines` and `returns` as for `surviving`. Void lines count as steps redone."""
    result = Audit(order)
    void: set[tuple[int, str]] = set()  # a line may have been written by two controllers
    for found in lines:
        survivors = list(surviving([found], returns))
        for line in survivors:
            result.add(line)
        if not survivors:
            void.add((found["step"], found["token"]))
    result.steps_redone += len(void)
    return result
