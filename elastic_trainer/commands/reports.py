"""What a run was like: `report` draws it, `explain` tells it."""

from __future__ import annotations

import argparse

from elastic_trainer.commands.place import run_of
from elastic_trainer.reports.pictures import draw
from elastic_trainer.reports.record import read_record
from elastic_trainer.reports.story import story_of


def report(options: argparse.Namespace) -> int:
    """Draw a run's pictures into its folder."""
    store, _ = run_of(options)
    for path in draw(read_record(store, options.name), store):
        print(path)
    return 0


def explain(options: argparse.Namespace) -> int:
    """Why each generation happened, and what it cost."""
    store, _ = run_of(options)
    print("\n".join(story_of(read_record(store, options.name))))
    return 0
