"""What is told of a whole run, over all of its terms: its generations, what each cost, and where time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("detect", "free", "plan", "form", "state", "first step")


@dataclass
class Generation:
    """A generation that was formed.

    `began_at` and `last_step_at` are in seconds since the epoch; the latter is 0 before the first step. `phases_s` says
    what its forming cost in seconds, by phase, and is empty until its first step is done.
    """

    generation: int
    term: int
    world_size: int
    resume_step: int
    reason: str
    began_at: float = 0.0
    workers: list[str] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    last_step_at: float = 0.0


@dataclass
class Rebuild:
    """The moments of a change of membership, in seconds since the epoch by the controller's clock.

    The steps before and after are timed by workers: on machines whose clocks differ the first and the last phase are
    off by that much.
    """

    last_step_at: float = 0.0
    noticed_at: float = 0.0
    left_at: float = 0.0
    ordered_at: float = 0.0
    formed_at: float = 0.0
    joined_at: float = 0.0

    def noticed(self, at: float, last_step_at: float) -> None:
        """The first sign that the present generation ends."""
        if not self.noticed_at:
            self.noticed_at, self.last_step_at = at, last_step_at
        self.left_at = at

    def phases(self, first_step_at: float) -> dict[str, float]:
        """Seconds by phase; a first start has no generation to leave, so it begins with the plan."""
        if not self.ordered_at:
            return {}  # an earlier controller ordered it
        moments = [self.last_step_at, self.noticed_at, self.left_at, self.ordered_at, self.formed_at, self.joined_at]
        names = list(PHASES)
        if not self.noticed_at or not self.last_step_at:
            moments, names = moments[3:], names[3:]
        spans = zip(moments, [*moments[1:], first_step_at], strict=True)
        return {name: round(max(0.0, end - begin), 4) for name, (begin, end) in zip(names, spans, strict=True)}


@dataclass
class Account:
    """Times in seconds; `at` is when it was brought up to date."""

    began_at: float = 0.0
    active_s: float = 0.0  # of all terms, up to `at`
    at: float = 0.0
    productive_s: float = 0.0
    generations: list[Generation] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    pids_unchanged: bool = True
    final_loss: float | None = None
    evaluation: dict[str, float] | None = None
    saves_failed: int = 0
    workers_given_up: int = 0  # on suspicion: silent, stopped, standing still, out of reach

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Account:
        """The account that `asdict` described."""
        return cls(**{**found, "generations": [Generation(**each) for each in found["generations"]]})
