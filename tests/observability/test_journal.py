from __future__ import annotations

import hashlib
from pathlib import Path

from elastic_trainer.errors import StorageError
from elastic_trainer.observability.journal import Journal, read_stream, segments_from
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import Token


def test_lines_come_back_in_the_order_of_writing(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    journal = Journal(store.create, print)
    for step in range(5):
        journal.add("ledger", step, Token(1, 1 + step // 3), {"step": step})
        if step == 1:
            assert journal.flush()
    assert journal.flush()
    later = Journal(store.create, print)
    later.add("ledger", 5, Token(2, 3), {"step": 5})
    later.flush()

    names = store.names("ledger")
    assert names == [
        "ledger/000000000000.1-1.000001.jsonl",
        "ledger/000000000002.1-1.000002.jsonl",
        "ledger/000000000003.1-2.000003.jsonl",
        "ledger/000000000005.2-3.000001.jsonl",
    ]
    assert [line["step"] for line in read_stream(names, store.read)] == [0, 1, 2, 3, 4, 5]
    segments = journal.take_ledger_segments()
    assert [name for name, _ in segments] == names[:3]
    assert segments[0][1] == hashlib.sha256(store.read(names[0])).hexdigest()
    assert journal.take_ledger_segments() == []


def test_a_reader_that_resumes_takes_only_segments_that_may_hold_its_steps() -> None:
    names = [
        "ledger/000000000000.1-1.000001.jsonl",
        "ledger/000000000100.1-1.000002.jsonl",
        "ledger/000000000200.1-1.000003.jsonl",
        "ledger/000000000120.2-4.000001.jsonl",
        "ledger/000000000300.2-4.000002.jsonl",
    ]

    assert segments_from(names, 150) == [names[1], names[2], names[3], names[4]]
    assert segments_from(names, 250) == [names[2], names[3], names[4]]
    assert segments_from(names, 0) == names


def test_a_write_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    failures = [True]
    told: list[str] = []

    def write(name: str, content: bytes) -> None:
        if failures and failures.pop():
            raise StorageError("disk full")
        store.create(name, content)

    journal = Journal(write, told.append)
    journal.add("events", 0, Token(1, 1), {"event": "one"})
    assert not journal.flush()
    journal.add("events", 1, Token(1, 1), {"event": "two"})
    assert journal.flush()

    assert "disk full" in told[0]
    assert [line["event"] for line in read_stream(store.names("events"), store.read)] == ["one", "two"]
