"""The run's history as the controller writes it: storage calls in threads, one after the other, never in its loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import yaml

from elastic_trainer.checkpoint.committer import Committer
from elastic_trainer.checkpoint.history import History, fold
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.cluster.chronicle import ACCOUNTS, Chronicle
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.data.ledger import Audit, LedgerLine
from elastic_trainer.errors import Damaged, Fenced, StorageError
from elastic_trainer.observability.account import Account
from elastic_trainer.observability.journal import read_stream, segments_from
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.probe import leave_marker, probe
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import RunStatus

CONFIG = "config.yaml"
AGAIN_S = 1.0  # between tries to learn whether an entry stands
LINES_S = 30.0  # for the lines of steps whose parts are written: they were sent before


class Records:
    """Log, manifests and earlier accounts of one term. Make it with `open_records`."""

    def __init__(self, store: ObjectStore, committer: Committer, retention: Retention) -> None:
        self.store = store
        self.marker = ("", b"")
        self._committer = committer
        self._retention = retention
        self._lock = asyncio.Lock()
        self._is_ending = False

    @property
    def history(self) -> History:
        """What the log comes to."""
        return self._committer.history

    def take(self, event: e.PiecesWritten) -> None:
        """Remember what a rank has written."""
        self._committer.take(event)

    async def commit(self, effect: f.CommitSave, chronicle: Chronicle) -> e.StepSaved | e.SaveFailed:
        """Make a save stand; returns only when it is known whether it does.

        Raises:
            Fenced: Another controller has taken over.
        """
        async with self._lock:
            try:
                saved = await asyncio.to_thread(
                    self._committer.write_manifest, effect.steps, effect.token, effect.attempt
                )
                account = await chronicle.account_of(effect.steps, LINES_S)
            except (StorageError, FileExistsError) as error:
                return e.SaveFailed(effect.token, effect.steps, str(error))
            await self._until_known(
                lambda: self._committer.stand(saved, effect.token, account), chronicle, f"step {effect.steps} is saved"
            )
            self._committer.forget(effect.steps, effect.token)
            return e.StepSaved(effect.token, saved)

    async def resumed(self, effect: f.RecordResumption, chronicle: Chronicle) -> None:
        """Record that the run went back."""
        values: dict[str, Any] = {"token": list(effect.token), "steps": effect.steps}
        if effect.rollback is not None:
            values["rollback"] = effect.rollback
        async with self._lock:
            await self._until_known(
                lambda: self._committer.append("resumed", values),
                chronicle,
                f"the return to step {effect.steps} stands",
            )

    async def scaled(self, least: int, most: int, owner: str, chronicle: Chronicle) -> None:
        """Record how many workers are wanted, for later terms of the same start."""
        values = {"owner": owner, "least": least, "most": most}
        async with self._lock:
            await self._until_known(
                lambda: self._committer.append("scaled", values), chronicle, f"{least} to {most} workers are recorded"
            )

    async def tidy(self, chronicle: Chronicle) -> None:
        """Read the newest saved step back and remove what it makes needless."""
        async with self._lock:
            try:
                await asyncio.to_thread(self._committer.tidy, self._retention)
            except Damaged as error:
                chronicle.tell(f"a saved step cannot be read back, so older ones are kept: {error}")
            except StorageError as error:
                chronicle.tell(f"needless saved steps could not be removed yet: {error}")

    async def ended(self, status: RunStatus, reason: str) -> str:
        """Record the end; returns what went wrong with that, in words."""
        values = {"status": status.value, "reason": reason.splitlines()[0][:500]}
        self._is_ending = True
        async with self._lock:
            try:
                await asyncio.to_thread(self._committer.append, "ended", values)
            except StorageError as error:
                return f"; the end could not be recorded: {error}"
        return ""

    async def remove_marker(self) -> None:
        """It has served when every node has looked."""
        try:
            await asyncio.to_thread(self.store.delete, [self.marker[0]])
        except StorageError:
            return  # a small file stays

    async def _until_known(self, call: Callable[[], None], chronicle: Chronicle, what: str) -> None:
        has_told = False
        while True:
            try:
                return await asyncio.to_thread(call)
            except StorageError as error:
                if self._is_ending:
                    raise
                if not has_told:
                    chronicle.tell(f"it is unknown whether {what}, asking again: {error}")
                has_told = True
                await asyncio.sleep(AGAIN_S)


def open_records(
    settings: TrainSettings, retention: Retention, term_values: dict[str, Any], *, after_term: int, is_restart: bool
) -> tuple[Records, Audit, Account]:
    """Begin a term: probe the store, read the history, append the term's entry. Blocks.

    Args:
        settings: Of the run.
        retention: What is to be kept.
        term_values: Of the entry: `owner`, `config`, `code`, `changed`.
        after_term: The run's newest term when this controller was first started.
        is_restart: Ray has restarted it, so a later term of somebody else is not to be taken over.

    Raises:
        Fenced: Somebody else has the run.
        StorageError: The store cannot be used.
    """
    store = settings.open_store()
    probe(store)
    log = RunLog(store)
    history = fold(log.read())
    if is_restart and history.term > after_term and history.owner != term_values["owner"]:
        raise Fenced(f"the run was taken over in term {history.term} while this controller was away")
    if is_restart and history.term > after_term and history.ended:
        raise Fenced(f"the run has ended ({history.ended}), and its controller died after that")
    committer = Committer(store, log, history, history.term + 1)
    committer.append("term", term_values)
    store.put(CONFIG, yaml.safe_dump(term_values["config"], sort_keys=False).encode())  # for people; the log decides
    records = Records(store, committer, retention)
    records.marker = leave_marker(store)
    audit = Audit.from_dict(settings.plan.order, history.audit if history.saved else {})
    if history.newest is not None and audit.steps != history.newest.steps:
        audit.go_back_to(history.newest.steps)
    for line in read_stream(segments_from(store.names("ledger"), audit.steps), store.read):
        audit.add(LedgerLine.from_json(line))
    return records, audit, _last_account(store)


def _last_account(store: ObjectStore) -> Account:
    names = store.names(ACCOUNTS)
    return Account.from_dict(json.loads(store.read(names[-1]))) if names else Account()
