"""What runs have saved: list, show, verify."""

from __future__ import annotations

import argparse

import yaml

from elastic_trainer.checkpoint.history import History
from elastic_trainer.checkpoint.manifest import summary_of
from elastic_trainer.commands.place import run_of
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.vocabulary import SavedStep


def list_checkpoints(options: argparse.Namespace) -> int:
    """One line a saved step."""
    _, history = run_of(options)
    for each in history.saved:
        values = ", ".join(f"{name} {value:.4f}" for name, value in history.values.get(each.path, {}).items())
        print(f"step {each.steps}  {each.path}" + (f"  {values}" if values else ""))
    if not history.saved:
        print("nothing was saved")
    return 0


def show_checkpoint(options: argparse.Namespace) -> int:
    """What is in a saved step."""
    from elastic_trainer.checkpoint.reader import load_manifest

    store, history = run_of(options)
    manifest = load_manifest(store, _saved(history, options))
    print(yaml.safe_dump(summary_of(manifest), sort_keys=False).rstrip())
    for tensor in manifest.layout.tensors:
        print(f"  {tensor.name}  {tensor.dtype}{list(tensor.shape)}")
    return 0


def verify_checkpoints(options: argparse.Namespace) -> int:
    """Read saved steps wholly and compare every digest."""
    from elastic_trainer.checkpoint.reader import verify

    store, history = run_of(options)
    chosen = history.saved if options.step is None else [_saved(history, options)]
    bad = 0
    for each in chosen:
        try:
            manifest = verify(store, each)
            print(f"step {each.steps}: whole, {manifest.size_bytes} bytes in {len(manifest.files)} files")
        except StorageError as error:
            print(f"step {each.steps}: {error}")
            bad += 1
    if not chosen:
        print("nothing was saved")
    return 1 if bad else 0


def _saved(history: History, options: argparse.Namespace) -> SavedStep:
    chosen = [each for each in history.saved if options.step is None or each.steps == options.step]
    if not chosen:
        known = ", ".join(str(each.steps) for each in history.saved) or "nothing"
        raise ConfigError(f"step {options.step} of run {options.name!r} is not saved; saved is {known}.")
    return chosen[-1]
