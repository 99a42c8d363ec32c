"""Where runs are, and which one is meant: what several commands need."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from elastic_trainer.checkpoint.history import History, fold
from elastic_trainer.errors import ConfigError
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Where the runs are."""
    parser.add_argument("--storage", default="./runs", help="what holds the run folders (default ./runs)")
    add_client_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """How to get there."""
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="storage_options",
        help="for the storage's client, e.g. endpoint_url=http://host:9000",
    )


def add_address_option(parser: argparse.ArgumentParser) -> None:
    """Which cluster."""
    parser.add_argument("--address", help="of a Ray cluster, or auto; by default what RAY_ADDRESS says")


def pairs(given: list[str], option: str) -> dict[str, Any]:
    """What was given as KEY=VALUE, several times."""
    found = {}
    for each in given:
        key, separator, value = each.partition("=")
        if not separator or not key:
            raise ConfigError(f"{option} {each}: not of the form key=value.")
        found[key] = value
    return found


def storage_of(options: argparse.Namespace) -> ObjectStore:
    """What holds the run folders."""
    return ObjectStore(options.storage, pairs(options.storage_options, "--storage-option"))


def run_of(options: argparse.Namespace) -> tuple[ObjectStore, History]:
    """The folder of the run that was named, and its history."""
    store = storage_of(options).within(options.name)
    history = fold(RunLog(store).read())
    if history.config is None:
        raise ConfigError(f"{store.url}: no such run. `elastic-trainer runs ls --storage …` shows what there is.")
    return store, history


def when(at: float) -> str:
    """A time for people."""
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
