"""A rank's part in saving: the copy is that of its step, parts go again under another attempt, nothing mixes."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint import reader
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.control.events import PiecesFailed, SaveBegan
from elastic_trainer.storage.client import Buffer
from elastic_trainer.storage.local_client import LocalClient
from elastic_trainer.storage.object_store import ObjectStore
from tests.checkpoint.states import Ranks, tensors_of


def restored(store: ObjectStore, ranks: Ranks) -> dict[str, torch.Tensor]:
    newest = ranks.committer.history.newest
    assert newest is not None
    manifest = reader.load_manifest(store, newest)
    empty = {info.name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in manifest.layout.tensors}
    reader.restore(store, manifest, list(empty.values()))
    return empty


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class GatedClient(LocalClient):
    """Holds writes back until told."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.has_arrived = threading.Event()

    def put(self, key: str, content: Buffer) -> None:
        self.has_arrived.set()
        assert self.gate.wait(30)
        super().put(key, content)


def test_what_is_saved_is_the_step_whose_copy_was_taken(tmp_path: Path) -> None:
    client = GatedClient(str(tmp_path))
    store = ObjectStore(str(tmp_path), client=client)
    ranks = Ranks([store, store])
    tensors = tensors_of(1)
    ranks.begin(10, tensors)

    for tensor in tensors.values():  # the next step changes everything at once
        tensor.zero_()
    assert client.has_arrived.wait(30)
    client.gate.set()
    for report in ranks.await_parts(10):
        ranks.committer.take(report)
    ranks.commit(10)

    assert_equal(restored(store, ranks), tensors_of(1))
    assert [type(each) for each in ranks.events[:1]] == [SaveBegan]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ranks_write_their_parts_of_a_whole(count: int, tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    ranks = Ranks([store] * count)

    saved = ranks.save(10, tensors_of(1), {"value": [1, None, "two"]})

    assert_equal(restored(store, ranks), tensors_of(1))
    assert reader.load_manifest(store, saved).state == {"value": [1, None, "two"]}
    assert len(store.names("steps")) == count + 1


def test_survivors_write_the_part_of_one_that_died(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    ranks = Ranks([store] * 3)
    ranks.begin(10, tensors_of(1))
    ranks.await_parts(10)  # the third died before it said so, say

    for part, writer in enumerate(ranks.writers[:2]):
        writer.write_again(10, ranks.token, 1, part, 2)
    for report in ranks.await_parts(10, attempt=1, count=2):
        ranks.committer.take(report)
    saved = ranks.commit(10, 1)

    assert_equal(restored(store, ranks), tensors_of(1))
    assert reader.load_manifest(store, saved).attempt == 1
    ranks.committer.tidy(Retention(3))
    assert {name.split("/")[1] for name in store.names("steps")} == {f"{10:012d}.{ranks.token}.1"}


def test_a_copy_that_was_given_up_is_never_reported(tmp_path: Path) -> None:
    client = GatedClient(str(tmp_path))
    ranks = Ranks([ObjectStore(str(tmp_path), client=client)])
    ranks.begin(10, tensors_of(1))
    assert client.has_arrived.wait(30)

    ranks.writers[0].settle(10, ranks.token)
    ranks.begin(11, tensors_of(2))
    client.gate.set()

    assert [report.steps for report in ranks.await_parts(11)] == [11]
    assert [each.steps for each in ranks.events if not isinstance(each, SaveBegan)] == [11]


def test_a_store_that_refuses_is_reported(tmp_path: Path) -> None:
    class Refusing(LocalClient):
        def put(self, key: str, content: Buffer) -> None:
            raise PermissionError(13, "Permission denied")

    ranks = Ranks([ObjectStore(str(tmp_path), client=Refusing(str(tmp_path)))])
    ranks.begin(10, tensors_of(1))

    (report,) = ranks.await_parts(10)

    assert isinstance(report, PiecesFailed)
    assert "cannot write: Permission denied" in report.detail


def test_a_write_that_comes_late_does_not_change_what_was_saved(tmp_path: Path) -> None:
    """Its try was given up, another succeeded, and the memory that it reads from has the next step by then."""

    class SlowOnce(GatedClient):
        tries = 0

        def put(self, key: str, content: Buffer) -> None:
            self.tries += 1
            if self.tries == 1:
                super().put(key, content)
                self.has_arrived.clear()
            else:
                LocalClient.put(self, key, content)

    client = SlowOnce(str(tmp_path))
    store = ObjectStore(str(tmp_path), client=client, timeout_s=1.0)
    ranks = Ranks([store])
    saved = ranks.save(10, tensors_of(1))
    ranks.begin(11, tensors_of(2))
    client.gate.set()
    ranks.await_parts(11)
    for _ in range(100):
        if not client.has_arrived.is_set():
            break
        time.sleep(0.05)

    assert reader.verify(store, saved).steps == 10


def test_whatever_is_raised_while_writing_is_reported(tmp_path: Path) -> None:
    class Broken(LocalClient):
        def put(self, key: str, content: Buffer) -> None:
            raise FileNotFoundError(2, "No such bucket")

    ranks = Ranks([ObjectStore(str(tmp_path), client=Broken(str(tmp_path)), timeout_s=1.0)])
    for steps in (10, 11):  # the thread goes on
        ranks.begin(steps, tensors_of(1))
        (report,) = ranks.await_parts(steps)
        assert isinstance(report, PiecesFailed)
        assert "No such bucket" in report.detail
        ranks.writers[0].settle(steps, ranks.token)


def test_the_thread_and_the_copy_of_a_writer_end_with_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    ranks = Ranks([ObjectStore(str(tmp_path))] * 2)
    ranks.save(10, tensors_of(10))
    made = [thread for thread in threading.enumerate() if thread not in before and thread.name == "checkpoint"]
    assert len(made) == 2

    del ranks
    gc.collect()

    for thread in made:
        thread.join(10)
        assert not thread.is_alive()
