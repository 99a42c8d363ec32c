"""Why each generation of a run happened, and what it cost. Pure: a record comes in, lines go out."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from elastic_trainer.observability.account import PHASES, Generation
from elastic_trainer.reports.record import RunRecord
from elastic_trainer.vocabulary import counted

MEANINGS = {
    "detect": "from the last done step to the first sign",
    "free": "until every member had left the group",
    "plan": "until the next generation was ordered",
    "form": "until its process group stood",
    "state": "until all members had the same state",
    "first step": "the step that then came first",
}


def story_of(record: RunRecord) -> list[str]:
    """The run in a few lines, then each generation with its reason and its cost by phase."""
    account, history = record.account, record.history
    ended = f"{history.ended}: {history.reason}" if history.ended else "has not ended"
    origin = (history.config or {}).get("start_from")
    lines = [
        f"run {record.name}: {ended}" + (f"; it began with what {origin} had saved" if origin else ""),
        f"{counted(max(record.losses, default=0), 'step')}, {counted(len(account.generations), 'generation')} over "
        f"{counted(history.term, 'term')}, {_duration(account.active_s)} in all, "
        f"{100 * account.productive_s / max(account.active_s, 1e-9):.0f} % of it in steps",
    ]
    for generation in account.generations:
        lines += ["", *_paragraph(generation)]
    if any(generation.phases_s for generation in account.generations):
        lines += ["", *(f"{name}: {MEANINGS[name]}" for name in PHASES)]
    return lines


def _paragraph(generation: Generation) -> list[str]:
    at = datetime.datetime.fromtimestamp(generation.began_at).strftime("%Y-%m-%d %H:%M:%S")
    return [
        f"generation {generation.term}-{generation.generation}, {at}: {counted(generation.world_size, 'worker')} "
        f"({', '.join(generation.workers)}) from step {generation.resume_step}",
        f"  why:  {generation.reason}",
        f"  cost: {_cost(generation)}",
    ]


def _cost(generation: Generation) -> str:
    phases = generation.phases_s
    if not phases:
        return "not known: no step was done in it"
    parts = [f"{name} {_seconds(phases[name])}" for name in PHASES if name in phases]
    return f"{_seconds(sum(phases.values()))} = {' + '.join(parts)}"


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def spans_of_workers(generations: Sequence[Generation], end: float) -> dict[str, list[tuple[float, float, int]]]:
    """When each worker trained: for each, (from, to, generation) in seconds since the epoch, until its last step."""
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for number, generation in enumerate(generations):
        until = generations[number + 1].began_at if number + 1 < len(generations) else end
        until = min(until, max(generation.began_at, generation.last_step_at))
        for worker in generation.workers:
            spans.setdefault(worker, []).append((generation.began_at, until, generation.generation))
    return spans
