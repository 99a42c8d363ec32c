"""The one object store of a run: bounded calls, repeated where that may help, ambiguous outcomes read back.

Everything that a run keeps goes through here. Names are relative to the store; a store `within` a folder of another
one shares its client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic_trainer.errors import StorageError
from elastic_trainer.storage.client import Buffer, Client, ScatteringClient
from elastic_trainer.storage.clients import client_for
from elastic_trainer.storage.deadline import Overdue, retried

T = TypeVar("T")
SLOWEST = 4 << 20  # bytes a second that a bulk transfer is given time for; a shared disk or a far bucket does more


class ObjectStore:
    """Files by name below a URL.

    Args:
        url: `s3://bucket/prefix`, another URL that fsspec knows, or a local path.
        options: For the client: endpoint, credentials and the like. Never printed, never stored.
        timeout_s: Bound of one call with its repetitions, beside the time that its bytes take.

    Every method raises StorageError when the store cannot be reached, refuses, or does not answer in time.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 30.0,
        client: Client | None = None,
    ) -> None:
        self.url = url.rstrip("/") or "/"
        self.client = client or client_for(url, options or {})
        self.timeout_s = timeout_s
        self.path = ""  # below the client's own place

    def within(self, folder: str) -> ObjectStore:
        """The same store, names relative to a folder in it."""
        inner = ObjectStore(f"{self.url}/{folder}", timeout_s=self.timeout_s, client=self.client)
        inner.path = self._key(folder)
        return inner

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist; readers see all of it or none.

        When the answer was lost the file is read back, so `content` must be the caller's own (hold a nonce).

        Raises:
            FileExistsError: Somebody else's file stands there.
        """
        try:
            self._call("create", name, lambda key: self._create_or_find(key, content), len(content))
        except FileExistsError:
            raise FileExistsError(f"{self.url}/{name}") from None
        except FileNotFoundError as error:
            raise StorageError(f"{self.url}/{name}: cannot create: {_words(error)}") from error

    def put(self, name: str, content: Buffer) -> None:
        """Write a file, replacing one of that name; readers see the old one or the new one."""
        try:
            self._call("write", name, lambda key: self.client.put(key, content), len(content))
        except FileNotFoundError as error:  # such as a bucket that is not there
            raise StorageError(f"{self.url}/{name}: cannot write: {_words(error)}") from error

    def read(self, name: str) -> bytes:
        """A file's content.

        Raises:
            FileNotFoundError: It is not there.
        """
        return self._call("read", name, self.client.read)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a file from `offset` on.

        Raises:
            FileNotFoundError: It is not there.
            StorageError: It is too short.
        """
        count = self._call("read", name, lambda key: self.client.read_into(key, offset, target), len(target))
        if count != len(target):
            raise StorageError(
                f"{self.url}/{name} ends at byte {offset + count}, before {offset + len(target)}: it was cut short."
            )

    def read_watched(self, name: str, offset: int, targets: Sequence[memoryview]) -> None:
        """Like `read_into`, for a thread that its caller watches and leaves behind: the call has no bound of its own.

        Args:
            name: Of the file.
            offset: Of the first byte.
            targets: Filled one after the other; several only when `reads_scattered`.
        """
        size = sum(map(len, targets))
        client = self.client
        if isinstance(client, ScatteringClient):
            count = self._call("read", name, lambda key: client.read_scattered(key, offset, targets), None)
        else:
            (target,) = targets
            count = self._call("read", name, lambda key: client.read_into(key, offset, target), None)
        if count != size:
            raise StorageError(
                f"{self.url}/{name} ends at byte {offset + count}, before {offset + size}: it was cut short."
            )

    @property
    def reads_scattered(self) -> bool:
        """Whether one read can fill several places in memory: with local files it can."""
        return isinstance(self.client, ScatteringClient)

    def patience_s(self, size_bytes: int) -> float:
        """How long one try at moving so many bytes may take; a longer call has left such a try behind."""
        return self.timeout_s / 2 + size_bytes / SLOWEST

    def silent_s(self, size_bytes: int) -> float:
        """How long a watched read of so many bytes may take."""
        return self.timeout_s + size_bytes / SLOWEST

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below a folder, by name, with its size in bytes; none when the folder is not there."""
        start = len(self.path) + 1 if self.path else 0
        found = self._call("list", folder, self.client.sizes)
        return {name[start:]: found[name] for name in sorted(found)}

    def names(self, folder: str) -> list[str]:
        """The names of the files below a folder, sorted."""
        return list(self.sizes(folder))

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, sorted."""
        return self._call("list", folder, self.client.folders)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; those that are not there do not matter."""
        for name in names:
            self._call("delete", name, self.client.delete)

    def abort_uploads(self, folder: str, is_orphan: Callable[[str], bool]) -> None:
        """End uploads below a folder that were begun and never completed, where the store keeps (and bills) such."""
        start = len(self.path) + 1 if self.path else 0
        self._call("abort uploads", folder, lambda key: self.client.abort_uploads(key, lambda k: is_orphan(k[start:])))

    # ----

    def _create_or_find(self, key: str, content: bytes) -> None:
        try:
            self.client.create(key, content)
        except FileExistsError:
            # a try before this one may have written it without our hearing of it
            try:
                found = self.client.read(key)
            except FileNotFoundError:  # S3 says so of two requests at once, whichever wins
                raise ConnectionError("the store says that the file exists, and does not find it") from None
            if found != content:
                raise

    def _key(self, name: str) -> str:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise StorageError(f"{name!r} is not a name in the store: it would leave {self.url}.")
        return f"{self.path}/{name}".strip("/")

    def _call(self, what: str, name: str, call: Callable[[str], T], size_bytes: int | None = 0) -> T:
        """Bounded by the size that moves; None: the caller watches."""
        key = self._key(name)
        try:
            return retried(
                lambda: call(key),
                try_s=None if size_bytes is None else self.patience_s(size_bytes),
                whole_s=2 * self.patience_s(size_bytes or 0),
                is_final=lambda error: not isinstance(error, Overdue) and not self.client.is_transient(error),
            )
        except (FileExistsError, FileNotFoundError):
            raise
        except Exception as error:
            raise StorageError(f"{self.url}/{name}: cannot {what}: {_words(error)}") from error


def _words(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{text.splitlines()[0].rstrip('.')} ({type(error).__name__})."
