"""Data: prepare it, look at it, and hold what a run trained against its order."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import yaml

from elastic_trainer.checkpoint.history import fold, resumptions
from elastic_trainer.commands.place import pairs, run_of
from elastic_trainer.data.dataset import Column, DatasetIndex, read_index
from elastic_trainer.data.ledger import audit
from elastic_trainer.data.preparation.job import prepare
from elastic_trainer.data.preparation.sources import find
from elastic_trainer.data.preparation.tokens import decode
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.errors import ConfigError, DataError, StorageError
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore

RAY_FROM_BYTES = 64 << 20  # less is done before a cluster of its own would have started
SHOWN_CHARACTERS = 300  # of a text in a sample


def prepare_folder(options: argparse.Namespace) -> int:
    """Make a dataset folder; on a Ray cluster when there is enough to do."""
    transform, version = _transform(options)
    out_options = pairs(options.storage_options, "--storage-option")
    with _cluster(options):
        index = prepare(
            options.source,
            options.out,
            seed=options.seed,
            file_format=options.format,
            include=options.include,
            exclude=options.exclude,
            transform=transform,
            transform_version=version,
            splits=_shares(options.split),
            on_error=options.on_error,
            block=options.block,
            image_size=_size(options.image_size),
            source_options=pairs(options.source_options, "--source-option"),
            out_options=out_options,
            say=lambda text: print(text, flush=True),
        )
    if not options.split:
        print(_line(options.out, index))
    for name in ("train", *_shares(options.split)) if options.split else ():
        folder = f"{options.out.rstrip('/')}/{name}"
        print(_line(folder, read_index(folder, out_options)))
    return 0


def _transform(options: argparse.Namespace) -> tuple[Any, str]:
    if options.task is None:
        return None, ""
    from elastic_trainer.training.task import NamedTask, TrainTask, code_digest, importable

    with importable(os.getcwd()):
        arguments = {name: yaml.safe_load(each) for name, each in pairs(options.task_args, "--task-arg").items()}
        task = NamedTask(options.task, arguments).load()
        if not isinstance(task, TrainTask) or task.transform is None:
            raise ConfigError(f"--task {options.task}: has no transform(columns). Define it, or leave --task out.")
        return task.transform, code_digest(options.task)


@contextlib.contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[None]:
    from elastic_trainer.cluster.local import LocalCluster, join_cluster

    if options.address or os.environ.get("RAY_ADDRESS"):
        with join_cluster(options.address, sends_code=True):
            yield
    elif _size_of(options) < RAY_FROM_BYTES:
        yield
    else:
        with LocalCluster():
            yield


def _size_of(options: argparse.Namespace) -> int:
    given = pairs(options.source_options, "--source-option")
    found = find(options.source, given, file_format=options.format, include=options.include, exclude=options.exclude)
    return found.size_bytes


def _shares(given: list[str]) -> dict[str, float]:
    try:
        return {name: float(share) for name, share in pairs(given, "--split").items()}
    except ValueError:
        raise ConfigError(f"--split {' '.join(given)}: not of the form name=share, such as validation=0.1.") from None


def _size(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    height, _, width = given.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise ConfigError(f"--image-size {given}: not of the form HEIGHTxWIDTH, such as 32x32.")
    return int(height), int(width)


def _line(folder: str, index: DatasetIndex) -> str:
    columns = ", ".join(f"{column.name} {column.dtype}{list(column.shape)}" for column in index.columns)
    return f"{folder}: {index.rows} rows in {len(index.files)} files, row groups of {index.row_group}; {columns}"


def show(options: argparse.Namespace) -> int:
    """What a dataset folder holds."""
    index = read_index(options.folder, pairs(options.storage_options, "--storage-option"))
    size = sum(file.size_bytes for file in index.files)
    groups = sum(len(file.row_groups) for file in index.files)
    print(
        f"{options.folder}: {index.rows} rows, {size / 1e6:.1f} MB in {len(index.files)} files, digest {index.digest}"
    )
    print(f"{groups} row groups of {index.row_group} rows, shuffled with seed {index.seed}")
    for column in index.columns:
        print(f"  {column.name:<20} {column.dtype}{list(column.shape) if column.shape else ''}")
    for name, value in index.about.items():
        print(f"  ({name}: {value})")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read a dataset folder wholly and compare every digest."""
    found = pairs(options.storage_options, "--storage-option")
    reader = DatasetReader(options.folder, options=found)
    index, bad = reader.index, 0
    for low in range(0, index.rows, index.row_group):
        try:
            reader.rows(np.arange(low, min(low + 1, index.rows)))
        except (DataError, StorageError) as error:
            print(error)
            bad += 1
    groups = -(-index.rows // index.row_group)
    print(f"{options.folder}: {groups - bad} of {groups} row groups are whole, digest {index.digest}")
    return 1 if bad else 0


def sample(options: argparse.Namespace) -> int:
    """Print some rows, spread over the folder."""
    found = pairs(options.storage_options, "--storage-option")
    reader = DatasetReader(options.folder, options=found)
    rows = reader.index.rows
    ids = np.unique(np.linspace(0, rows - 1, min(options.count, rows)).astype(np.int64))
    columns = reader.rows(ids)
    for place, sample_id in enumerate(ids):
        print(f"row {sample_id}")
        for column in reader.index.columns:
            print(f"  {column.name}: {_shown(column, columns[column.name][place], reader.index)}")
    return 0


def _shown(column: Column, value: Any, index: DatasetIndex) -> str:
    if column.name == "tokens" and index.about.get("format") == "text":
        return repr(decode(value)[:SHOWN_CHARACTERS])
    if column.dtype == "binary":
        return f"{len(value)} bytes"
    if column.dtype == "string":
        return repr(value[:SHOWN_CHARACTERS])
    if column.name == "label" and "labels" in index.about:
        return f"{value} ({index.about['labels'][int(value)]})"
    return str(value) if not column.shape else np.array2string(value, threshold=20, edgeitems=2, precision=4)


def audit_ledger(options: argparse.Namespace) -> int:
    """Hold a run's ledger against the data order."""
    is_folder = os.path.isdir(os.path.join(options.run, "log"))
    if is_folder:
        store = ObjectStore(options.run)
    else:
        options.name = options.run
        store, _ = run_of(options)
    entries = RunLog(store).read_all()
    history = fold(entries)
    if history.config is None:
        raise ConfigError(f"{store.url}: no such run (its log is empty). Name a run of --storage, or its folder.")
    _check_segments(store, [segment for entry in entries for segment in entry.values.get("ledger", [])])
    returns = [(each.token, each.steps) for each in resumptions(entries)]
    found = audit(order_of(history.config), read_stream(store.names("ledger"), store.read), returns)
    if found.bad_steps():
        print(f"{found.steps} steps; the ledger contradicts the data order at steps {found.bad_steps()[:20]}")
        return 1
    facts = found.summary()
    print(
        f"{found.steps} steps: samples: {facts['samples_trained']} trained, {facts['samples_missing']} missing, "
        f"{facts['samples_repeated']} repeated; {facts['steps_redone']} steps redone"
    )
    if found.skipped:
        print(f"{facts['samples_skipped']} samples were skipped, in steps {', '.join(map(str, sorted(found.skipped)))}")
    return 0


def _check_segments(store: ObjectStore, segments: list[list[str]]) -> None:
    from elastic_trainer.checkpoint.manifest import sha256_of

    for name, sha256 in segments:
        try:
            content = store.read(name)
        except FileNotFoundError:
            raise StorageError(f"{store.url}/{name}: is missing, and the run's log names it.") from None
        if sha256_of(content) != sha256:
            raise StorageError(f"{store.url}/{name}: is not what the run's log names (its sha256 differs).")
