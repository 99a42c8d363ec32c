"""A run's log: its only history, as files that are numbered without gaps and written by exclusive creation.

    log/000000000000.json ...    each: one line of JSON, then its xxh3-64

Whoever creates the next number has appended; who loses the race to a later term is fenced. No entry is ever deleted: a
controller that slept would create the missing number and believe itself the owner. Readers start at the newest
`compacted` entry, which each entry points to.
"""

from __future__ import annotations

import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic_trainer.errors import Damaged, Fenced, StorageError
from elastic_trainer.storage.object_store import ObjectStore

FOLDER = "log"
COMPACT_EVERY = 200  # entries; what a starting controller reads, some seconds on a far bucket


@dataclass(frozen=True)
class Entry:
    """One entry; `values` belong to its kind, `at` is in seconds since the epoch by the writer's clock."""

    seq: int
    kind: str
    term: int
    at: float
    writer: str
    compacted_at: int
    values: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The file's content."""
        line = json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()
        return line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> Entry:
        """The entry that `to_bytes` gave.

        Raises:
            Damaged: It is not what was written.
        """
        line, _, digest = content.partition(b"\n")
        if digest != xxhash.xxh3_64_hexdigest(line).encode() + b"\n":
            raise Damaged(f"{name}: damaged (its digest does not fit). Restore the file from a copy of the store.")
        found = cls(**json.loads(line))
        if name_of(found.seq) != name.rsplit("/", 1)[-1]:
            raise Damaged(f"{name}: holds entry {found.seq}. Restore the file from a copy of the store.")
        return found


def name_of(seq: int) -> str:
    """The file name of an entry."""
    return f"{seq:012d}.json"


class RunLog:
    """The log of one run, for one reader and at most one writer.

    Args:
        store: Of the run.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._writer = secrets.token_hex(8)
        self._next = 0
        self._compacted_at = 0
        self._pending: Entry | None = None  # of which nobody knows whether it was written

    def read(self) -> list[Entry]:
        """The entries from the newest compacted one on; none when the run has never begun.

        Raises:
            Damaged: An entry is missing or damaged.
            StorageError: The store cannot be read.
        """
        return self._read(everything=False)

    def read_all(self) -> list[Entry]:
        """Every entry since the run began."""
        return self._read(everything=True)

    def _read(self, *, everything: bool) -> list[Entry]:
        names = [name for name in self._store.names(FOLDER) if name.endswith(".json")]
        for seq, name in enumerate(names):
            if name != f"{FOLDER}/{name_of(seq)}":
                raise Damaged(
                    f"{self._store.url}/{FOLDER}: entry {name_of(seq)} is missing below {name.rsplit('/', 1)[-1]}. "
                    "The history has a gap: restore the file from a copy of the store, or start under another name."
                )
        self._next = len(names)
        if not names:
            return []
        last = self._entry(self._next - 1)
        self._compacted_at = last.compacted_at
        start = 0 if everything else last.compacted_at
        with ThreadPoolExecutor(8) as pool:
            return [*pool.map(self._entry, range(start, self._next - 1)), last]

    def append(self, kind: str, term: int, values: dict[str, Any]) -> list[Entry]:
        """Append an entry, after one whose outcome is unknown; the same entry again is the same entry.

        Returns:
            What has become part of the history by this call, in order.

        Raises:
            Fenced: A controller of this term or a later one has appended meanwhile.
            StorageError: The store does not answer; whether the entry stands is unknown until the next append.
        """
        found: list[Entry] = []
        if self._pending is not None:
            found += self._write(self._pending)
            if (found[-1].kind, found[-1].values) == (kind, values):
                return found
        return [*found, *self._write(self._made(kind, term, values))]

    @property
    def is_long(self) -> bool:
        """Whether a compacted entry is due."""
        return self._next - self._compacted_at >= COMPACT_EVERY

    def _made(self, kind: str, term: int, values: dict[str, Any]) -> Entry:
        compacted_at = self._next if kind == "compacted" else self._compacted_at
        return Entry(self._next, kind, term, time.time(), self._writer, compacted_at, values)

    def _write(self, entry: Entry) -> list[Entry]:
        """Write an entry behind those of older terms that came first; returns these and the entry."""
        found: list[Entry] = []
        while True:
            self._pending = entry
            try:
                self._store.create(f"{FOLDER}/{name_of(entry.seq)}", entry.to_bytes())
            except FileExistsError:
                self._pending = None
                winner = self._entry(entry.seq)
                if winner.term >= entry.term:
                    raise Fenced(
                        f"the run was taken over: term {winner.term} has written {FOLDER}/{name_of(entry.seq)}, "
                        f"so this controller of term {entry.term} stops."
                    ) from None
                # the last breath of an older term, written before it could know of this one
                self._next = entry.seq + 1
                self._compacted_at = winner.compacted_at
                found.append(winner)
                entry = self._made(entry.kind, entry.term, entry.values)
                continue
            self._pending = None
            self._next = entry.seq + 1
            self._compacted_at = entry.compacted_at
            return [*found, entry]

    def _entry(self, seq: int) -> Entry:
        name = f"{FOLDER}/{name_of(seq)}"
        try:
            return Entry.from_bytes(name, self._store.read(name))
        except FileNotFoundError:
            raise StorageError(f"{self._store.url}/{name} was listed and cannot be found.") from None
        except Damaged as error:
            raise Damaged(f"{self._store.url}/{error}") from None
