"""What a run leaves to read: ledger, metrics and events as JSON lines, in segments that are written once.

    <stream>/<first step>.<term>-<generation>.<number within the term>.jsonl

Lines are collected in memory until `flush`, which writes and may block.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from elastic_trainer.errors import StorageError
from elastic_trainer.vocabulary import Token

STREAMS = ("ledger", "metrics", "events")
_SEGMENT = re.compile(r".*/(\d+)\.(\d+)-(\d+)\.(\d+)\.jsonl")


class Journal:
    """Collects the lines of one controller and writes them.

    Args:
        write_new: Writes a file of the run that does not exist yet; raises StorageError or FileExistsError.
        complain: Told when a segment cannot be written; its lines are kept and tried again with the next.
    """

    def __init__(self, write_new: Callable[[str, bytes], None], complain: Callable[[str], None]) -> None:
        self._write_new = write_new
        self._complain = complain
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._lines: dict[str, list[tuple[int, Token, str]]] = {stream: [] for stream in STREAMS}
        self._numbers = 0
        self._ledger: list[list[str]] = []

    def add(self, stream: str, step: int, token: Token, line: dict[str, Any]) -> None:
        """Append a line to a stream."""
        with self._lock:
            self._lines[stream].append((step, token, json.dumps(line)))

    def flush(self) -> bool:
        """Write what has been added, one segment a stream and token; returns whether nothing is left."""
        with self._flushing:
            with self._lock:
                taken, self._lines = self._lines, {stream: [] for stream in STREAMS}
            is_done = True
            for stream, lines in taken.items():
                kept: list[tuple[int, Token, str]] = []
                for token in dict.fromkeys(token for _, token, _ in lines):
                    kept += self._write(stream, token, [line for line in lines if line[1] == token])
                if kept:
                    is_done = False
                    with self._lock:
                        self._lines[stream] = kept + self._lines[stream]
            return is_done

    def take_ledger_segments(self) -> list[list[str]]:
        """Name and sha256 of the ledger's segments that were written since the last call."""
        with self._lock:
            taken, self._ledger = self._ledger, []
            return taken

    def _write(self, stream: str, token: Token, lines: list[tuple[int, Token, str]]) -> list[tuple[int, Token, str]]:
        """Write a segment; returns the lines that could not be written."""
        self._numbers += 1
        name = f"{stream}/{lines[0][0]:012d}.{token}.{self._numbers:06d}.jsonl"
        content = "".join(text + "\n" for _, _, text in lines).encode()
        try:
            self._write_new(name, content)
        except (StorageError, FileExistsError) as error:
            self._complain(f"{name} cannot be written ({error}); its lines are kept and tried again")
            return lines
        if stream == "ledger":
            with self._lock:
                self._ledger.append([name, hashlib.sha256(content).hexdigest()])
        return []


def segments_from(names: list[str], step: int) -> list[str]:
    """Those segments of a stream that may hold lines of `step` and later, in the order of writing."""
    found = []
    places = sorted((order, first, name) for name in names if (parsed := _parse(name)) for order, first in [parsed])
    for index, (order, first, name) in enumerate(places):
        after = places[index + 1] if index + 1 < len(places) else None
        # a segment ends where the next one of the same term begins, unless the run went back in between
        if after is None or after[0][0] != order[0] or after[1] > step or after[1] <= first:
            found.append(name)
    return found


def read_stream(names: list[str], read: Callable[[str], bytes]) -> Iterator[dict[str, Any]]:
    """All lines of a stream from its segments, in the order of writing."""
    for name in segments_from(names, 0):
        for line in read(name).decode().splitlines():
            yield json.loads(line)


def _parse(name: str) -> tuple[tuple[int, int], int] | None:
    """(term, number) and first step of a segment's name."""
    found = _SEGMENT.fullmatch(name)
    return None if found is None else ((int(found[2]), int(found[4])), int(found[1]))
