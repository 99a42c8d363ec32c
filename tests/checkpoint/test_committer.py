"""What becomes of a save that is killed at any storage call: the newest complete one loads, nothing else counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from elastic_trainer.checkpoint import reader
from elastic_trainer.checkpoint.history import fold
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.control.events import PiecesWritten
from elastic_trainer.errors import ElasticTrainerError, Fenced, StorageError
from elastic_trainer.storage.client import Buffer
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.s3_client import S3Client
from elastic_trainer.vocabulary import Token, Worker
from tests.checkpoint.states import Ranks, tensors_of
from tests.rotation import rotating
from tests.s3server import FaultProxy, S3Server


class DyingClient(S3Client):
    """Dies at its n-th call that changes something, before or after it took effect: no later call has any effect."""

    def __init__(self, prefix: str, options: dict[str, object]) -> None:
        super().__init__(prefix, options)
        self.countdown = -1
        self.dies_after = False
        self.is_dead = False

    def _change(self, change: Callable[[], None]) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            self.is_dead = True
            if self.dies_after:
                change()
        if self.is_dead:
            raise PermissionError("dead")
        change()

    def create(self, key: str, content: bytes) -> None:
        self._change(lambda: S3Client.create(self, key, content))

    def put(self, key: str, content: Buffer) -> None:
        self._change(lambda: S3Client.put(self, key, content))

    def delete(self, key: str) -> None:
        self._change(lambda: S3Client.delete(self, key))


RETENTION = Retention(2)
CALLS = 10  # that change something: two parts, manifest, entry, removed entry, and deletions of the step that goes


def save_and_die(s3: S3Server, url: str, countdown: int, dies_after: bool, term: int) -> None:
    client = DyingClient(url.removeprefix("s3://"), s3.options())
    store = ObjectStore(url, client=client)
    try:
        ranks = Ranks([store, store], term)
        client.countdown, client.dies_after = countdown, dies_after
        steps = max((each.steps for each in ranks.committer.history.saved), default=0) + 10
        ranks.save(steps, tensors_of(steps))
        ranks.committer.tidy(RETENTION)
    except StorageError:
        assert client.is_dead


CASES = [(n, after, seed) for seed in range(10) for n in range(1, CALLS + 1) for after in (False, True)]


@pytest.mark.parametrize(("call", "dies_after", "seed"), rotating(CASES, 16))
def test_a_save_killed_at_any_call_leaves_the_newest_complete_one(
    call: int, dies_after: bool, seed: int, s3: S3Server
) -> None:
    url = s3.url()
    store = ObjectStore(url, s3.options())
    for steps in (10, 20):
        ranks = Ranks([store, store])
        ranks.save(steps, tensors_of(steps))
    chooser = random.Random(seed * 1000 + call)

    for term in range(3, 3 + chooser.choice([1, 2])):
        save_and_die(s3, url, call if term == 3 else chooser.randint(1, CALLS), dies_after, term)

    history = fold(RunLog(store).read())
    assert history.newest is not None
    assert history.newest.steps >= 20
    for each in history.saved[-2:]:  # whatever the log names is whole
        manifest = reader.verify(store, each)
        targets = [torch.zeros(i.shape, dtype=getattr(torch, i.dtype)) for i in manifest.layout.tensors]
        reader.restore(store, manifest, targets)
        for found, expected in zip(targets, tensors_of(each.steps).values(), strict=True):
            assert torch.equal(found, expected)
    again = Ranks([store, store])
    again.save(100, tensors_of(100))
    again.committer.tidy(RETENTION)
    kept = {each.path.rpartition("/")[0] for each in again.committer.history.saved}
    assert {name.rpartition("/")[0] for name in store.names("steps")} == kept, "leftovers were not collected"


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as found:
        yield found


FAULTS = [
    (fault, seed) for seed in range(4) for fault in ("500", "503", "drop-before", "drop-after", "truncate", "hang")
]


@pytest.mark.parametrize(("fault", "seed"), rotating(FAULTS, 3))
def test_a_store_that_misbehaves_half_of_the_time(fault: str, seed: int, s3: S3Server, proxy: FaultProxy) -> None:
    """Each save either stands or is told to have failed; what stands is whole."""
    url = s3.url()
    chooser = random.Random(seed)
    bad, good = ObjectStore(url, s3.options(proxy.port), timeout_s=3.0), ObjectStore(url, s3.options())
    ranks = Ranks([bad, bad])
    proxy.plan = lambda line: fault if chooser.random() < (0.15 if fault == "hang" else 0.5) else ""
    stood = []

    for steps in range(10, 60, 10):
        try:
            ranks.save(steps, tensors_of(steps))
        except ElasticTrainerError:
            continue
        stood.append(steps)

    proxy.plan = lambda line: ""
    history = fold(RunLog(good).read())
    assert set(stood) <= {each.steps for each in history.saved}
    for each in history.saved:
        reader.verify(good, each)


def test_an_older_term_that_wakes_cannot_save(s3: S3Server) -> None:
    store = ObjectStore(s3.url(), s3.options())
    older = Ranks([store])
    older.begin(10, tensors_of(10))
    (report,) = older.await_parts(10)
    older.committer.take(report)
    newer = Ranks([store])
    newer.save(5, tensors_of(5))

    with pytest.raises(Fenced):
        older.commit(10)

    assert [each.steps for each in fold(RunLog(store).read()).saved] == [5]
    newer.save(20, tensors_of(20))
    newer.committer.tidy(RETENTION)
    assert not [name for name in store.names("steps") if f".{older.token}." in name], "the zombie's files stay"


def test_states_that_differ_between_ranks_are_refused(s3: S3Server) -> None:
    store = ObjectStore(s3.url(), s3.options())
    ranks = Ranks([store])
    said = '{"part": %d, "parts": 2, "file": ["r%d.bin", 0, []], "layout_digest": %d, "tensors": []}'
    for part in (0, 1):
        ranks.committer.take(PiecesWritten(Worker(part, 0), Token(1, 1), 5, 0, said % (part, part, part)))

    with pytest.raises(ElasticTrainerError, match="the ranks' states differ"):
        ranks.committer.write_manifest(5, Token(1, 1), 0)


def test_the_newest_is_read_back_before_anything_goes(s3: S3Server) -> None:
    store = ObjectStore(s3.url(), s3.options())
    ranks = Ranks([store])
    for steps in (10, 20, 30):
        ranks.save(steps, tensors_of(steps))
    newest = ranks.committer.history.newest
    assert newest is not None
    store.put(newest.path.replace("MANIFEST.json", "r0.bin"), b"something else")

    with pytest.raises(ElasticTrainerError, match=r"r0.bin"):
        ranks.committer.tidy(Retention(1))

    assert [each.steps for each in ranks.committer.history.saved] == [10, 20, 30]
    assert len(store.names("steps")) == 6
