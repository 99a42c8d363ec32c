"""Progress for people: a bar with step, loss, speed and time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from elastic_trainer.observability.standing import Standing
from elastic_trainer.vocabulary import counted

PLAIN_EVERY_S = 5.0  # often enough to see life in a log file, rarely enough to read it


class ProgressView:
    """Shows a run as it goes; use it as a context manager."""

    def __init__(self, name: str) -> None:
        self._console = Console(stderr=False, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._name = name
        self._began = time.monotonic()
        self._said_at = 0.0
        self._said = ""
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=None, facts="starting")

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line of news."""
        self._console.print(f"[{time.monotonic() - self._began:7.1f} s] {text}", markup=False)

    def show(self, standing: Standing) -> None:
        """Bring the view up to date."""
        for text in standing.news:
            self.say(text)
        facts = _facts(standing)
        if self._bar is not None:
            self._bar.update(
                self._task, total=standing.steps, completed=standing.step, facts=facts + _time_left(standing)
            )
            return
        now = time.monotonic()
        line = line_of(standing)
        if now - self._said_at >= PLAIN_EVERY_S and line != self._said:
            self._said_at, self._said = now, line
            self.say(line)


def line_of(standing: Standing) -> str:
    """A look at a run in one line."""
    return f"step {standing.step}/{standing.steps}  {_facts(standing)}{_time_left(standing)}"


def _time_left(standing: Standing) -> str:
    if not standing.steps_per_s:
        return ""
    return f"  about {(standing.steps - standing.step) / standing.steps_per_s:.0f} s left"


def _facts(standing: Standing) -> str:
    loss = "-" if standing.loss is None else f"{standing.loss:.4f}"
    saved = "" if standing.saved is None else f"  saved {standing.saved}"
    workers = counted(standing.world_size, "worker")
    if standing.spares:
        workers += f" + {counted(standing.spares, 'spare')}"
    return f"{standing.phase}  loss {loss}  {standing.samples_per_s:.0f} samples/s  {workers}{saved}"
