"""The log: one writer wins each number, an older term is fenced whenever it wakes, damage and gaps are named."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.errors import Damaged, Fenced, StorageError
from elastic_trainer.storage.log import FOLDER, RunLog, name_of
from elastic_trainer.storage.object_store import ObjectStore
from tests.rotation import rotating
from tests.s3server import FaultProxy, S3Server


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return ObjectStore(str(tmp_path / "run"))
    s3: S3Server = request.getfixturevalue("s3")
    return ObjectStore(s3.url(), s3.options())


def test_entries_come_back_from_the_newest_compacted_one(store: ObjectStore) -> None:
    log = RunLog(store)
    log.append("term", 1, {"a": 1})
    log.append("compacted", 1, {"all": 1})
    log.append("saved", 1, {"steps": 5})

    assert [entry.kind for entry in RunLog(store).read()] == ["compacted", "saved"]
    assert [entry.kind for entry in RunLog(store).read_all()] == ["term", "compacted", "saved"]


@pytest.mark.parametrize("part", rotating(range(20), 1))
def test_racing_creates_have_one_winner_each(part: int, store: ObjectStore) -> None:
    for number in range(5):
        logs = [RunLog(store.within(f"{part}-{number}")) for _ in range(6)]
        outcomes: list[str] = []
        start = threading.Barrier(len(logs))

        def race(log: RunLog, outcomes: list[str] = outcomes, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                log.append("term", 1, {})
                outcomes.append("won")
            except Fenced:
                outcomes.append("fenced")

        threads = [threading.Thread(target=race, args=(log,)) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["fenced"] * (len(logs) - 1) + ["won"]


def test_an_older_term_that_wakes_cannot_append(store: ObjectStore) -> None:
    older, newer = RunLog(store), RunLog(store)
    older.append("term", 1, {})
    newer.read()
    newer.append("term", 2, {})
    newer.append("saved", 2, {})

    for _ in range(3):
        with pytest.raises(Fenced, match="term 2 has written"):
            older.append("saved", 1, {})
    assert [(entry.kind, entry.term) for entry in RunLog(store).read()] == [("term", 1), ("term", 2), ("saved", 2)]


def test_the_last_breath_of_an_older_term_does_not_fence_the_newer(store: ObjectStore) -> None:
    older, newer = RunLog(store), RunLog(store)
    older.append("term", 1, {})
    newer.read()
    older.append("saved", 1, {})

    appended = newer.append("term", 2, {})

    assert [(entry.kind, entry.term) for entry in RunLog(store).read()] == [("term", 1), ("saved", 1), ("term", 2)]
    assert [entry.kind for entry in appended] == ["saved", "term"], "the newer term must know of what came before it"


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as found:
        yield found


def test_an_append_whose_answer_was_lost_for_good_is_settled_by_the_next(s3: S3Server, proxy: FaultProxy) -> None:
    store = ObjectStore(s3.url(), s3.options(proxy.port), timeout_s=1)
    log = RunLog(store)
    log.append("term", 1, {})
    proxy.plan = lambda line: "drop-after" if line.startswith("PUT") else "drop-before"
    with pytest.raises(StorageError):
        log.append("saved", 1, {"steps": 5})
    proxy.plan = lambda line: ""

    log.append("saved", 1, {"steps": 6})

    assert [entry.values.get("steps") for entry in RunLog(store).read()] == [None, 5, 6]


def test_a_gap_is_named(store: ObjectStore) -> None:
    log = RunLog(store)
    for _ in range(4):
        log.append("saved", 1, {})
    store.delete([f"{FOLDER}/{name_of(2)}"])

    with pytest.raises(Damaged, match=r"entry 000000000002.json is missing below 000000000003.json"):
        RunLog(store).read()


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, seed_of_the_day: int) -> None:
    store = ObjectStore(str(tmp_path))
    RunLog(store).append("saved", 1, {"steps": 5, "path": "steps/5", "sha256": "0" * 64})
    path = tmp_path / FOLDER / name_of(0)
    whole = path.read_bytes()
    chooser = random.Random(seed_of_the_day)

    for _ in range(100):
        place = chooser.randrange(len(whole) * 8)
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(Damaged, match=name_of(0)):
            RunLog(store).read()


def test_an_entry_under_another_number_is_found(tmp_path: Path) -> None:
    log = RunLog(ObjectStore(str(tmp_path)))
    log.append("saved", 1, {})
    log.append("saved", 1, {})
    (tmp_path / FOLDER / name_of(1)).write_bytes((tmp_path / FOLDER / name_of(0)).read_bytes())

    with pytest.raises(Damaged, match=r"000000000001.json: holds entry 0"):
        RunLog(ObjectStore(str(tmp_path))).read()
