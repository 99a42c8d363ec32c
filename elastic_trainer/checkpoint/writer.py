"""A rank's part in saving: one copy in memory at the step boundary, the rest in a thread of its own.

The copy is of the whole state, so that the survivors of a rank that dies in a save can write its part as well. It is
kept until the controller has said what became of the save.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from elastic_trainer.checkpoint.layout import Layout
from elastic_trainer.checkpoint.manifest import CHUNK_BYTES, folder_of
from elastic_trainer.control.events import Event, PiecesFailed, PiecesWritten, SaveBegan
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import JSON, Token, Worker


@dataclass(frozen=True)
class _Copy:
    """The state after a step, in the memory of the writer."""

    steps: int
    token: Token
    evaluated_at: int
    layout: Layout
    state: JSON


class Writer:
    """Copies and writes the state of one worker.

    Args:
        worker: Whose.
        open_store: Makes the run's store; called once, in the writing thread.
        report: Sends an event to the controller; called from main and writing thread.
        versions: What is writing, for the manifest.
    """

    def __init__(
        self,
        worker: Worker,
        open_store: Callable[[], ObjectStore],
        report: Callable[[Event], None],
        versions: dict[str, str],
    ) -> None:
        self._worker = worker
        self._open_store = open_store
        self._report = report
        self._versions = versions
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_lent = False  # to a call that was given up and may still write what lies there
        self._copy: _Copy | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._store: ObjectStore | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a copy is still needed, so that no other can be made."""
        return not self._settled.is_set()

    def await_idle(self, timeout_s: float) -> bool:
        """Wait until the copy is no longer needed, at most so long."""
        return self._settled.wait(timeout_s)

    def begin(
        self,
        steps: int,
        token: Token,
        evaluated_at: int,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        state: JSON,
        *,
        part: int,
        parts: int,
    ) -> None:
        """Copy the state now and write part `part` of `parts` in the background; the writer must not be busy.

        Args:
            steps: Done steps that the state contains.
            token: Of the generation.
            evaluated_at: After how many steps the last evaluation was.
            layout: Of the tensors.
            tensors: In the layout's order.
            state: Describes the rest of the state.
            part: This rank.
            parts: Ranks of the generation.
        """
        assert not self.is_busy, "one save at a time"
        if self._memory.numel() != layout.size_bytes or self._is_lent:
            # kept for every later save, so only the first one pays for fresh pages; zeros between the tensors
            self._memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
            self._is_lent = False
        for tensor, offset in zip(tensors, layout.offsets, strict=False):
            if tensor.numel():
                target = self._memory[offset : offset + tensor.numel() * tensor.element_size()]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._copy = copy = _Copy(steps, token, evaluated_at, layout, state)
        self._settled.clear()
        self._report(SaveBegan(self._worker, token, steps))
        self._put(copy, 0, part, parts)

    def write_again(self, steps: int, token: Token, attempt: int, part: int, parts: int) -> None:
        """Write another division of the same copy: a rank that had a part of it is gone."""
        copy = self._copy
        if copy is not None and (copy.steps, copy.token) == (steps, token):
            self._put(copy, attempt, part, parts)

    def settle(self, steps: int, token: Token) -> None:
        """The controller has saved the step or given it up: the copy is free."""
        copy = self._copy
        if copy is not None and (copy.token, copy.steps) <= (token, steps):
            self._copy = None
            self._settled.set()

    def _put(self, copy: _Copy, attempt: int, part: int, parts: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._work,), name="checkpoint", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._work.put, None)
        self._work.put(lambda: self._write_and_tell(copy, attempt, part, parts))

    def _write_and_tell(self, copy: _Copy, attempt: int, part: int, parts: int) -> None:
        if copy is not self._copy:
            return  # given up meanwhile
        try:
            self._store = self._store or self._open_store()
            content = self._write(self._store, copy, attempt, part, parts)
        except Exception as error:  # whatever it is: who waits for this part must hear of it
            self._report(PiecesFailed(self._worker, copy.token, copy.steps, attempt, str(error)))
        else:
            if content is not None:
                self._report(PiecesWritten(self._worker, copy.token, copy.steps, attempt, content))

    def _write(self, store: ObjectStore, copy: _Copy, attempt: int, part: int, parts: int) -> str | None:
        mine = copy.layout.parts(parts)[part]
        name = f"r{part}.bin"
        view = memoryview(self._memory[mine.start : mine.stop].numpy())  # type: ignore[arg-type]
        digests = [xxhash.xxh3_128_hexdigest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES)]
        began = time.monotonic()
        try:
            store.put(f"{folder_of(copy.steps, copy.token, attempt)}/{name}", view)
        finally:
            self._is_lent = self._is_lent or time.monotonic() - began >= store.patience_s(len(view))
        if copy is not self._copy:
            return None  # the memory may hold another step by now
        layout = copy.layout.to_json()
        said = {
            "part": part,
            "parts": parts,
            "file": [name, len(view), digests],
            "layout_digest": zlib.crc32(json.dumps(layout).encode()),
        }
        if part == 0:
            said |= {
                "tensors": layout,
                "state": copy.state,
                "evaluated_at": copy.evaluated_at,
                "versions": self._versions,
            }
        return json.dumps(said)


def _work_off(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """One after the other, until None: knows its writer only while it writes, so that the two end together."""
    while (write := work.get()) is not None:
        write()
        del write
