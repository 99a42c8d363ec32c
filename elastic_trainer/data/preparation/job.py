"""Prepares a dataset folder: as a Ray Data job where this process is connected to a cluster, else in this process.

    parts of the source  ->  runs, sorted by key      <out>/.preparing/     (one task a part)
    all runs             ->  data files               <out>/data-*.arrow    (one task a file)
    the index, last                                   <out>/index.json

What is done stays when the job is interrupted: the same call goes on with the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import xxhash
from pydantic import TypeAdapter

from elastic_trainer.data.dataset import INDEX, VARIABLE, Column, DataFile, DatasetIndex
from elastic_trainer.data.preparation.columns import common
from elastic_trainer.data.preparation.damage import NAMED, POLICIES, DamagedRow
from elastic_trainer.data.preparation.readers import BATCH_ROWS, ReadOptions, label_of
from elastic_trainer.data.preparation.shuffle import (
    FilePlan,
    PartResult,
    Run,
    ShuffleSpec,
    Transform,
    merge_file,
    sort_part,
)
from elastic_trainer.data.preparation.sources import Part, Source, SourceFile, find, open_file, parts_of
from elastic_trainer.data.preparation.tokens import VOCABULARY
from elastic_trainer.data.ray_context import quiet_context
from elastic_trainer.errors import DataError, StorageError
from elastic_trainer.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from ray.data import Dataset

VERSION = 1  # of the readers and the shuffle: what another one has left behind is not gone on with
STAGING = ".preparing"
QUARANTINE = "quarantine.jsonl"
ROW_GROUP_BYTES = 1 << 20  # a row group is read whole: large enough to read at full speed, small enough to mix well
FILE_BYTES = 128 << 20  # a merge holds some three times as much
BUCKET_BYTES = 32 << 20
SAY_S = 2.0  # between two words on progress

DATASET_ROWS = 16384

Say = Callable[[str], None]
R = TypeVar("R")


@dataclass(frozen=True)
class _Work:
    """What a task needs beside its own item; travels to it."""

    source: str
    source_options: Mapping[str, Any]
    out: str
    out_options: Mapping[str, Any]
    spec: ShuffleSpec
    transform: Transform | None
    version: str

    def staging(self) -> ObjectStore:
        return ObjectStore(self.out, self.out_options).within(STAGING)

    def opened(self, file: SourceFile) -> Any:
        return open_file(file, self.source, self.source_options)


def prepare(
    source: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    file_format: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    transform: Transform | None = None,
    transform_version: str = "",
    splits: Mapping[str, float] | None = None,
    on_error: str = "fail",
    block: int = 256,
    image_size: tuple[int, int] | None = None,
    source_options: Mapping[str, Any] | None = None,
    out_options: Mapping[str, Any] | None = None,
    say: Say = lambda text: None,
) -> DatasetIndex:
    """Make a dataset folder of raw files, fully shuffled once by a keyed order.

    The same source, options and seed give the same bytes, however many tasks run. After an interruption the same call
    goes on with what is left.

    Args:
        source: A file, a folder, a pattern or a URL; or a `ray.data.Dataset`, whose rows are taken in its order.
        out: The folder to make, a path or a URL; must not hold anything.
        seed: Of the shuffle and the splits.
        file_format: npz, parquet, jsonl, csv, text or images; by default told by the files' names.
        include: Patterns of file names, such as `*.py`; default all.
        exclude: Patterns of paths below the source that are left out, such as `build/*`.
        transform: Gets columns (numpy arrays by name, at most 1,024 rows) and returns columns; may drop or add rows.
        transform_version: Tells its code from another version, for going on after an interruption.
        splits: Shares of rows by name, such as {"validation": 0.1}; with them `out` holds a folder for each, the rest
            in `train`. Text and images are split by whole files.
        on_error: What to do with damaged rows: fail, skip, or quarantine (`out/quarantine.jsonl`).
        block: Tokens of a block of text.
        image_size: (height, width) to which images are brought; by default their files' bytes are kept.
        source_options: For fsspec's client of the source.
        out_options: For the client of the store that `out` is in.
        say: Called with a line on progress, every few seconds.

    Returns:
        The index of `out`; with splits that of `out/train`.

    Raises:
        DataError: The source cannot be read, is empty, or holds rows that cannot be used; `out` holds something.
    """
    shares = dict(splits or {})
    _check(on_error, shares, block)
    store = ObjectStore(os.fspath(out), out_options)
    staging = store.within(STAGING)
    _check_out(store)
    if isinstance(source, str | os.PathLike):
        found = find(os.fspath(source), source_options or {}, file_format=file_format, include=include, exclude=exclude)
        parts = parts_of(found, shares, seed)
        labels = tuple(sorted({label_of(file.name) for file in found.files})) if found.format == "images" else ()
    else:
        found, labels = _staged(source, staging, say), ()
        parts = tuple(Part(number, (file,)) for number, file in enumerate(found.files))
        source, source_options = found.url, out_options
    buckets = max(1, min(1024, found.size_bytes // BUCKET_BYTES))
    reading = ReadOptions(block, image_size, labels if labels != ("",) else ())
    work = _Work(
        os.fspath(source),
        dict(source_options or {}),
        store.url,
        dict(out_options or {}),
        ShuffleSpec(found.format, seed, shares, on_error, reading, buckets),
        transform,
        transform_version,
    )
    results = _sorted_parts(work, parts, say)
    left_out = _tell_damage(results, store, on_error, say)
    indexes = _merged(work, results, left_out, say)
    for split, index in indexes.items():
        store.put(f"{split}/{INDEX}".lstrip("/"), index.to_json().encode())
    store.delete([f"{STAGING}/{name}" for name in staging.names("")])
    return indexes.get("train") or next(iter(indexes.values()))


def _check(on_error: str, shares: Mapping[str, float], block: int) -> None:
    if on_error not in POLICIES:
        raise DataError(f"on_error = {on_error!r} is not known. Use one of {', '.join(POLICIES)}.")
    if block < 2:
        raise DataError(f"block = {block}: a block of text needs two tokens or more, to predict one from the other.")
    for name, share in shares.items():
        if not 0 < share < 1 or not name.isidentifier() or name == "train":
            raise DataError(
                f"split {name}={share}: give a name and a share between 0 and 1, such as validation=0.1; what the "
                "splits leave is train."
            )
    if sum(shares.values()) >= 1:
        raise DataError(f"the splits take {sum(shares.values()):g} of the rows and leave none to train.")


def _check_out(store: ObjectStore) -> None:
    names = store.names("")
    begun = any(name.startswith(f"{STAGING}/") for name in names)
    there = [name for name in names if not name.startswith(f"{STAGING}/")]
    if any(name.rpartition("/")[2] == INDEX for name in there) or (there and not begun):
        raise DataError(f"{store.url}: exists already. Remove it, or choose another --out.")


# ---- the two passes


def _sorted_parts(work: _Work, parts: Sequence[Part], say: Say) -> list[PartResult]:
    size = sum(file.size_bytes for part in parts for file in part.files)
    say(f"reading {len(parts)} parts, {size / 1e6:.1f} MB")

    def sort(number: int) -> PartResult:
        part, staging = parts[number], work.staging()
        name = _digest(part, work.spec, work.version, work.transform is None)
        return _once(
            staging,
            f"part-{name}.json",
            PartResult,
            lambda: sort_part(part, work.spec, work.opened, work.transform, staging, f"part-{name}"),
        )

    return _run(sort, len(parts), PartResult, "parts read", say)


def _merged(work: _Work, results: Sequence[PartResult], left_out: int, say: Say) -> dict[str, DatasetIndex]:
    by_split: dict[str, list[Run]] = {}
    for run in (run for result in results for run in result.runs):
        by_split.setdefault(run.split, []).append(run)
    if not by_split:
        raise DataError(f"{work.source}: has no rows" + (f" but {left_out} damaged ones." if left_out else "."))
    if work.spec.splits and (missing := {"train", *work.spec.splits} - set(by_split)):
        raise DataError(f"no row falls into the split {', '.join(sorted(missing))}. Give it a larger share.")
    plans = [plan for split, runs in sorted(by_split.items()) for plan in _file_plans(split, runs)]

    def merge(number: int) -> DataFile:
        plan, out = plans[number], ObjectStore(work.out, work.out_options)
        runs = by_split[plan.split]
        name = _digest(plan, [run.name for run in runs])
        staging = out.within(STAGING)
        return _once(staging, f"file-{name}.json", DataFile, lambda: merge_file(plan, runs, staging, out))

    files = _run(merge, len(plans), DataFile, "data files written", say)
    about = _about(work.spec, left_out)
    indexes = {}
    for split, runs in sorted(by_split.items()):
        own = [(plan, file) for plan, file in zip(plans, files, strict=True) if plan.split == split]
        rows, first = sum(run.rows for run in runs), own[0][0]
        data_files = tuple(file for _, file in own)
        indexes[split] = DatasetIndex(rows, first.row_group, work.spec.seed, first.columns, data_files, about)
    return indexes


def _file_plans(split: str, runs: Sequence[Run]) -> list[FilePlan]:
    columns = common((run.source, run.columns) for run in runs)
    rows = sum(run.rows for run in runs)
    row_bytes = max(1.0, _row_bytes(columns, runs))
    # bounded by rows // 256 too, so that even small data has many row groups to permute
    row_group = max(1, min(int(ROW_GROUP_BYTES // row_bytes), rows // 256))
    step = row_group * max(1, int(FILE_BYTES // (row_group * row_bytes)))
    folder = f"{split}/" if split else ""
    return [
        FilePlan(f"{folder}data-{number:05d}.arrow", split, columns, low, min(low + step, rows), row_group)
        for number, low in enumerate(range(0, rows, step))
    ]


def _row_bytes(columns: Sequence[Column], runs: Sequence[Run]) -> float:
    if all(column.dtype not in VARIABLE for column in columns):
        return float(sum(column.row_bytes for column in columns))
    return sum(run.content_bytes for run in runs) / sum(run.rows for run in runs)


def _about(spec: ShuffleSpec, left_out: int) -> dict[str, Any]:
    about: dict[str, Any] = {"format": spec.format}
    if spec.format == "text":
        about |= {"vocabulary": VOCABULARY, "block": spec.reading.block}
    if spec.reading.labels:
        about["labels"] = list(spec.reading.labels)
    if left_out:
        about["left_out"] = left_out
    return about


def _tell_damage(results: Sequence[PartResult], store: ObjectStore, policy: str, say: Say) -> int:
    """Name damaged rows, and keep them where that was asked for; returns how many there are."""
    rows: list[DamagedRow] = [row for result in results for row in result.damaged]
    count = sum(result.left_out for result in results)
    for row in rows[:NAMED]:
        say(f"left out: {row}")
    if count > NAMED:
        say(f"left out: {count - NAMED} more")
    if count and policy == "quarantine":
        store.put(QUARANTINE, "".join(row.to_json() + "\n" for row in rows).encode())
        say(f"{count} rows left out are kept in {store.url}/{QUARANTINE}")
    return count


# ---- tasks


def _digest(*what: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr((VERSION, BATCH_ROWS, *what)).encode())


def _once(store: ObjectStore, name: str, kind: type[R], work: Callable[[], R]) -> R:
    """The result of a task that may have been done before an interruption."""
    adapter = TypeAdapter(kind)
    with contextlib.suppress(FileNotFoundError):
        return adapter.validate_json(store.read(name))
    result = work()
    store.put(name, adapter.dump_json(result))
    return result


def _run(task: Callable[[int], R], count: int, kind: type[R], words: str, say: Say) -> list[R]:
    """The results of `task(0)` to `task(count - 1)`."""
    import ray

    results: dict[int, R] = {}
    began = said = time.monotonic()
    done = _by_ray_data(task, count, kind) if ray.is_initialized() and count > 1 else _here(task, count)
    for number, result in done:
        results[number] = result
        now = time.monotonic()
        if now - said >= SAY_S and len(results) < count:
            left_s = (now - began) / len(results) * (count - len(results))
            say(f"{len(results)} of {count} {words}, about {left_s:.0f} s left")
            said = now
    return [results[number] for number in range(count)]


def _here(task: Callable[[int], R], count: int) -> Iterator[tuple[int, R]]:
    return ((number, task(number)) for number in range(count))


def _by_ray_data(task: Callable[[int], R], count: int, kind: type[R]) -> Iterator[tuple[int, R]]:
    import ray

    paths = [os.getcwd(), *(path for path in sys.path if path)]
    adapter = TypeAdapter(kind)

    def do(row: dict[str, Any]) -> dict[str, Any]:
        sys.path.extend(path for path in paths if path not in sys.path)  # where the task's transform is found
        try:
            return {"number": row["id"], "result": TypeAdapter(kind).dump_json(task(row["id"])), "problem": ""}
        except (DataError, StorageError) as error:  # as it is, without the frames of Ray
            return {"number": row["id"], "result": b"", "problem": str(error)}

    with quiet_context():
        for row in ray.data.range(count, override_num_blocks=count).map(do).iter_rows():
            if row["problem"]:
                raise DataError(row["problem"])
            yield int(row["number"]), adapter.validate_json(row["result"])


# ---- rows that come as a Ray data set


def _staged(dataset: Dataset, staging: ObjectStore, say: Say) -> Source:
    """Write the rows of a data set, in its order, as Parquet files that are then read as any others."""
    import pyarrow.parquet as pq

    files = []
    with quiet_context():
        for number, table in enumerate(dataset.iter_batches(batch_size=DATASET_ROWS, batch_format="pyarrow")):
            name = f"rows-{number:06d}.parquet"
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            content = memoryview(sink.getvalue())
            staging.put(name, content)
            path = f"{staging.url}/{name}".removeprefix("file://")
            files.append(SourceFile(name, path, len(content), xxhash.xxh3_64_hexdigest(content)))
            say(f"{sum(1 for _ in files) * DATASET_ROWS} rows of the data set taken")
    if not files:
        raise DataError("the Ray data set has no rows.")
    return Source(staging.url, "parquet", tuple(files))
