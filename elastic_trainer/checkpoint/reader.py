"""Reads a checkpoint back: every byte is checked before it counts, and goes straight to where it belongs.

From local files a chunk is read into the tensors themselves, from elsewhere into a buffer of the reading thread; then
its digest is compared. A restore that raises leaves tensors that nobody may use.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from elastic_trainer.checkpoint.manifest import CHUNK_BYTES, ChunkRead, Manifest
from elastic_trainer.errors import Damaged, StorageError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep

if TYPE_CHECKING:
    import torch

READERS = 8  # requests at a time; one waits for the store while another compares and copies


def load_manifest(store: ObjectStore, saved: SavedStep) -> Manifest:
    """The manifest of a saved step.

    Raises:
        Damaged: It is missing or not what the log says.
        StorageError: The store does not answer.
    """
    try:
        content = store.read(saved.path)
    except FileNotFoundError:
        raise Damaged(f"{saved.path}: is missing") from None
    return Manifest.from_bytes(saved.path, content, saved.sha256)


class MemoryInDoubt(StorageError):
    """A read straight into tensors was given up and may still come: the process must not go on with them."""


def restore(
    store: ObjectStore, manifest: Manifest, targets: Sequence[torch.Tensor], check: Callable[[], None] = lambda: None
) -> None:
    """Fill tensors with a checkpoint's bytes.

    Args:
        store: Of the run.
        manifest: Of the checkpoint.
        targets: One for each tensor of the layout, of its dtype and shape, contiguous, on the CPU. When this raises
            they hold neither what they held nor what was saved.
        check: Called again and again; what it raises ends the reading.

    Raises:
        Damaged: A file is missing, short or changed; the message names file and place.
        MemoryInDoubt: The store does not answer, and may still write into `targets`.
        StorageError: The store does not answer.
    """
    views = [_bytes_of(target) for target in targets]
    _read_all(store, manifest, views, check)


def verify(store: ObjectStore, saved: SavedStep, check: Callable[[], None] = lambda: None) -> Manifest:
    """Read a whole checkpoint and compare every digest.

    Raises:
        Damaged: Something is not what was written; the message names file and place.
        StorageError: The store does not answer.
    """
    manifest = load_manifest(store, saved)
    _read_all(store, manifest, None, check)
    return manifest


class _Reading(threading.Thread):
    """Takes chunks until there are none; from the moment that it is left behind it touches no tensor."""

    def __init__(self, store: ObjectStore, views: list[memoryview] | None, chunks: Any, results: Any) -> None:
        super().__init__(name="restore", daemon=True)
        self._store = store
        self._views = views
        self._chunks = chunks
        self._results = results
        self._dealing = threading.Lock()
        self._is_left = False
        self._scratch = memoryview(np.empty(CHUNK_BYTES, np.uint8))  # type: ignore[arg-type]

    def leave(self) -> None:
        """Whatever it still reads counts no more."""
        with self._dealing:
            self._is_left = True

    def run(self) -> None:
        """The thread."""
        while not self._is_left and (chunk := self._chunks.get()) is not None:
            try:
                self._take(chunk)
                self._results.put(None)
            except BaseException as error:
                self._results.put(error)
                return

    def _take(self, chunk: ChunkRead) -> None:
        views = self._views
        if views is not None and self._store.reads_scattered:
            # straight to where the bytes belong, the padding between tensors into the scratch
            _read_chunk(self._store, chunk, _places(chunk, views, self._scratch))
            return
        content = self._scratch[: chunk.length]
        _read_chunk(self._store, chunk, [content])
        if views is None:
            return
        with self._dealing:
            if not self._is_left:
                for copy in chunk.copies:
                    views[copy.tensor][copy.at : copy.at + copy.stop - copy.start] = content[copy.start : copy.stop]


def _read_all(
    store: ObjectStore, manifest: Manifest, views: list[memoryview] | None, check: Callable[[], None]
) -> None:
    chunks: queue.SimpleQueue[ChunkRead | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    count = 0
    for chunk in manifest.chunks():
        chunks.put(chunk)
        count += 1
    threads = [_Reading(store, views, chunks, results) for _ in range(min(READERS, count))]
    for thread in threads:
        chunks.put(None)
        thread.start()
    try:
        for _ in range(count):
            error = _await_result(store, results, views, check)
            if error is not None:
                raise error
    finally:
        for thread in threads:
            thread.leave()
        if views is not None and store.reads_scattered:
            _await_last_reads(store, threads)


def _await_last_reads(store: ObjectStore, threads: Sequence[_Reading]) -> None:
    """What is still being read straight into tensors must not come after what follows."""
    deadline = time.monotonic() + store.silent_s(CHUNK_BYTES * READERS)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise MemoryInDoubt(f"{store.url}: a read of {CHUNK_BYTES} bytes does not end") from None


def _await_result(
    store: ObjectStore, results: Any, views: list[memoryview] | None, check: Callable[[], None]
) -> BaseException | None:
    deadline = time.monotonic() + store.silent_s(CHUNK_BYTES * READERS)
    while True:
        check()
        try:
            found: BaseException | None = results.get(timeout=0.1)
            return found
        except queue.Empty:
            if time.monotonic() > deadline:
                kind = MemoryInDoubt if views is not None and store.reads_scattered else StorageError
                raise kind(f"{store.url}: no answer to a read of {CHUNK_BYTES} bytes") from None


def _places(chunk: ChunkRead, views: list[memoryview], scratch: memoryview) -> list[memoryview]:
    found, at = [], 0
    for copy in chunk.copies:
        if copy.start > at:
            found.append(scratch[: copy.start - at])
        found.append(views[copy.tensor][copy.at : copy.at + copy.stop - copy.start])
        at = copy.stop
    if chunk.length > at:
        found.append(scratch[: chunk.length - at])
    return found


def _read_chunk(store: ObjectStore, chunk: ChunkRead, places: list[memoryview]) -> None:
    try:
        store.read_watched(chunk.file, chunk.offset, places)
    except FileNotFoundError:
        raise Damaged(f"{chunk.file}: is missing") from None
    except StorageError as error:
        if error.__cause__ is None:  # the store answered, and the file is too short
            raise Damaged(str(error)) from None
        raise
    digest = xxhash.xxh3_128()
    for place in places:
        digest.update(place)
    found = digest.hexdigest()
    if found != chunk.digest:
        raise Damaged(
            f"{chunk.file}: bytes {chunk.offset} to {chunk.offset + chunk.length} are not what was written "
            f"(digest {found}, the manifest says {chunk.digest})"
        )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch  # not above: a controller verifies without tensors, and starts faster without torch

    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr(), "a target must be contiguous"
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
