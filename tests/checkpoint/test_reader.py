"""Reading back: every change of any file is found before it counts, and nothing is unpickled."""

from __future__ import annotations

import functools
import os
import pickle
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import reader
from elastic_trainer.checkpoint.manifest import NAME
from elastic_trainer.errors import Damaged, StorageError
from elastic_trainer.storage.local_client import LocalClient
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep
from tests.checkpoint.states import Ranks, tensors_of
from tests.s3server import S3Server


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, ObjectStore, SavedStep]:
    store = ObjectStore(str(tmp_path))
    return tmp_path, store, Ranks([store] * 3).save(10, tensors_of(1, scale=30))  # 4.5 MB


def restore(store: ObjectStore, saved: SavedStep) -> list[torch.Tensor]:
    manifest = reader.load_manifest(store, saved)
    targets = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in manifest.layout.tensors]
    reader.restore(store, manifest, targets)
    return targets


def test_one_flipped_bit_is_found_wherever_it_is(saved: Any, seed_of_the_day: int) -> None:
    folder, store, step = saved
    files = sorted((folder / step.path).parent.iterdir())
    chooser = random.Random(seed_of_the_day)
    found = 0

    for number in range(100):
        path = files[number % len(files)]
        whole = path.read_bytes()
        place = chooser.randrange(len(whole) * 8)
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(Damaged, match=path.name):
            restore(store, step)
        found += 1
        path.write_bytes(whole)

    assert found == 100
    assert torch.equal(restore(store, step)[0], tensors_of(1, scale=30)["weight"])


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def test_a_crafted_pickle_in_place_of_any_file_is_not_opened(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store, step = saved
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bomb = pickle.dumps(Bomb())

    for path in [*sorted((folder / step.path).parent.iterdir()), *sorted((folder / "log").iterdir())]:
        whole = path.read_bytes()
        path.write_bytes(bomb)
        load = RunLog(store).read_all if path.parent.name == "log" else functools.partial(restore, store, step)
        with pytest.raises(Damaged):
            load()
        path.write_bytes(whole)

    assert not (tmp_path / "exploded").exists()


def test_a_missing_and_a_short_file_are_named(saved: Any) -> None:
    folder, store, step = saved
    piece = (folder / step.path).parent / "r1.bin"
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match=r"r1.bin ends at byte"):
        restore(store, step)

    piece.unlink()
    with pytest.raises(Damaged, match=r"r1.bin: is missing"):
        restore(store, step)

    (folder / step.path).unlink()
    with pytest.raises(Damaged, match=NAME):
        restore(store, step)


def test_the_manifest_of_another_step_is_not_taken(saved: Any) -> None:
    folder, store, step = saved
    other = Ranks([store]).save(20, tensors_of(2))
    shutil.copy(folder / other.path, folder / step.path)

    with pytest.raises(Damaged, match="not the manifest that the log names"):
        restore(store, step)
    with pytest.raises(Damaged, match="belongs to steps/000000000020"):
        restore(store, SavedStep(10, step.path, other.sha256))


def test_a_read_that_is_called_off_ends(saved: Any) -> None:
    _, store, step = saved

    def stop() -> None:
        raise RuntimeError("called off")

    with pytest.raises(RuntimeError, match="called off"):
        reader.verify(store, step, stop)


def test_the_same_over_s3(s3: S3Server) -> None:
    store = ObjectStore(s3.url(), s3.options())
    step = Ranks([store] * 2).save(10, tensors_of(1, scale=100))  # 15 MB: parts of several chunks

    for found, expected in zip(restore(store, step), tensors_of(1, scale=100).values(), strict=True):
        assert torch.equal(found, expected)
    assert reader.verify(store, step).steps == 10


def test_a_store_that_is_gone_is_no_damage(saved: Any, s3: S3Server) -> None:
    gone = ObjectStore("s3://runs/x", s3.options(endpoint_url="http://127.0.0.1:9"), timeout_s=1)

    with pytest.raises(StorageError) as raised:
        restore(gone, saved[2])

    assert not isinstance(raised.value, Damaged)


def test_nothing_comes_into_the_tensors_after_a_restore_has_ended(saved: Any) -> None:
    """One file is damaged while the read of another is still under way."""
    folder, _, step = saved
    manifest = reader.load_manifest(ObjectStore(str(folder)), step)
    first = folder / manifest.folder / "r0.bin"
    first.write_bytes(b"x" + first.read_bytes()[1:])

    class Slow(LocalClient):
        def read_scattered(self, key: str, offset: int, targets: Sequence[memoryview]) -> int:
            if not key.endswith("r0.bin"):
                time.sleep(0.5)
            return super().read_scattered(key, offset, targets)

    targets = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in manifest.layout.tensors]
    with pytest.raises(Damaged):
        reader.restore(ObjectStore(str(folder), client=Slow(str(folder))), manifest, targets)
    for target in targets:
        target.zero_()
    time.sleep(1.0)

    assert not any(target.any() for target in targets)
