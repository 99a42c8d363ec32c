"""Local files: written whole or not at all, durable before they count, created through a hard link."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elastic_trainer.storage.client import Buffer

PARTIAL = ".partial"
MOST_TARGETS = 1024  # of one preadv, by POSIX
_FINAL = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


class LocalClient:
    """A folder of this machine or of a shared file system."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser().absolute()

    def create(self, key: str, content: bytes) -> None:
        """Write a new file; a link, unlike a rename, never replaces."""
        self._write(key, content, os.link)

    def put(self, key: str, content: Buffer) -> None:
        """Write a file, replacing one of that name."""
        self._write(key, content, os.replace)

    def read(self, key: str) -> bytes:
        """A file's content."""
        return (self._folder / key).read_bytes()

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """Straight into the target's memory."""
        return self.read_scattered(key, offset, [target])

    def read_scattered(self, key: str, offset: int, targets: Sequence[memoryview]) -> int:
        """One system call, when the kernel gives all at once."""
        descriptor = os.open(self._folder / key, os.O_RDONLY)
        try:
            done, left = 0, [target for target in targets if len(target)]
            while left:
                count = os.preadv(descriptor, left[:MOST_TARGETS], offset + done)
                if count == 0:
                    break
                done += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
            return done
        finally:
            os.close(descriptor)

    def sizes(self, folder: str) -> dict[str, int]:
        """Whole files only."""
        return {
            str(path.relative_to(self._folder)): size
            for path, size in _files(self._folder / folder)
            if not path.name.endswith(PARTIAL)
        }

    def folders(self, folder: str) -> list[str]:
        """One level."""
        try:
            return sorted(e.name for e in os.scandir(self._folder / folder) if e.is_dir() and e.name[0] != ".")
        except FileNotFoundError:
            return []

    def delete(self, key: str) -> None:
        """Remove a file, and its folder when that is empty then."""
        path = self._folder / key
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def abort_uploads(self, folder: str, is_orphan: Callable[[str], bool]) -> None:
        """Partial files of a writer that was killed."""
        for path, _ in _files(self._folder / folder):
            if path.name.endswith(PARTIAL) and is_orphan(str(path.relative_to(self._folder))):
                path.unlink(missing_ok=True)

    def is_transient(self, error: BaseException) -> bool:
        """Network file systems fail for a while; a full or read-only one stays so."""
        return (
            isinstance(error, OSError)
            and error.errno not in _FINAL
            and not isinstance(error, FileNotFoundError | FileExistsError | PermissionError)
        )

    def _write(self, key: str, content: Buffer, place: Callable[[Path, Path], None]) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")  # of this writer alone
        try:
            with open(partial, "wb", buffering=0) as file:
                view = memoryview(content).cast("B")
                while len(view):
                    view = view[file.write(view) :]
                os.fsync(file.fileno())  # a name must not survive a power cut that its content does not
            place(partial, path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            with contextlib.suppress(FileNotFoundError):  # a partial file that was just placed
                yield Path(entry.path), entry.stat().st_size
