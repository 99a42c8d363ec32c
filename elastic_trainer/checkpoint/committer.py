"""From the parts that ranks have written to a checkpoint that exists: manifest, then the log's `saved` entry.

Keeps what the parts of the save in flight say; the decisions when to commit, write again or give up are control's.
"""

from __future__ import annotations

import json
from typing import Any

from elastic_trainer.checkpoint import reader, retention
from elastic_trainer.checkpoint.history import History
from elastic_trainer.checkpoint.layout import Layout
from elastic_trainer.checkpoint.manifest import FOLDER, NAME, Manifest, PieceFile, folder_of, parse_folder, sha256_of
from elastic_trainer.control.events import PiecesWritten
from elastic_trainer.errors import StorageError
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep, Token


class Committer:
    """Writes manifests and the log for one term. Its methods block; one thread at a time may be in them.

    Args:
        store: Of the run.
        log: That was read to its end.
        history: What it came to; kept up to date here.
        term: Of this controller.
    """

    def __init__(self, store: ObjectStore, log: RunLog, history: History, term: int) -> None:
        self._store = store
        self._log = log
        self.history = history
        self._term = term
        self._said: dict[tuple[int, Token, int], dict[int, dict[str, Any]]] = {}

    def append(self, kind: str, values: dict[str, Any]) -> None:
        """Append to the log, and a compacted entry when one is due.

        Raises:
            Fenced, StorageError: As the log; after a StorageError the same call again settles what is unknown.
        """
        for entry in self._log.append(kind, self._term, values):
            self.history.add(entry)
        if self._log.is_long:
            self._log.append("compacted", self._term, self.history.to_dict())

    def take(self, event: PiecesWritten) -> None:
        """Remember what a rank says of the part that it has written."""
        said = json.loads(event.content)
        self._said.setdefault((event.steps, event.token, event.attempt), {})[said["part"]] = said

    def forget(self, steps: int, token: Token) -> None:
        """The save is over."""
        for name in [name for name in self._said if (name[1], name[0]) <= (token, steps)]:
            del self._said[name]

    def write_manifest(self, steps: int, token: Token, attempt: int) -> SavedStep:
        """Write the manifest of a save all of whose parts were taken; it does not count before `stand`.

        Raises:
            StorageError: The store refuses, or the parts do not fit together.
        """
        manifest = self._manifest(steps, token, attempt)
        content = manifest.to_bytes()
        saved = SavedStep(steps, f"{manifest.folder}/{NAME}", sha256_of(content))
        self._store.create(saved.path, content)
        return saved

    def stand(self, saved: SavedStep, token: Token, account: dict[str, Any]) -> None:
        """Make a checkpoint part of the history.

        Args:
            saved: Whose manifest is written.
            token: Of the generation that copied it.
            account: What else the entry says: `evaluation`, `audit`, `ledger`.

        Raises:
            Fenced: Another controller has taken over.
            StorageError: Whether it stands is unknown; the same call again finds out.
        """
        self.append("saved", {**saved._asdict(), "token": list(token), **account})

    def _manifest(self, steps: int, token: Token, attempt: int) -> Manifest:
        said = self._said[(steps, token, attempt)]
        parts = said[0]["parts"]
        digests = {part["layout_digest"] for part in said.values()}
        if sorted(said) != list(range(parts)) or len(digests) != 1:
            raise StorageError(
                f"step {steps} cannot be saved: the ranks' states differ in names, shapes or dtypes. Every process "
                "must register the same."
            )
        files = tuple(PieceFile(n, s, tuple(d)) for n, s, d in (said[part]["file"] for part in range(parts)))
        first = said[0]
        return Manifest(
            steps,
            token,
            attempt,
            first["evaluated_at"],
            Layout.from_json(first["tensors"]),
            files,
            first["state"],
            first["versions"],
        )

    def tidy(self, policy: retention.Retention) -> list[SavedStep]:
        """Read the newest saved step back, then remove what it makes needless; returns what was removed.

        Raises:
            Damaged: The newest is not what was written; nothing is removed.
            Fenced, StorageError: As the log.
        """
        newest = self.history.newest
        if newest is None:
            return []
        reader.verify(self._store, newest)
        gone = retention.needless(self.history.saved, self.history.values, policy)
        if gone:
            self.append("removed", {"paths": [each.path for each in gone]})
        self._collect(newest)
        return gone

    def _collect(self, newest: SavedStep) -> None:
        """Delete the files of removed steps and of saves that never came to be."""
        kept = {each.path.rpartition("/")[0] for each in self.history.saved}
        orphans = []
        for name in self._store.names(FOLDER):
            found = parse_folder(name)
            # what is newer than the newest saved step may be a save in flight
            if found is not None and folder_of(*found) not in kept and found[0] <= newest.steps:
                orphans.append(name)
        self._store.delete(sorted(orphans, key=lambda name: not name.endswith(NAME)))  # manifests first
        self._store.abort_uploads(
            FOLDER, lambda name: (found := parse_folder(name)) is not None and found[1].term < self._term
        )
