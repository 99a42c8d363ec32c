"""What an object store's client must be able to do.

Clients raise Python's own errors (FileNotFoundError, FileExistsError, PermissionError, other OSError);
`object_store.py` bounds and repeats their calls and puts words to what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


class Client(Protocol):
    """One store. Keys are relative, `/` between their parts, and never climb."""

    def create(self, key: str, content: bytes) -> None:
        """Write an object that does not exist; all of it or nothing. FileExistsError when it exists."""

    def put(self, key: str, content: Buffer) -> None:
        """Write an object, whatever stood there; readers see the old or the new one."""

    def read(self, key: str) -> bytes:
        """An object's content."""

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on; returns how many bytes there were."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Every object below `folder` with its size, as keys relative to the store."""

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in `folder`, those that begin with a dot left out."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""

    def abort_uploads(self, folder: str, is_orphan: Callable[[str], bool]) -> None:
        """End multipart uploads below a folder whose key `is_orphan`: they are invisible and cost storage."""

    def is_transient(self, error: BaseException) -> bool:
        """Whether a repetition may succeed."""


@runtime_checkable
class ScatteringClient(Protocol):
    """A client that fills several places in memory by one read."""

    def read_scattered(self, key: str, offset: int, targets: Sequence[memoryview]) -> int:
        """Fill the targets one after the other; returns how many bytes there were."""
