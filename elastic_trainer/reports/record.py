"""What a run has left to tell of, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elastic_trainer.checkpoint.history import History, fold
from elastic_trainer.errors import ConfigError
from elastic_trainer.observability.account import Account
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore


@dataclass(frozen=True)
class RunRecord:
    """A run's history, its account, and its metrics by done step (`losses`) and by evaluation."""

    name: str
    history: History
    account: Account
    losses: dict[int, float]
    evaluations: dict[int, dict[str, float]]


def read_record(store: ObjectStore, name: str) -> RunRecord:
    """What is told of a run, from its folder.

    Raises:
        ConfigError: There is no such run, or it has not formed a generation yet.
        StorageError: It cannot be read.
    """
    history = fold(RunLog(store).read())
    accounts = store.names("accounts")
    if history.config is None or not accounts:
        raise ConfigError(f"{store.url}: there is no such run, or it has not begun to train yet.")
    account = Account.from_dict(json.loads(store.read(accounts[-1])))
    if not account.generations:
        raise ConfigError(f"{store.url}: the run has not begun to train yet.")
    losses: dict[int, float] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for line in read_stream(store.names("metrics"), store.read):
        _take(line, losses, evaluations)
    return RunRecord(name, history, account, dict(sorted(losses.items())), dict(sorted(evaluations.items())))


def _take(line: dict[str, Any], losses: dict[int, float], evaluations: dict[int, dict[str, float]]) -> None:
    if "evaluation" in line:
        evaluations[line["steps"]] = line["evaluation"]
    elif line.get("loss") is not None:
        losses[line["step"] + 1] = line["loss"]  # a step that was done again replaces itself
