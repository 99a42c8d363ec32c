"""How a run stands, for people: what progress is drawn from and what a watcher is called with."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Standing:
    """A look at a run.

    `saved` is the newest saved step. `pids` are the processes of the living workers by worker, `members` the workers
    that train, by rank, `spares` how many wait beside them; `news` is what happened since the last look.
    """

    phase: str
    step: int
    steps: int
    loss: float | None
    samples_per_s: float
    steps_per_s: float
    world_size: int
    news: tuple[str, ...] = ()
    cursor: int = 0
    term: int = 0
    saved: int | None = None
    has_ended: bool = False
    pids: dict[str, int] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    spares: int = 0
