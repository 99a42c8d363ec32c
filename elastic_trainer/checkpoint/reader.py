"""Reads a checkpoint back: every byte is checked before it counts, and goes straight to where it belongs.

A chunk is read into a buffer of the reading thread, its digest is compared, and only then its bytes are dealt out; so a
tensor never holds bytes that were not written, and a read that was given up can write into nobody's tensor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from elastic_trainer.checkpoint.manifest import CHUNK_BYTES, ChunkRead, Manifest
from elastic_trainer.errors import Damaged, StorageError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep

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


def restore(
    store: ObjectStore, manifest: Manifest, targets: Sequence[torch.Tensor], check: Callable[[], None] = lambda: None
) -> None:
    """Fill tensors with a checkpoint's bytes.

    Args:
        store: Of the run.
        manifest: Of the checkpoint.
        targets: One for each tensor of the layout, of its dtype and shape, contiguous, on the CPU.
        check: Called again and again; what it raises ends the reading.

    Raises:
        Damaged: A file is missing, short or changed; the message names file and place.
        StorageError: The store does not answer.
    """
    views = [_bytes_of(target) for target in targets]

    def deal(chunk: ChunkRead, content: memoryview) -> None:
        for copy in chunk.copies:
            views[copy.tensor][copy.at : copy.at + copy.stop - copy.start] = content[copy.start : copy.stop]

    _read_all(store, manifest, deal, check)


def verify(store: ObjectStore, saved: SavedStep, check: Callable[[], None] = lambda: None) -> Manifest:
    """Read a whole checkpoint and compare every digest.

    Raises:
        Damaged: Something is not what was written; the message names file and place.
        StorageError: The store does not answer.
    """
    manifest = load_manifest(store, saved)
    _read_all(store, manifest, lambda chunk, content: None, check)
    return manifest


def _read_all(
    store: ObjectStore,
    manifest: Manifest,
    deal: Callable[[ChunkRead, memoryview], None],
    check: Callable[[], None],
) -> None:
    chunks: queue.SimpleQueue[ChunkRead | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    count = 0
    for chunk in manifest.chunks():
        chunks.put(chunk)
        count += 1
    has_stopped = threading.Event()

    def work() -> None:
        buffer = memoryview(np.empty(CHUNK_BYTES, np.uint8))  # type: ignore[arg-type]
        while (chunk := chunks.get()) is not None and not has_stopped.is_set():
            try:
                content = buffer[: chunk.length]
                _read_chunk(store, chunk, content)
                deal(chunk, content)
                results.put(None)
            except BaseException as error:
                results.put(error)
                return

    threads = [threading.Thread(target=work, name="restore", daemon=True) for _ in range(min(READERS, count))]
    for thread in threads:
        chunks.put(None)
        thread.start()
    try:
        for _ in range(count):
            while True:
                check()
                try:
                    error = results.get(timeout=0.1)
                    break
                except queue.Empty:
                    continue
            if error is not None:
                raise error
    finally:
        has_stopped.set()
        for thread in threads:
            thread.join()


def _read_chunk(store: ObjectStore, chunk: ChunkRead, content: memoryview) -> None:
    try:
        store.read_into(chunk.file, chunk.offset, content)
    except FileNotFoundError:
        raise Damaged(f"{chunk.file}: is missing") from None
    except StorageError as error:
        if error.__cause__ is None:  # the store answered, and the file is too short
            raise Damaged(str(error)) from None
        raise
    found = xxhash.xxh3_128_hexdigest(content)
    if found != chunk.digest:
        raise Damaged(
            f"{chunk.file}: bytes {chunk.offset} to {chunk.offset + chunk.length} are not what was written "
            f"(digest {found}, the manifest says {chunk.digest})"
        )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr(), "a target must be contiguous"
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
