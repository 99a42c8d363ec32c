"""Any object store that fsspec knows, through the file system object that fsspec makes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fsspec

from elastic_trainer.storage.client import Buffer

_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_REFUSED = ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "NoCredentials")


class FsspecClient:
    """The objects below a prefix."""

    def __init__(self, scheme: str, prefix: str, options: Mapping[str, Any]) -> None:
        # an instance of its own without a cache of listings: the log must be seen as it is
        self.fs = fsspec.filesystem(scheme, **{"use_listings_cache": False, "skip_instance_cache": True, **options})
        self.prefix = prefix.strip("/")

    def create(self, key: str, content: bytes) -> None:
        """Exclusive as far as the store and its client are; the probe finds out."""
        try:
            self.fs.pipe_file(self._path(key), content, mode="create")
        except FileExistsError:
            raise
        except Exception as error:
            if _says(error, _EXISTS):
                raise FileExistsError(key) from error
            raise

    def put(self, key: str, content: Buffer) -> None:
        """Write an object."""
        self.fs.pipe_file(self._path(key), bytes(content))

    def read(self, key: str) -> bytes:
        """An object's content."""
        return bytes(self.fs.cat_file(self._path(key)))

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """One range request."""
        found = self.fs.cat_file(self._path(key), start=offset, end=offset + len(target))
        target[: len(found)] = found
        return len(found)

    def sizes(self, folder: str) -> dict[str, int]:
        """One listing."""
        try:
            found = self.fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.prefix) + 1
        return {name[start:]: int(entry["size"] or 0) for name, entry in found.items() if entry["type"] == "file"}

    def folders(self, folder: str) -> list[str]:
        """One level."""
        try:
            found = self.fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = (entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")
        return sorted(name for name in names if not name.startswith("."))

    def delete(self, key: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(key))

    def abort_uploads(self, folder: str, is_orphan: Callable[[str], bool]) -> None:
        """Unknown to fsspec; gcsfs and adlfs leave them to the service's lifetime rules."""

    def is_transient(self, error: BaseException) -> bool:
        """Everything is, but what the store itself calls absent, present or forbidden."""
        if isinstance(error, FileNotFoundError | FileExistsError | PermissionError | TypeError | ValueError):
            return False
        return not _says(error, _REFUSED)

    def _path(self, key: str) -> str:
        return f"{self.prefix}/{key}" if key else self.prefix


def _says(error: BaseException | None, codes: Sequence[str]) -> bool:
    """Whether the store's own answer behind an error has one of these codes."""
    while error is not None:
        response = getattr(error, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "code", None)
        if str(code) in codes or str(getattr(error, "status", None)) in codes or type(error).__name__ in codes:
            return True
        error = error.__cause__ or error.__context__
    return False
