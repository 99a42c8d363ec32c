"""How long saving holds training up, and how fast a state is back: ours beside torch's own ways, in the same processes.

Two ranks hold the same state (parameters and two moments). In each repeat every way has its turn, in another order. A
way counts only if what it saved comes back equal to the bit.

    python -m jobs.benchmarks.checkpoint [--quick] [--json FILE] [--megabytes 500]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from elastic_trainer.checkpoint import reader
from elastic_trainer.checkpoint.committer import Committer
from elastic_trainer.checkpoint.history import History
from elastic_trainer.checkpoint.layout import Layout, TensorInfo
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.writer import Writer
from elastic_trainer.control.events import Event, PiecesFailed, PiecesWritten
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import Token, Worker
from jobs.benchmarks.report import Report, median
from jobs.benchmarks.s3server import S3Server

RANKS = 2
TOKEN = Token(1, 1)


def make_state(megabytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Some 60 tensors of the shapes of a transformer, each with two moments."""
    random_ = torch.Generator().manual_seed(seed)
    width = 768
    rows = max(1, (megabytes << 20) // (4 * width * 60))
    return {
        f"{part}.{layer}": torch.randn(rows, width, generator=random_)
        for layer in range(20)
        for part in ("parameter", "moment", "variance")
    }


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(one[name], other[name]) for name in one)


class Ours:
    """A rank's writer, and on rank 0 the committer, in place of the controller."""

    def __init__(self, url: str, options: dict[str, Any], rank: int, state: dict[str, torch.Tensor]) -> None:
        self._rank = rank
        self._state = state
        self.store = ObjectStore(url, options, timeout_s=120)
        self._layout = Layout(tuple(TensorInfo(n, "float32", tuple(t.shape)) for n, t in state.items()))
        self._writer = Writer(Worker(rank, 0), lambda: self.store, self._report, {})
        self._written = threading.Event()
        self._content = ""
        self._steps = 0
        self._committer: Committer | None = None
        if rank == 0:
            log = RunLog(self.store)
            self._committer = Committer(self.store, log, History(), 1)

    def _report(self, event: Event) -> None:
        assert not isinstance(event, PiecesFailed), event
        if isinstance(event, PiecesWritten):
            self._content = event.content
            self._written.set()

    def begin(self) -> None:
        """What holds training up."""
        self._steps += 1
        self._written.clear()
        tensors = list(self._state.values())
        self._writer.begin(self._steps, TOKEN, 0, self._layout, tensors, None, part=self._rank, parts=RANKS)

    def finish(self) -> None:
        """Until the save stands; this one is no collective of the trainer's, only of the measurement."""
        self._written.wait()
        said: list[Any] = [None] * RANKS
        dist.all_gather_object(said, self._content)
        if self._committer is not None:
            for part, content in enumerate(said):
                self._committer.take(PiecesWritten(Worker(part, 0), TOKEN, self._steps, 0, content))
            saved = self._committer.write_manifest(self._steps, TOKEN, 0)
            self._committer.stand(saved, TOKEN, {"audit": {}, "evaluation": {}, "ledger": []})
            self._committer.forget(self._steps, TOKEN)
        dist.barrier()
        self._writer.settle(self._steps, TOKEN)

    def manifest(self) -> Manifest:
        """Of the newest save."""
        from elastic_trainer.checkpoint.history import fold

        newest = fold(RunLog(self.store).read()).newest
        assert newest is not None
        return reader.load_manifest(self.store, newest)


def plain_read(store: ObjectStore, manifest: Manifest, buffer: np.ndarray[Any, Any]) -> None:
    """The same bytes and digests by eight threads, into memory that is there: the best that a reader could do."""
    places, offset = [], 0
    for chunk in manifest.chunks():
        places.append((chunk, offset))
        offset += chunk.length
    view = memoryview(buffer)  # type: ignore[arg-type]

    def read(place: Any) -> None:
        chunk, at = place
        target = view[at : at + chunk.length]
        store.client.read_into(f"{store.path}/{chunk.file}".strip("/"), chunk.offset, target)
        assert xxhash.xxh3_128_hexdigest(target) == chunk.digest

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, places))


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together; the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    call()
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def step(work: torch.Tensor) -> None:
    """Something like a training step: a fixed amount of computation on one thread, some 50 ms here."""
    for _ in range(60):
        work @ work


def rank_main(rank: int, port: int, arguments: argparse.Namespace, where: str, target: Any, results: Any) -> None:
    """One rank of one place (`local` or `s3`)."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(where, store), rank=rank, world_size=RANKS)
    url, options = target
    for name in ("key", "secret"):
        if name in options:
            os.environ["AWS_ACCESS_KEY_ID" if name == "key" else "AWS_SECRET_ACCESS_KEY"] = options[name]
    if "endpoint_url" in options:
        os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]
    found = measure(rank, arguments, url, options)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, arguments: argparse.Namespace, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """All ways, in turn."""
    is_local = not options
    state = make_state(arguments.megabytes, seed=1)
    ours = Ours(f"{url}/ours", options, rank, state)
    copy = {name: torch.zeros_like(value) for name, value in state.items()}
    work = torch.randn(256, 256)
    bucket: Any = getattr(ours.store.client, "fs", None)  # torch's way to S3, and what removes what it left
    times: dict[str, list[float]] = {}
    numbers = iter(range(10_000))
    chooser = random.Random(1)

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def writer(path: str) -> Any:
        return FileSystemWriter(path) if is_local else FsspecWriter(path)

    def memory_copy() -> None:
        note("memory copy", timed(lambda: [copy[name].copy_(value) for name, value in state.items()]))

    def save_ours() -> None:
        note("ours: stall", timed(ours.begin))
        start = time.perf_counter()
        ours.finish()
        note("ours: until it stands", time.perf_counter() - start)

    def save_dcp() -> None:
        path = f"{url}/dcp{next(numbers)}"
        note("DCP save", timed(lambda: state_dict_saver.save(state, storage_writer=writer(path))))
        paths.append(path)

    def save_dcp_async() -> None:
        path = f"{url}/async{next(numbers)}"
        pending: list[Any] = []
        note(
            "DCP async_save: stall",
            timed(lambda: pending.append(state_dict_saver.async_save(state, storage_writer=writer(path)))),
        )
        pending[0].result()
        dist.barrier()
        forget(path)

    def save_torch() -> None:
        path = f"{url}/torch{next(numbers)}.pt"

        def write() -> None:
            if rank == 0 and is_local:
                torch.save(state, path)
            elif rank == 0:
                with bucket.open(path, "wb") as file:
                    torch.save(state, file)

        note("torch.save on rank 0", timed(write))
        forget(path)

    def forget(path: str) -> None:
        dist.barrier()
        if rank == 0 and is_local:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.remove(path)
        elif rank == 0:
            bucket.rm(path, recursive=True)

    paths: list[str] = []
    ways = [memory_copy, save_ours, save_dcp, save_dcp_async, save_torch]
    for way in ways:
        way()  # the first of each pays for its buffers, connections and imports
    times.clear()
    for _ in range(arguments.repeats):
        chooser.shuffle(ways)
        for way in ways:
            way()
            while len(paths) > 1:
                forget(paths.pop(0))
    added = added_time(ours, work, arguments.repeats)
    back = restore(ours, state, paths[-1], url, is_local, arguments.repeats)
    dist.barrier()
    return {"save": times, "steps": added, **back}


def added_time(ours: Ours, work: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Steps while an upload is going on beside steps without one, in turn."""
    found: dict[str, list[float]] = {"step alone": [], "step beside an upload": []}
    for _ in range(repeats):
        for _ in range(5):
            found["step alone"].append(timed(lambda: step(work)))
        ours.begin()
        while not ours._written.is_set():
            start = time.perf_counter()
            step(work)
            found["step beside an upload"].append(time.perf_counter() - start)
        ours.finish()
    return found


def restore(
    ours: Ours, state: dict[str, torch.Tensor], dcp_path: str, url: str, is_local: bool, repeats: int
) -> dict[str, Any]:
    """Ours, DCP's and a plain read of the same bytes, in turn; each into tensors that are there."""
    manifest = ours.manifest()
    mine = {name: torch.zeros_like(value) for name, value in state.items()}
    theirs = {name: torch.zeros_like(value) for name, value in state.items()}
    buffer = np.zeros(manifest.size_bytes, np.uint8)
    reader_of: Any = FileSystemReader if is_local else FsspecReader
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: reader.restore(ours.store, manifest, [mine[name] for name in mine]),
        "DCP load": lambda: state_dict_loader.load(theirs, storage_reader=reader_of(dcp_path)),
        "plain read with digests": lambda: plain_read(ours.store, manifest, buffer),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    chooser = random.Random(2)
    for round_ in range(repeats + 1):
        chooser.shuffle(order)
        for name in order:
            seconds = timed(ways[name])
            if round_:
                times[name].append(seconds)
    right = torch.tensor([int(is_equal(mine, state) and is_equal(theirs, state))])
    dist.all_reduce(right, dist.ReduceOp.MIN)
    return {"restore": times, "is_right": bool(right.item())}


@contextlib.contextmanager
def places() -> Iterator[dict[str, Any]]:
    """A local folder and a bucket."""
    folder = tempfile.mkdtemp(prefix="et-bench-")
    try:
        with S3Server() as server:
            yield {"local": (folder, {}), "s3": (server.url(), server.options())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(report: Report, where: str, found: dict[str, Any]) -> None:
    """The goals."""
    save, steps, back = found["save"], found["steps"], found["restore"]
    report.table(f"{where}: saving", save)
    report.table(f"{where}: steps", steps)
    report.table(f"{where}: restoring", back)
    stall = median(save["ours: stall"])
    copies = stall / median(save["memory copy"])
    report.check(f"{where}: stall in memory copies", copies, "<= 1.3", copies <= 1.3)
    for name in ("DCP save", "DCP async_save: stall", "torch.save on rank 0"):
        print(f"         {where}: our stall is {stall / median(save[name]):.3f} of {name}")
    if where == "s3":
        share = stall / median(save["DCP save"])
        report.check("s3: stall as a share of a synchronous DCP save", share, "<= 0.02", share <= 0.02)
    added = median(steps["step beside an upload"]) / median(steps["step alone"])
    print(f"         {where}: a step beside an upload takes {added:.2f} of one alone")
    faster = median(back["DCP load"]) / median(back["ours"])
    report.check(f"{where}: restoring, DCP's time over ours", faster, ">= 3", faster >= 3)
    share = median(back["plain read with digests"]) / median(back["ours"])
    report.check(f"{where}: restoring, our throughput over a plain read's", share, ">= 0.9", share >= 0.9)
    if not found["is_right"]:
        print(f"WRONG    {where}: what came back is not what was saved")


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--json", metavar="FILE", help="write figures and checks there")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state (default 500)")
    parser.add_argument("--only", choices=("local", "s3"), help="one place alone")
    arguments = parser.parse_args()
    arguments.repeats = 3 if arguments.quick else 7
    report = Report()
    is_right = True
    context = mp.get_context("spawn")
    with places() as found:
        for where, target in found.items():
            if arguments.only not in (None, where):
                continue
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            results = context.Queue()
            ranks = [
                context.Process(target=rank_main, args=(rank, server.port, arguments, where, target, results))
                for rank in range(RANKS)
            ]
            for process in ranks:
                process.start()
            measured = results.get(timeout=1800)
            for process in ranks:
                process.join()
            judge(report, where, measured)
            is_right = is_right and measured["is_right"]
    report.end(arguments.json, is_right=is_right)


if __name__ == "__main__":
    main()
