"""A run's folder on a local file system: made once, files in it are written whole or not at all and never replaced.

<storage>/<name>/config.yaml  summary.json  ledger/  metrics/  events/
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from elastic_trainer.errors import RunFolderError


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, storage: str, name: str) -> RunFolder:
        """Make the folder of a new run.

        Raises:
            RunFolderError: The name is taken, or the folder cannot be written.
        """
        folder = cls(Path(storage).expanduser() / name)
        cls.refuse_taken(storage, name)
        try:
            folder.path.mkdir(parents=True)
            folder.write_new("ledger/.probe", b"")
            (folder.path / "ledger/.probe").unlink()
        except OSError as error:
            raise RunFolderError(
                f"storage = {storage!r}: the run's folder {folder.path} cannot be written ({error.strerror}). "
                "Choose another storage, or mend its rights."
            ) from None
        return folder

    @classmethod
    def refuse_taken(cls, storage: str, name: str) -> None:
        """Tell a name that is taken, before anything is started for it.

        Raises:
            RunFolderError: The run's folder exists.
        """
        path = cls(Path(storage).expanduser() / name).path
        if path.is_dir():
            raise RunFolderError(
                f"name = {name!r}: the run exists already in {path}. Choose another name, or remove that folder."
            )

    def discard(self) -> None:
        """Remove the folder of a run that never began."""
        (self.path / "config.yaml").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / "ledger").rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_new(self, name: str, content: bytes) -> None:
        """Write a file that does not exist yet; readers see all of it or none.

        Raises:
            FileExistsError: It exists.
            OSError: It cannot be written.
        """
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")  # of this writer alone
        try:
            partial.write_bytes(content)
            os.link(partial, path)  # unlike a rename, a link never replaces
        finally:
            partial.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: It is not there.
        """
        return (self.path / name).read_bytes()

    def names(self, folder: str) -> list[str]:
        """The names of the whole files in a folder of the run, sorted; none when the folder is not there."""
        try:
            return sorted(f"{folder}/{each}" for each in os.listdir(self.path / folder) if not each.startswith("."))
        except FileNotFoundError:
            return []
