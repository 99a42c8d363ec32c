"""Everything of a run is killed at once, at random moments; the same name again resumes, and nothing shows."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint.history import fold
from elastic_trainer.checkpoint.reader import load_manifest, restore
from elastic_trainer.cluster.processes import kill_all, with_mark
from elastic_trainer.data.ledger import surviving
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from tests.rayrun import MARK, CommandRun, await_value, job_config
from tests.rotation import rotating

STEPS = 250
FIELDS: dict[str, Any] = {
    "steps": STEPS,
    "task_args": {"delay_s": 0.001},
    "checkpoint": {"every_steps": 9, "keep_last": 2},
    "scaling": {"min_workers": 2, "max_workers": 2, "resources_per_worker": {"CPU": 0.5}},
}


def outcome(folder: Path) -> tuple[dict[int, tuple[int, int]], list[torch.Tensor]]:
    """The surviving ledger, and every tensor of the last saved step."""
    store = ObjectStore(str(folder))
    entries = RunLog(store).read_all()
    returns = [((*entry.values["token"],), entry.values["steps"]) for entry in entries if entry.kind == "resumed"]
    lines = surviving(read_stream(store.names("ledger"), store.read), returns)  # type: ignore[arg-type]
    newest = fold(entries).newest
    assert newest is not None
    assert newest.steps == STEPS
    manifest = load_manifest(store, newest)
    tensors = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in manifest.layout.tensors]
    restore(store, manifest, tensors)
    return {line.step: (line.samples, line.digest) for line in lines}, tensors


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, dataset: str) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = CommandRun(folder, job_config(folder, dataset, None, **FIELDS))
    try:
        assert run.end(120) == 0, run.output
    finally:
        run.clean_up()
    return outcome(folder / "runs/job")


@pytest.mark.parametrize("seed", rotating(range(20), 1, 0, 2))
def test_a_run_killed_whole_resumes_by_name(seed: int, dataset: str, undisturbed: Any, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    config = job_config(tmp_path, dataset, None, **FIELDS)
    first = CommandRun(tmp_path, config)
    try:
        first.await_line("generation 1", 90)
        steps = Path(tmp_path / "runs/job/steps")
        if seed % 2:  # in a save: as soon as the folder of some step appears
            wanted = chooser.randint(1, 20) * 9
            await_value(
                lambda: (
                    True
                    if any(int(path.name.split(".")[0]) >= wanted for path in steps.glob("*"))
                    or first.process.poll() is not None
                    else None
                ),
                60,
                lambda: first.output,
            )
        else:
            time.sleep(chooser.random() * 3)
        for _ in range(3):
            kill_all(with_mark(MARK, first.mark), signal.SIGKILL)
        first.assert_nothing_left()
    finally:
        first.clean_up()

    second = CommandRun(tmp_path, config)
    try:
        assert second.end(120) == 0, second.output
        second.assert_nothing_left()
    finally:
        second.clean_up()

    ledger, tensors = outcome(tmp_path / "runs/job")
    assert ledger == undisturbed[0]
    for mine, theirs in zip(tensors, undisturbed[1], strict=True):
        assert torch.equal(mine, theirs), "parameters or optimizer state differ from those of an undisturbed run"
    summary = second.summary()
    assert (summary["status"], summary["samples_missing"], summary["samples_repeated"]) == ("finished", 0, 0)
