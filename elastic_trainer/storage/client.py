"""What an object store's client must be able to do, and the client for each kind of URL.

Clients raise Python's own errors (FileNotFoundError, FileExistsError, PermissionError, other OSError);
`object_store.py` bounds and repeats their calls and puts words to what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from elastic_trainer.errors import ConfigError

Buffer = bytes | bytearray | memoryview
PACKAGES = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


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


def client_for(url: str, options: Mapping[str, Any]) -> Client:
    """The client of a URL; a path without a scheme is a local folder.

    Raises:
        ConfigError: The scheme is unknown, its package is missing, or the URL holds credentials.
    """
    # imported here: a run on local files must not pay for S3's packages, nor need them
    if "://" not in url or url.startswith("file://"):
        from elastic_trainer.storage.local_client import LocalClient

        return LocalClient(url.removeprefix("file://"))
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"storage = {parts.scheme}://…@{parts.hostname}{parts.path} holds credentials, and a URL is printed and "
            "stored. Put them into storage_options or the environment."
        )
    if parts.scheme == "memory":
        raise ConfigError(
            f"storage = {url!r} lives in the memory of one process, and a run has many. Use a folder or s3://…"
        )
    if not parts.netloc:
        raise ConfigError(f"storage = {url!r} names no bucket. Write {parts.scheme}://bucket/prefix.")
    try:
        if parts.scheme == "s3":
            from elastic_trainer.storage.s3_client import S3Client

            return S3Client(parts.netloc + parts.path, options)
        from elastic_trainer.storage.fsspec_client import FsspecClient

        return FsspecClient(parts.scheme, parts.netloc + parts.path, options)
    except ImportError as error:
        extra = PACKAGES.get(parts.scheme)
        remedy = f"pip install 'elastic-trainer[{extra}]'" if extra else "Use a local path, s3://, gs:// or az://"
        raise ConfigError(f"storage = {url!r} needs a package that is not installed ({error}). {remedy}.") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"storage = {url!r}: {error}. Use a local path, s3://bucket/prefix, gs:// or az://."
        ) from None
