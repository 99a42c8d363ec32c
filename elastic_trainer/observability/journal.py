"""What a run leaves to read: ledger, metrics and events as JSON lines, in segments that are written once.

Lines are collected in memory and written by a thread of the journal's own, so that a slow disk holds up nobody.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from elastic_trainer.vocabulary import Token

STREAMS = ("ledger", "metrics", "events")
EVERY_S = 5.0  # what a killed controller may cost a reader of the run's files


class Journal:
    """Writes the streams of one controller.

    Args:
        write_new: Writes a file of the run that does not exist yet.
        complain: Told when a segment cannot be written; its lines are kept and tried again with the next.
    """

    def __init__(self, write_new: Callable[[str, bytes], None], complain: Callable[[str], None]) -> None:
        self._write_new = write_new
        self._complain = complain
        self._lock = threading.Lock()
        self._lines: dict[str, list[tuple[int, Token, str]]] = {stream: [] for stream in STREAMS}
        self._segments = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, stream: str, step: int, token: Token, line: dict[str, Any]) -> None:
        """Append a line to a stream."""
        with self._lock:
            self._lines[stream].append((step, token, json.dumps(line)))

    def flush(self) -> None:
        """Write what has been added, one segment a stream and token."""
        with self._lock:
            taken, self._lines = self._lines, {stream: [] for stream in STREAMS}
        for stream, lines in taken.items():
            kept: list[tuple[int, Token, str]] = []
            for token in dict.fromkeys(token for _, token, _ in lines):
                kept += self._write(stream, token, [line for line in lines if line[1] == token])
            if kept:
                with self._lock:
                    self._lines[stream] = kept + self._lines[stream]

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def _write(self, stream: str, token: Token, lines: list[tuple[int, Token, str]]) -> list[tuple[int, Token, str]]:
        """Write a segment; returns the lines that could not be written."""
        self._segments += 1
        name = f"{stream}/{lines[0][0]:012d}.{token}.{self._segments:06d}.jsonl"
        try:
            self._write_new(name, "".join(text + "\n" for _, _, text in lines).encode())
        except OSError as error:
            self._complain(f"{name} cannot be written ({error}); its lines are kept and tried again")
            return lines
        return []

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.flush()


def read_stream(names: list[str], read: Callable[[str], bytes]) -> Iterator[dict[str, Any]]:
    """All lines of a stream from its segments, in the order of writing."""
    for name in sorted(names, key=lambda name: name.split(".")[-2]):
        for line in read(name).decode().splitlines():
            yield json.loads(line)
