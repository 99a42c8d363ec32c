"""A run in two pictures: its loss with the changes of membership marked, and who trained when."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.observability.account import Generation
from elastic_trainer.reports.record import RunRecord
from elastic_trainer.reports.story import spans_of_workers
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import counted

LOSS, TIMELINE = "report/loss.png", "report/timeline.png"
APART = 0.025  # of a picture's width lie between two labels at least
SMOOTHED = 0.03  # of all steps go into one point of the thick line


def can_draw() -> bool:
    """Whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(record: RunRecord, store: ObjectStore) -> list[str]:
    """Write the pictures into the run's folder; returns where they are.

    Raises:
        ConfigError: matplotlib is not installed.
        StorageError: They cannot be written.
    """
    if not can_draw():
        raise ConfigError("pictures need matplotlib. Install it: pip install 'elastic-trainer[plots]'.")
    pictures = {LOSS: _loss(record), TIMELINE: _timeline(record)}
    for name, content in pictures.items():
        store.put(name, content)
    return [f"{store.url}/{name}" for name in pictures]


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")  # not pyplot: it keeps figures, and opens windows
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, dpi=110)
    return out.getvalue()


def _loss(record: RunRecord) -> bytes:
    figure, axes = _axes(4.5)
    steps, losses = list(record.losses), list(record.losses.values())
    axes.plot(steps, losses, color="#9db8d9", linewidth=0.8, label="loss of each step")
    axes.plot(steps, _smoothed(losses), color="#1f4e8c", linewidth=2, label="smoothed")
    for name in sorted({name for values in record.evaluations.values() for name in values if "loss" in name}):
        points = {step: values[name] for step, values in record.evaluations.items() if name in values}
        axes.plot(list(points), list(points.values()), "o-", color="#c8553d", markersize=4, label=f"evaluation: {name}")
    generations = record.account.generations
    for generation in generations[1:]:
        axes.axvline(generation.resume_step, color="#999999", linewidth=0.8, linestyle=":")
    for generation in _apart(generations, lambda each: each.resume_step, APART * max(steps, default=0)):
        axes.annotate(
            f" {counted(generation.world_size, 'worker')}",
            (generation.resume_step, 0.0),
            xycoords=("data", "axes fraction"),
            annotation_clip=True,
            fontsize=8,
            rotation=90,
            va="bottom",
        )
    if losses and min(losses) > 0 and max(losses) / min(losses) > 30:
        axes.set_yscale("log")
    axes.set(xlabel="done steps", ylabel="loss", title=f"{record.name}: loss, and where the group changed")
    axes.legend(frameon=False)
    return _png(figure)


def _apart(
    generations: Sequence[Generation], place: Callable[[Generation], float], distance: float
) -> list[Generation]:
    """Those that can be labelled without one label over another."""
    chosen: list[Generation] = []
    for generation in generations:
        if not chosen or place(generation) - place(chosen[-1]) >= distance:
            chosen.append(generation)
    return chosen


def _smoothed(values: list[float]) -> list[float]:
    """The mean of each value and of as many on both sides, fewer near the ends."""
    half = int(len(values) * SMOOTHED / 2)
    sums = list(accumulate(values, initial=0.0))
    found = []
    for place in range(len(values)):
        low, high = max(0, place - half), min(len(values), place + half + 1)
        found.append((sums[high] - sums[low]) / (high - low))
    return found


def _timeline(record: RunRecord) -> bytes:
    generations, account = record.account.generations, record.account
    spans = spans_of_workers(generations, account.at)
    workers = sorted(spans, key=lambda name: tuple(int(part) for part in name.removeprefix("w").split(".")))
    figure, axes = _axes(1.5 + 0.4 * max(2, len(workers)))
    start = account.began_at
    colours = ("#4c86c6", "#8bb8e8")
    for row, worker in enumerate(workers):
        for begin, end, number in spans[worker]:
            axes.barh(row, end - begin, left=begin - start, height=0.7, color=colours[number % 2])
    for generation in generations:
        axes.axvline(generation.began_at - start, color="#555555", linewidth=0.6, linestyle=":")
    for generation in _apart(generations, lambda each: each.began_at, APART * (account.at - start)):
        axes.annotate(
            f" {generation.generation}",
            (generation.began_at - start, 1.0),
            xycoords=("data", "axes fraction"),
            annotation_clip=True,
            fontsize=8,
            va="bottom",
        )
    axes.set_yticks(range(len(workers)), workers)
    axes.invert_yaxis()
    axes.set(xlabel="seconds since the run began", title=f"{record.name}: who trained in which generation\n")
    axes.set_xlim(0, max(account.at - start, 1e-3))
    return _png(figure)
