"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastic_trainer.data.preparation.job import prepare
from tests.rotation import TODAY
from tests.s3server import S3Server


def make_dataset(folder: Path, rows: int, *, seed: int = 0) -> str:
    """A dataset of columns x (6 float64), y (float64) and number (int64)."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6))
    source = folder.with_suffix(".npz")
    np.savez(source, x=x, y=x @ random.normal(size=6) + 0.1 * random.normal(size=rows), number=np.arange(rows))
    prepare(source, folder)
    return str(folder)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """508 rows: with a batch of 24 an epoch has 21 full steps and one of 4 samples."""
    return make_dataset(tmp_path_factory.mktemp("data") / "train", 508)


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> str:
    """101 rows."""
    return make_dataset(tmp_path_factory.mktemp("data") / "test", 101, seed=1)


@pytest.fixture(scope="session")
def seed_of_the_day() -> int:
    """Rotates, so that the suite runs another part of the full counts each day; printed with a failure."""
    return TODAY


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server on loopback."""
    with S3Server() as server:
        yield server
