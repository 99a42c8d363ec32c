"""The object store on local files and on a real S3 server, and what each call does when the server misbehaves."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.s3_client import S3Client
from tests.s3server import SECRET, FaultProxy, S3Server

BIG = os.urandom(9 << 20)  # beyond what one request takes


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return ObjectStore(str(tmp_path / "store"))
    s3: S3Server = request.getfixturevalue("s3")
    return ObjectStore(s3.url(), s3.options())


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as found:
        yield found


def test_what_was_written_is_read_and_listed(store: ObjectStore) -> None:
    store.create("log/0", b"first")
    store.put("steps/1/r0.bin", BIG)
    store.put("summary.json", b"old")
    store.put("summary.json", b"new")
    middle = bytearray(1 << 20)
    store.read_into("steps/1/r0.bin", 5 << 20, memoryview(middle))

    assert store.read("log/0") == b"first"
    assert store.read("summary.json") == b"new"
    assert middle == BIG[5 << 20 : 6 << 20]
    assert store.sizes("steps") == {"steps/1/r0.bin": len(BIG)}
    assert store.within("steps").sizes("1") == {"1/r0.bin": len(BIG)}
    assert store.names("nothing") == []

    store.delete(["steps/1/r0.bin", "steps/1/never.bin"])
    assert store.names("steps") == []
    with pytest.raises(FileNotFoundError):
        store.read("steps/1/r0.bin")


def test_a_file_that_is_too_short_is_told(store: ObjectStore) -> None:
    store.put("a.bin", b"12345")

    with pytest.raises(StorageError, match=r"a.bin ends at byte 5, before 9"):
        store.read_into("a.bin", 1, memoryview(bytearray(8)))


def test_only_one_of_many_creates_a_file(store: ObjectStore) -> None:
    for round_ in range(2):
        winners: list[int] = []
        start = threading.Barrier(8)

        def race(
            number: int, round_: int = round_, winners: list[int] = winners, start: threading.Barrier = start
        ) -> None:
            start.wait()
            try:
                store.create(f"race/{round_}", b"%d" % number)
            except FileExistsError:
                return
            winners.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(winners) == 1
        assert store.read(f"race/{round_}") == b"%d" % winners[0]


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/passwd", "a//b", "."])
def test_no_name_leaves_the_store(name: str, store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="not a name in the store"):
        store.put(name, b"")


@pytest.mark.parametrize("fault", ["500", "503", "drop-before", "drop-after", "truncate", "hang"])
def test_one_fault_of_the_server_is_overcome(fault: str, s3: S3Server, proxy: FaultProxy) -> None:
    store = ObjectStore(s3.url(), s3.options(proxy.port), timeout_s=3)
    store.put("warm.bin", BIG)
    target = bytearray(len(BIG))

    for call in (
        lambda: store.create("log/0", b"mine"),
        lambda: store.put("a.bin", BIG),
        lambda: store.read_into("warm.bin", 0, memoryview(target)),
        lambda: store.read("log/0"),
        lambda: store.names("log"),
    ):
        faults = [fault]
        proxy.plan = lambda line, faults=faults: faults.pop() if faults else ""  # type: ignore[misc]
        call()
        assert not faults, "the server did not misbehave"

    assert store.read("log/0") == b"mine"
    assert target == BIG


def test_a_server_that_never_answers_is_given_up(s3: S3Server, proxy: FaultProxy) -> None:
    proxy.plan = lambda line: "hang"
    store = ObjectStore(s3.url(), s3.options(proxy.port), timeout_s=1)
    began = time.monotonic()

    with pytest.raises(StorageError, match="cannot create: no answer within"):
        store.create("log/0", b"mine")

    assert time.monotonic() - began < 10  # far below the client's own time-outs, whatever the machine does


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a file may not grow beyond: EFBIG
    try:
        with pytest.raises(StorageError, match=r"a.bin: cannot write: File too large"):
            store.put("a.bin", BIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://x", "lives in the memory of one process"),
        ("s3://me:secret@bucket/x", "holds credentials"),
        ("ftpx://host/x", "ftpx"),
        ("s3:///x", "names no bucket"),
    ],
)
def test_urls_that_cannot_hold_a_run(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        ObjectStore(url)

    assert "secret@" not in str(raised.value)


def test_credentials_are_in_no_message(s3: S3Server) -> None:
    store = ObjectStore(s3.url(), s3.options(key="unknown"), timeout_s=2)

    with pytest.raises(StorageError) as raised:
        store.read("x")

    assert SECRET not in str(raised.value)
    assert SECRET not in repr(store)


def test_a_client_that_moved_much_is_freed_with_its_store(s3: S3Server) -> None:
    url = s3.url()
    client = S3Client(url.removeprefix("s3://"), s3.options())
    store = ObjectStore(url, client=client)
    store.put("big.bin", BIG)
    store.read_into("big.bin", 0, memoryview(bytearray(len(BIG))))
    freed = weakref.ref(client)

    del client, store
    gc.collect()

    assert freed() is None
