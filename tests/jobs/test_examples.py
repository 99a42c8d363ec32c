"""The jobs on text and on a table run as they are, on some of their data."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from elastic_trainer import prepare
from elastic_trainer.data.dataset import read_index
from elastic_trainer.data.reader import DatasetReader
from jobs.flights.data import source_folder
from jobs.flights.task import Flights
from tests.rayrun import ROOT, CommandRun
from tests.rotation import turn

Start = Callable[..., CommandRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[CommandRun] = []

    def begin(job: str, **fields: Any) -> CommandRun:
        config = {**yaml.safe_load((ROOT / "jobs" / job / "job.yaml").read_text()), "storage": str(tmp_path), **fields}
        runs.append(CommandRun(tmp_path, config))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@turn(0, 3)
def test_char_lm_learns_and_shows_what_it_writes(tmp_path: Path, start: Start) -> None:
    options: dict[str, Any] = {"file_format": "text", "include": ["a*.py"], "exclude": ["*/*"], "block": 128}
    prepare(Path(json.__file__).parent.parent, tmp_path / "data", splits={"validation": 0.2}, **options)
    data = {"train": str(tmp_path / "data/train"), "evaluation": str(tmp_path / "data/validation")}

    run = start("char_lm", data=data, steps=30, task_args={"sample_every": 29})

    assert run.end(120) == 0, run.output
    assert len(re.findall("the model writes: ['\"]def ", run.output)) == 2, run.output
    summary = run.summary()
    assert summary["evaluation"]["loss"] < 4.0  # 5.5 is what a model knows that knows nothing
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each 40th flight of the year."""
    folder = tmp_path_factory.mktemp("flights")
    with zipfile.ZipFile(source_folder() / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        lines = list(io.TextIOWrapper(file))
    (folder / "flights.csv").write_text("".join([lines[0], *lines[1::40]]))
    task = Flights(tables=str(source_folder()))
    prepare(folder / "flights.csv", folder / "set", transform=task.transform, splits={"test": 0.1})
    return folder


def test_flights_are_joined_and_the_ones_that_never_arrived_are_left_out(flights: Path) -> None:
    with open(flights / "flights.csv") as file:
        arrived = [row for row in csv.DictReader(file) if row["arr_delay"] != "NA"]
    index = read_index(flights / "set/train")
    rows = DatasetReader(flights / "set/train").rows(np.arange(index.rows))

    assert index.rows + read_index(flights / "set/test").rows == len(arrived)
    assert rows["numbers"].shape == (index.rows, 17)
    weather = rows["numbers"][:, 9:14]
    assert (weather[:, 0] > 0).mean() > 0.95, "hardly any flight found its weather"
    assert 0.1 < rows["late"].mean() < 0.4


@turn(1, 3)
def test_flights_train_on_what_ray_data_preprocesses(flights: Path, start: Start) -> None:
    data = {"train": str(flights / "set/train"), "evaluation": str(flights / "set/test")}

    run = start("flights", data=data, steps=40, epochs=None, global_batch=256, micro_batch=64)

    assert run.end(120) == 0, run.output
    assert "data: preprocessed by Ray Data on 1 CPU" in run.output
    assert run.summary()["evaluation"]["accuracy"] > 0.7
