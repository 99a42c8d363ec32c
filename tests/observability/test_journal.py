from __future__ import annotations

from pathlib import Path

from elastic_trainer.observability.journal import Journal, read_stream
from elastic_trainer.storage.run_folder import RunFolder
from elastic_trainer.vocabulary import Token


def test_lines_come_back_in_the_order_of_writing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder.write_new, print)
    for step in range(5):
        journal.add("ledger", step, Token(1, 1 + step // 3), {"step": step})
        if step == 1:
            journal.flush()
    journal.close()

    names = folder.names("ledger")
    assert names == [
        "ledger/000000000000.1-1.000001.jsonl",
        "ledger/000000000002.1-1.000002.jsonl",
        "ledger/000000000003.1-2.000003.jsonl",
    ]
    assert [line["step"] for line in read_stream(names, folder.read)] == [0, 1, 2, 3, 4]


def test_a_write_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    failures = [True]
    told: list[str] = []

    def write(name: str, content: bytes) -> None:
        if failures and failures.pop():
            raise OSError("disk full")
        folder.write_new(name, content)

    journal = Journal(write, told.append)
    journal.add("events", 0, Token(1, 1), {"event": "one"})
    journal.flush()
    journal.add("events", 1, Token(1, 1), {"event": "two"})
    journal.close()

    assert "disk full" in told[0]
    assert [line["event"] for line in read_stream(folder.names("events"), folder.read)] == ["one", "two"]
