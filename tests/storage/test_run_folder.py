from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic_trainer.errors import RunFolderError
from elastic_trainer.storage.run_folder import RunFolder


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    RunFolder.create(str(tmp_path), "job")

    with pytest.raises(RunFolderError, match="the run exists already"):
        RunFolder.create(str(tmp_path), "job")


@pytest.mark.parametrize("storage", ["/proc/nowhere", "file"])
def test_a_storage_that_cannot_be_written_is_refused(storage: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.create(storage if storage.startswith("/") else str(tmp_path / storage), "job")


def test_a_file_is_never_replaced_and_one_of_many_writers_wins(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    won: list[int] = []

    def write(number: int) -> None:
        try:
            folder.write_new("a/file", str(number).encode())
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(won) == 1
    assert folder.read("a/file") == str(won[0]).encode()
    assert folder.names("a") == ["a/file"], "partial files are left or listed"
    assert folder.names("nothing") == []


def test_the_folder_of_a_run_that_never_began_goes_away(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "job")
    folder.discard()

    assert not folder.path.exists()
