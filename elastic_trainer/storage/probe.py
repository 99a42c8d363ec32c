"""Whether a store can hold a run: reachable, writable, and exclusive in the very client that will write the log."""

from __future__ import annotations

import secrets

from elastic_trainer.errors import StorageError
from elastic_trainer.storage.object_store import ObjectStore

FOLDER = ".probe"


def probe(store: ObjectStore) -> None:
    """Create a file, fail to create it again, read it back and remove it.

    Raises:
        StorageError: The store cannot be used; says what to change.
    """
    name, content = f"{FOLDER}/{secrets.token_hex(8)}", secrets.token_bytes(32)
    try:
        store.create(name, content)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            what = "there is no such bucket" if "://" in store.url else "it cannot be written: there is no such folder"
            raise StorageError(f"storage = {store.url!r}: {what}. Create it, or name one that exists.") from None
        raise StorageError(f"storage cannot be written: {error} {_remedy(error)}") from None
    try:
        _check(store, name, content)
    finally:
        store.delete([name])


def _check(store: ObjectStore, name: str, content: bytes) -> None:
    try:
        store.create(name, secrets.token_bytes(32))
    except FileExistsError:
        pass
    else:
        raise StorageError(
            f"storage = {store.url!r}: creating a file that exists replaced it, so two controllers could both write "
            "the run's history. Use a store with conditional writes (If-None-Match), or a local file system."
        )
    if store.read(name) != content:
        raise StorageError(f"storage = {store.url!r}: a file was read back with another content. Use another store.")


def _remedy(error: StorageError) -> str:
    match error.__cause__:
        case PermissionError():
            return "Check credentials (storage_options or the environment) and the right to write there."
        case OSError(errno=30):
            return "The file system is read-only: choose another storage."
        case OSError(errno=28) | OSError(errno=122):
            return "The disk or the quota is full: free space, or choose another storage."
        case _:
            return "Check the address (endpoint_url in storage_options), the network and the service."


def leave_marker(store: ObjectStore) -> tuple[str, bytes]:
    """Write a file that every node must be able to read; returns its name and content."""
    name, content = f"{FOLDER}/{secrets.token_hex(8)}", secrets.token_bytes(16)
    store.create(name, content)
    return name, content


def sees_marker(store: ObjectStore, marker: tuple[str, bytes]) -> bool:
    """Whether this process sees the same store as the one that left the marker."""
    try:
        return store.read(marker[0]) == marker[1]
    except FileNotFoundError:
        return False
