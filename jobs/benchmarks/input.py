"""How fast samples come, and how long a batch is waited for: both engines of ours beside what people use otherwise.

Two kinds of data, each in two places: (a) raw blocks of 512 tokens, (b) small images that are decoded; in local files
and behind S3. Every side goes through the same rows; it counts only if each came once. Speeds are of the whole pass,
its start included: Ray Data makes much of so little data before it hands out the first batch. Then the Ray Data engine
while the world changes 2 -> 1 -> 3, and one epoch of 1001 rows with a crash, ours and Ray Train's.

    python -m jobs.benchmarks.input [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import ray
import torch
from PIL import Image
from ray import cloudpickle
from torch.utils.data import DataLoader, Dataset

from elastic_trainer import prepare
from elastic_trainer.cluster.local import LocalCluster
from elastic_trainer.data.batch_plan import BatchPlan, choose_window
from elastic_trainer.data.dataset import schema_of, to_arrow
from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import DataEngine
from elastic_trainer.data.ledger import audit
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.ray_context import quiet_context
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.data.routed import RoutedSource
from elastic_trainer.data.router import RouterSpec, router_name, start_router
from elastic_trainer.data.routing import Routing
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.reports.record import read_record
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.training.batches import make_batch
from elastic_trainer.vocabulary import NAMESPACE
from jobs.benchmarks.recovery import EVENTS, WARM_STEPS, session, strike
from jobs.benchmarks.report import Report, median, p95
from jobs.benchmarks.s3server import S3Server

BATCH, RANKS, TOKENS, SIDE = 256, 4, 512, 32
STEP_S = 0.05
BEFORE_RESIZE, AFTER_RESIZE = 120, 20  # steps: Ray Data has begun by the first change
Pass = tuple[float, list[float], int]  # seconds, waits for batches, sum of all row numbers
Row = dict[str, Any]


class Decode:
    """The task of the images: what `preprocess` does is what every side does to a row."""

    def preprocess(self, row: Row, rng: np.random.Generator) -> Row:
        """Bytes of a PNG to float32 (3, side, side)."""
        return {"number": row["number"], "image": decoded(row["image"])}


def decoded(content: bytes) -> np.ndarray[Any, Any]:
    """An image as networks want it."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255


def make_rows(kind: str, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Each row has its number, by which it is counted."""
    draw = np.random.default_rng(0)
    if kind == "tokens":
        return {"number": np.arange(rows), "tokens": draw.integers(0, 30_000, (rows, TOKENS)).astype(np.int32)}
    images = np.empty(rows, dtype=object)
    for number in range(rows):
        out = io.BytesIO()
        Image.fromarray(draw.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(out, "png")
        images[number] = out.getvalue()
    return {"number": np.arange(rows), "image": images}


@dataclass(frozen=True)
class Place:
    """A kind of data in a place: the dataset folder of ours, and the same rows as Parquet."""

    kind: str
    rows: int
    folder: str
    parquet: str
    options: dict[str, Any]
    filesystem: Any


def drained(batches: Iterator[Any]) -> Pass:
    """Go through batches of torch tensors; the first one's wait counts for the speed and not among the waits."""
    waits, total = [], 0
    last = time.perf_counter()
    for batch in batches:
        waits.append(time.perf_counter() - last)
        total += int(batch["number"].sum())
        last = time.perf_counter()
    return sum(waits), waits[1:], total


# ---- the sides


def plan_of(place: Place) -> BatchPlan:
    """One epoch in batches, as the trainer would plan it."""
    index = DatasetReader(place.folder, options=place.options).index
    window = choose_window(index.row_group, BATCH // RANKS, BATCH, index.row_bytes, 64 << 20)
    return BatchPlan(SampleOrder(index.rows, index.row_group, BATCH, RANKS, window, 7), BATCH // RANKS)


def ours_direct(place: Place) -> Pass:
    """The worker reads, and decodes in a thread."""
    plan = plan_of(place)
    engine = DataEngine(plan, direct_source(place, plan.order))
    return drained(batches_of(engine, plan))


def direct_source(place: Place, order: SampleOrder) -> DirectSource:
    """Of a worker."""
    reader = DatasetReader(place.folder, options=place.options)
    return DirectSource(reader, order, Decode().preprocess if place.kind == "images" else None)


def ours_ray(place: Place) -> Pass:
    """Ray Data reads and decodes."""
    plan = plan_of(place)
    routing = Routing(2, 256 << 20, DatasetReader(place.folder, options=place.options).index.row_bytes)
    name = f"input{random.randrange(1 << 30)}"
    task = cloudpickle.dumps(Decode if place.kind == "images" else Plain)
    start_router(RouterSpec(name, plan.order, place.folder, place.options, task, (os.getcwd(),), routing))
    try:
        source = RoutedSource(name, plan.order, direct_source(place, plan.order), lambda text: None)
        return drained(batches_of(DataEngine(plan, source), plan))
    finally:
        ray.kill(ray.get_actor(router_name(name), namespace=NAMESPACE))


class Plain:
    """A task with nothing to preprocess."""

    preprocess = None


def batches_of(engine: DataEngine, plan: BatchPlan) -> Iterator[Any]:
    """An epoch's micro-batches as tensors."""
    try:
        for step in range(plan.order.steps_per_epoch):
            engine.begin(step, range(RANKS))
            for planned in plan.of_rank(step, range(RANKS)):
                yield make_batch(planned, engine.data_of(planned), None, False)
    finally:
        engine.close()


def streaming_split(place: Place) -> Pass:
    """Ray Data's own way into a trainer, for one consumer."""

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"number": batch["number"], "image": np.stack([decoded(each) for each in batch["image"]])}

    with quiet_context() as context:
        context.execution_options.preserve_order = False
        data = ray.data.read_parquet(place.parquet, filesystem=place.filesystem)
        if place.kind == "images":
            data = data.map_batches(decode, batch_size=BATCH)
        (split,) = data.streaming_split(1)
        batches = split.iter_torch_batches(batch_size=BATCH // RANKS, local_shuffle_buffer_size=None)
        return drained(iter(batches))


def pyarrow_loop(place: Place) -> Pass:
    """Memory-mapped, in the same permutation as ours; one record batch, from which pyarrow takes rows fastest."""
    plan = plan_of(place)

    def batches() -> Iterator[Any]:
        table = pa.ipc.open_file(pa.memory_map(f"{place.folder}/../whole.arrow")).read_all()
        for step in range(plan.order.steps_per_epoch):
            for planned in plan.of_rank(step, range(RANKS)):
                taken = table.take(pa.array(planned.ids))
                yield {name: _tensor(place, name, taken.column(name).combine_chunks()) for name in table.column_names}

    return drained(batches())


def _tensor(place: Place, name: str, column: Any) -> torch.Tensor:
    if name == "image":
        return torch.from_numpy(np.stack([decoded(each) for each in column.to_pylist()]))
    values = column.flatten().to_numpy() if name == "tokens" else column.to_numpy()
    return torch.from_numpy(values.reshape(len(column), -1).copy())


class Rows(Dataset[Any]):
    """Rows of the dataset folder for a DataLoader."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._reader: DatasetReader | None = None

    def __len__(self) -> int:
        return self._place.rows

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """Rows of a batch together, which is the faster way."""
        self._reader = self._reader or DatasetReader(self._place.folder)
        columns = self._reader.rows(np.array(ids))
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(ids))]
        return [{**row, "image": decoded(row["image"])} if "image" in row else row for row in rows]


def data_loader(place: Place) -> Pass:
    """torch's, with two processes."""
    torch.manual_seed(7)
    return drained(iter(DataLoader(Rows(place), BATCH // RANKS, shuffle=True, num_workers=2)))


# ---- what is measured


def compare(report: Report, place: Place, where: str, repeats: int, sides: dict[str, Callable[[Place], Pass]]) -> bool:
    """Every side in turns; returns whether each row came once everywhere."""
    expected = place.rows * (place.rows - 1) // 2
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    waits: dict[str, list[float]] = {name: [] for name in sides}
    is_right = True
    for _ in range(repeats):
        for name in random.sample(list(sides), len(sides)):
            seconds, waited, total = sides[name](place)
            speeds[name].append(place.rows / seconds)
            waits[name].append(1000 * p95(waited))
            if total != expected:
                print(f"WRONG: {name} on {place.kind}, {where}: not each row came once")
                is_right = False
    report.table(f"{place.kind}, {where}: samples a second", speeds, unit="")
    report.table(f"{place.kind}, {where}: p95 of the wait for a batch", waits, unit="ms")
    fast = {name: median(values) for name, values in speeds.items()}
    if place.kind == "tokens" and "pyarrow, memory-mapped" in fast:
        ratio = fast["ours, direct"] / fast["pyarrow, memory-mapped"]
        report.check(f"tokens, {where}: direct / pyarrow", ratio, ">= 0.9", ratio >= 0.9)
    goal = 0.5 if place.kind == "tokens" else 1.0
    ratio = fast["ours, Ray Data"] / fast["streaming_split"]
    report.check(f"{place.kind}, {where}: Ray Data engine / streaming_split", ratio, f">= {goal}", ratio >= goal)
    return is_right


def resized(report: Report, place: Place) -> None:
    """The first 20 batches after each change of world size, training in steps of 50 ms."""
    plan, name = plan_of(place), "resized"
    routing = Routing(1, 256 << 20, DatasetReader(place.folder).index.row_bytes)
    start_router(RouterSpec(name, plan.order, place.folder, {}, cloudpickle.dumps(Decode), (os.getcwd(),), routing))
    waits: list[float] = []
    try:
        first = 0
        for world, steps in ((2, BEFORE_RESIZE), (1, AFTER_RESIZE), (3, AFTER_RESIZE)):
            ranges = [range(RANKS * i // world, RANKS * (i + 1) // world) for i in range(world)]
            direct = direct_source(place, plan.order)
            sources = [RoutedSource(name, plan.order, direct, lambda text: None) for _ in ranges]
            engines = [DataEngine(plan, source) for source in sources]
            for step in range(first, first + steps):
                for engine, ranks in zip(engines, ranges, strict=True):
                    before = engine.wait_s
                    engine.begin(step, ranks)
                    for planned in plan.of_rank(step, ranks):
                        engine.data_of(planned)
                    if first:
                        waits.append(engine.wait_s - before)
                time.sleep(STEP_S)
            for engine in engines:
                engine.close()
            first += steps
    finally:
        ray.kill(ray.get_actor(router_name(name), namespace=NAMESPACE))
    report.table("images: wait for each of the first 20 batches after a resize", {"Ray Data engine": waits})
    report.check("wait after a resize, p95", p95(waits), f"<= {STEP_S} s", p95(waits) <= STEP_S)


def crashed(report: Report) -> bool:
    """One epoch of 1001 rows with a crash: rows repeated and lost. Returns whether ours is exact."""
    folder = tempfile.mkdtemp(prefix="input-")
    try:
        command = [sys.executable, "-m", "jobs.benchmarks.input_raytrain", folder]
        subprocess.run(command, timeout=240, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        rows = [int(line) for path in Path(folder).glob("*.rows") for line in path.read_text().split()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counted = Counter(rows)
    theirs = {"repeated": sum(n - 1 for n in counted.values()), "lost": 1001 - len(counted)}
    steps = -(-1001 // 12)
    with session(lambda f: [[sys.executable, "-m", "jobs.benchmarks.recovery_ours", f, "1001", str(steps)]]) as running:
        strike(running, random.Random(0), EVENTS["kill"])
        running.processes[0].wait(120)
        store = ObjectStore(f"{running.folder}/run")
        config = read_record(store, "run").history.config
        assert config is not None
        found = audit(order_of(config), read_stream(store.names("ledger"), store.read)).summary(steps)
    mine = {"repeated": found["samples_repeated"], "lost": found["samples_missing"]}
    report.raw["1001 rows with a crash"] = {"Ray Train": theirs, "ours": mine, "killed after": WARM_STEPS}
    print(f"\n1001 rows with a crash: Ray Train {theirs}, ours {mine}")
    report.check("ours: rows repeated or lost", sum(mine.values()), "0", not any(mine.values()))
    return not any(mine.values())


def write(kind: str, rows: int, folder: Path) -> tuple[str, str]:
    """Both forms of the data; returns where they are."""
    columns = make_rows(kind, rows)
    arrays = {n: pa.array(list(v)) if v.dtype == object or v.ndim > 1 else pa.array(v) for n, v in columns.items()}
    (folder / "parquet").mkdir(parents=True)
    table = pa.table(arrays)
    each = -(-rows // 8)
    for number in range(8):
        pq.write_table(table.slice(number * each, each), folder / "parquet" / f"{number}.parquet")
    index = prepare(folder / "parquet", folder / "set")
    reader = DatasetReader(folder / "set", index)
    found = reader.rows(np.arange(rows))
    batch = pa.record_batch(
        [to_arrow(found[column.name], column) for column in index.columns], schema=schema_of(index.columns)
    )
    with pa.OSFile(str(folder / "whole.arrow"), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return str(folder / "set"), str(folder / "parquet")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less data, two repeats")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    repeats = 2 if options.quick else 5
    sizes = {"tokens": 120_000, "images": 8_000} if options.quick else {"tokens": 200_000, "images": 40_000}
    everywhere: dict[str, Callable[[Place], Pass]] = {
        "ours, direct": ours_direct,
        "ours, Ray Data": ours_ray,
        "streaming_split": streaming_split,
    }
    local = {**everywhere, "pyarrow, memory-mapped": pyarrow_loop, "torch DataLoader": data_loader}
    report, is_right = Report(), True
    with tempfile.TemporaryDirectory(prefix="input-") as temporary, S3Server() as s3:
        with LocalCluster(cpus_per_node=3, object_store_bytes=600 << 20):
            for kind, rows in sizes.items():
                folder, parquet = write(kind, rows, Path(temporary) / kind)
                here = Place(kind, rows, folder, parquet, {}, None)
                is_right &= compare(report, here, "local", repeats, local)
                if kind == "images":
                    resized(report, here)
                is_right &= compare(report, over_s3(here, s3), "S3", repeats, everywhere)
        is_right &= crashed(report)
    report.end(options.json, is_right=is_right)


def over_s3(place: Place, s3: S3Server) -> Place:
    """The same files behind S3."""
    url = s3.url()
    store = ObjectStore(url, s3.options())
    for form in (place.folder, place.parquet):
        for path in Path(form).iterdir():
            store.put(f"{Path(form).name}/{path.name}", path.read_bytes())
    given = s3.options()
    files = pyarrow.fs.S3FileSystem(
        access_key=given["key"],
        secret_key=given["secret"],
        endpoint_override=given["endpoint_url"].removeprefix("http://"),
        scheme="http",
    )
    bare = url.removeprefix("s3://")
    return Place(place.kind, place.rows, f"{url}/set", f"{bare}/parquet", given, files)


if __name__ == "__main__":
    main()
