"""The command line, in this process as far as nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from elastic_trainer import cli
from tests.conftest import make_dataset


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def job(tmp_path: Path, dataset: str) -> Any:
    def write(**fields: Any) -> str:
        values: dict[str, Any] = {
            "name": "job",
            "storage": str(tmp_path / "runs"),
            "task": "tests.tasks:NetTask",
            "data": {"train": dataset},
            "steps": 5,
            "global_batch": 24,
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**values, **fields}))
        return str(tmp_path / "job.yaml")

    return write


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"task": None}, 2, "task is missing. Set task: module:Class"),
        ({"task": "tests.taskz:NetTask"}, 1, "no module 'tests.taskz'. Did you mean 'tasks'?"),
        ({"task": "tests.tasks:NetTaks"}, 1, "has no 'NetTaks'. Did you mean 'NetTask'?"),
        ({"task_args": {"delay": 1}}, 1, "task_args = {'delay': 1} do not fit tests.tasks:NetTask"),
        ({"data": {"train": "/nowhere"}}, 1, "/nowhere: no such dataset folder. Make one: elastic-trainer prepare"),
        ({"nmae": 1}, 2, "nmae is not a known field. Did you mean 'name'?"),
        ({"global_batch": 1000, "data": {"train": "DATASET", "drop_last": True}}, 2, "data.drop_last = true leaves no"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    fields: Any, status: int, told: str, job: Any, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if fields.get("data", {}).get("train") == "DATASET":
        fields["data"]["train"] = dataset
    found, _, err = run(capsys, "run", job(**fields))

    assert (found, told in err) == (status, True), err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_an_empty_dataset_is_refused(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = Path(make_dataset(tmp_path / "empty", 3))
    index = json.loads((empty / "index.json").read_text())
    from elastic_trainer.data.dataset import DatasetIndex

    (empty / "index.json").write_text(DatasetIndex(0, 1, 0, (), ()).to_json())
    assert index["rows"] == 3

    status, _, err = run(capsys, "run", job(data={"train": str(empty)}))

    assert status == 1
    assert "the dataset is empty (0 rows)" in err


def test_prepare_tells_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", image=np.zeros((100, 4, 4), "f4"), label=np.arange(100))

    status, out, _ = run(capsys, "prepare", str(tmp_path / "x.npz"), "--out", str(tmp_path / "set"))

    assert status == 0
    assert "100 rows in 1 files" in out
    assert "image float32[4, 4], label int64[]" in out


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "config", "schema")

    assert status == 0
    assert json.loads(out)["properties"]["global_batch"]["description"].startswith("B, samples")


def test_an_audit_of_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "data", "audit", "nothing", "--storage", str(tmp_path))

    assert status == 2
    assert "no such run" in err


def test_an_audit_finds_a_ledger_that_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from elastic_trainer.data.batch_plan import expected_digest
    from elastic_trainer.data.ledger import LedgerLine
    from elastic_trainer.resolve import order_of
    from elastic_trainer.storage.log import RunLog
    from elastic_trainer.storage.object_store import ObjectStore
    from elastic_trainer.vocabulary import Token

    stored = {
        "global_batch": 8,
        "logical_ranks": 2,
        "seed": 1,
        "data": {"drop_last": False},
        "resolved": {"samples": 30, "row_group": 4, "window": 2},
    }
    order = order_of(stored)
    (tmp_path / "job" / "ledger").mkdir(parents=True)
    RunLog(ObjectStore(str(tmp_path / "job"))).append("term", 1, {"owner": "", "config": stored, "code": ""})
    lines = [LedgerLine(s, Token(1, 1), order.samples_in(s), expected_digest(order, s)).to_json() for s in range(4)]
    segment = tmp_path / "job" / "ledger" / "000000000000.1-1.000001.jsonl"
    segment.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert run(capsys, "data", "audit", "job", "--storage", str(tmp_path))[:2] == (
        0,
        "4 steps: samples: 30 trained, 0 missing, 0 repeated; 0 steps redone\n",
    )
    segment.write_text(segment.read_text().replace(lines[2]["digest"], "0" * 16))
    status, out, _ = run(capsys, "data", "audit", str(tmp_path / "job"))
    assert status == 1
    assert "contradicts the data order at steps [2]" in out


@pytest.mark.parametrize("workers", ["two", "2:", "2:x", ":3", "-1"])
def test_numbers_of_workers_that_are_none_are_told(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "scale", "job", "--", workers)
    assert status == 2
    assert f"{workers!r} is no number of workers. Write LEAST:MOST, such as 2:6" in err
