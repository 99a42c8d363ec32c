"""Stores that cannot hold a run are found before it begins, with words that say what to change."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.errors import StorageError
from elastic_trainer.storage.local_client import LocalClient
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.probe import leave_marker, probe, sees_marker
from tests.s3server import S3Server


def test_a_good_store_passes_and_keeps_nothing(tmp_path: Path, s3: S3Server) -> None:
    for store in (ObjectStore(str(tmp_path)), ObjectStore(s3.url(), s3.options())):
        probe(store)
        assert store.names("") == []


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://runs/x", {"key": "unknown"}, "access key.*Check credentials"),
        ("s3://runs/x", {"secret": "wrong"}, "signature.*Check credentials"),
        ("s3://runs/x", {"key": "reader"}, "Access Denied.*the right to write"),
        ("s3://no-such-bucket/x", {}, "there is no such bucket"),
        ("s3://runs/x", {"endpoint_url": "http://127.0.0.1:9"}, "Could not connect.*endpoint_url"),
    ],
)
def test_an_s3_that_refuses(url: str, options: dict[str, str], words: str, s3: S3Server) -> None:
    with pytest.raises(StorageError, match=words):
        probe(ObjectStore(url, s3.options() | options, timeout_s=6))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system, and a full or read-only disk cannot be had without")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with pytest.raises(StorageError, match=r"Read-only file system.*choose another storage"):
        probe(ObjectStore(str(small_disk)))


def test_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(1 << 20))

    with pytest.raises(StorageError, match=r"No space left.*free space"):
        probe(ObjectStore(str(small_disk)))


def test_a_client_that_ignores_exclusive_creation(tmp_path: Path) -> None:
    class Overwriting(LocalClient):
        def create(self, key: str, content: bytes) -> None:
            self.put(key, content)

    with pytest.raises(StorageError, match="creating a file that exists replaced it"):
        probe(ObjectStore(str(tmp_path), client=Overwriting(str(tmp_path))))


def test_a_folder_that_is_another_one_elsewhere_is_noticed(tmp_path: Path) -> None:
    here, there = ObjectStore(str(tmp_path / "here")), ObjectStore(str(tmp_path / "there"))

    marker = leave_marker(here)

    assert sees_marker(here, marker)
    assert not sees_marker(there, marker)
