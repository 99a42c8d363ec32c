"""The Ray Data engine: a streaming execution makes spans in their order, a router hands them to who owns them now.

    ray.data.from_items(groups) -> map(read, preprocess)  one task and one block a group of spans, in order
    Router                                                walks its output, keeps references, knows how far training is
    RoutedSource                                          a worker's side: asks, and makes a late span itself

A change of world size is a re-route: the execution goes on. The router is disposable: it holds nothing that cannot be
made again, and is started anew at the window that is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import SpanName
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.ray_context import quiet_context
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.data.routing import Routing, smaller_group
from elastic_trainer.vocabulary import NAMESPACE

EXECUTION_GROUPS = 1024  # of one execution: planning takes longer with more, and the next one is ready in a second
AHEAD_WINDOWS = 2  # the one being trained and the next are always let in, whatever their bytes
SKIPPED_GROUPS = 64  # that training is ahead of the execution: to begin anew is quicker than to skip more
STORE_SHARE = 0.25  # of Ray's shared memory that may hold spans; tasks hold as much again while they make them
ASK_S = 20.0  # one question to the router; asked again after it
CPUS_S = 30.0  # for the cluster to hand out CPUs that were counted as free
AGAIN_S = 2.0  # after an execution that failed


@dataclass(frozen=True)
class RouterSpec:
    """What the router and its tasks need. `task` is opened by tasks only."""

    run_name: str
    order: SampleOrder
    train_data: str
    data_options: Mapping[str, Any]
    task: bytes
    import_paths: tuple[str, ...]
    routing: Routing


def router_name(run_name: str) -> str:
    """The actor's name in Ray."""
    return f"router:{run_name}"


class _Progress:
    """How far training is, told by the workers; spans behind it are needless."""

    def __init__(self, logical_ranks: int) -> None:
        self._at = dict.fromkeys(range(logical_ranks), -1)

    def follow(self, logical_ranks: range, window: int) -> None:
        for each in logical_ranks:
            self._at[each] = window

    @property
    def low(self) -> int:
        """The slowest logical rank's window; -1 until all have been heard of."""
        return min(self._at.values())


class _Block(NamedTuple):
    """A group of spans as a task made it: `spans` of them from number `first` on."""

    first: int
    spans: int
    ref: ray.ObjectRef
    size: int

    @property
    def end(self) -> int:
        return self.first + self.spans


class _Held:
    """Blocks that wait for the owners of their spans, in order."""

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque()
        self.size = 0

    @property
    def first(self) -> int | None:
        return self._blocks[0].first if self._blocks else None

    def add(self, block: _Block) -> None:
        self._blocks.append(block)
        self.size += block.size

    def drop_below(self, number: int) -> None:
        while self._blocks and self._blocks[0].end <= number:
            self.size -= self._blocks.popleft().size

    def block_of(self, number: int) -> _Block | None:
        return next((block for block in self._blocks if block.first <= number < block.end), None)


class Router:
    """Async Ray actor, one a run. Windows are counted over all epochs; span = window * L + logical rank."""

    def __init__(self, spec: RouterSpec) -> None:
        # the execution has a thread of its own; Ray warns of every wait in it as if it were in the loop
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        self._spec = spec
        shared = ray.cluster_resources().get("object_store_memory", 0.0)
        self._ahead_bytes = min(spec.routing.ahead_bytes, int(STORE_SHARE * shared))  # nothing is to be spilled
        self._group = spec.routing.group_of(spec.order, self._ahead_bytes)
        self._ranks = spec.order.logical_ranks
        self._progress = _Progress(self._ranks)
        self._held = _Held()
        self._lock = threading.Condition()
        self._next = -1  # the span that the execution delivers next
        self._is_delivering = False
        self._begin_at: int | None = None  # set to make the execution begin anew
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        threading.Thread(target=self._pump, name="pump", daemon=True).start()

    # ---- for workers

    async def follow(self, logical_ranks: range, window: int) -> None:
        """These logical ranks train this window now."""
        with self._lock:
            self._progress.follow(logical_ranks, window)
            if self._progress.low < 0:
                return  # not all ranks have been heard of
            low = self._progress.low * self._ranks
            first = self._next if self._held.first is None else self._held.first
            self._held.drop_below(low)
            has_begun = self._next >= 0 or self._begin_at is not None
            if not has_begun or low < first or low > self._next + SKIPPED_GROUPS * self._group:
                self._begin_at = low
            self._lock.notify_all()

    async def get(self, number: int, at: int, logical_ranks: range) -> tuple[int, int, list[ray.ObjectRef]] | None:
        """The block with a span as soon as it is there, or None when it does not come in time.

        Returns:
            The number of its first span, how many it has, and its reference, in a list that keeps it from being
            resolved on the way. The caller trains window `at` with `logical_ranks`: told again, because a router that
            was started anew knows nothing.
        """
        await self.follow(logical_ranks, at)
        deadline = time.monotonic() + ASK_S
        while time.monotonic() < deadline:
            with self._lock:
                if (block := self._held.block_of(number)) is not None:
                    return block.first, block.spans, [block.ref]
                if not self._is_delivering:
                    return None  # it is only starting, or has no CPU
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
        return None

    async def low(self) -> int:
        """The window that the slowest trains: tasks ask before they begin, for to make spans of it now is too late."""
        with self._lock:
            return self._progress.low

    async def pid(self) -> int:
        """Of this process, for who wants to look at it, or to end it."""
        return os.getpid()

    # ---- the execution

    def _pump(self) -> None:
        with self._lock:
            while self._begin_at is None:
                self._lock.wait()
        while True:
            with self._lock:
                if self._begin_at is not None:
                    self._next, self._begin_at = self._begin_at, None
                    self._held = _Held()
                first, group = self._next, self._group
            try:
                self._execute(first, group)
            except Exception as error:
                _print(f"Ray Data failed, beginning again: {error!r}")
                time.sleep(AGAIN_S)
            self._is_delivering = False
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _execute(self, first: int, group: int) -> None:
        spec = self._spec
        cpus = placement_group([{"CPU": 1.0}] * spec.routing.cpus, strategy="PACK")
        try:
            if not cpus.wait(CPUS_S):
                _print(f"no {spec.routing.cpus} CPUs are free for Ray Data (data.cpus)")
                return
            self._walk(cpus, first, group)
        finally:
            remove_placement_group(cpus)

    def _walk(self, cpus: PlacementGroup, first: int, group: int) -> None:
        """Returns when the execution is through, or is to begin anew; it ends when its iterator is let go of."""
        with quiet_context() as context:
            limits = context.execution_options.resource_limits
            context.execution_options.resource_limits = limits.copy(
                cpu=float(self._spec.routing.cpus), object_store_memory=float(self._ahead_bytes)
            )
            starts = list(range(first, first + EXECUTION_GROUPS * group, group))
            made = ray.data.from_items(starts, override_num_blocks=len(starts)).map_batches(
                _Maker(self._spec, group), batch_size=None, scheduling_strategy=PlacementGroupSchedulingStrategy(cpus)
            )
            entries = (entry for bundle in made.iter_internal_ref_bundles() for entry in bundle.blocks)
            for start, entry in zip(starts, entries, strict=False):
                if not self._deliver(_Block(start, group, entry.ref, entry.metadata.size_bytes or 0)):
                    return

    def _deliver(self, block: _Block) -> bool:
        """Hold a block once there is room; False when the execution is to begin anew."""
        with self._lock:
            while self._begin_at is None and not self._has_room(block):
                self._lock.wait()
            if self._begin_at is not None:
                return False
            if block.end > self._progress.low * self._ranks:
                self._held.add(block)
            self._next, self._is_delivering = block.end, True
            before, self._group = self._group, smaller_group(block.spans, block.size, self._ahead_bytes)
        self._loop.call_soon_threadsafe(self._arrived.set)
        return self._group == before

    def _has_room(self, block: _Block) -> bool:
        is_near = block.first < (max(self._progress.low, 0) + AHEAD_WINDOWS) * self._ranks
        return is_near or self._held.size + block.size <= self._ahead_bytes


def _print(text: str) -> None:
    print(f"router: {text}", file=sys.stderr, flush=True)


_LOADED: dict[bytes, DirectSource] = {}  # by task, in a process that makes spans


class _Maker:
    """Makes a group of spans, in a task of Ray Data: a row each, empty where the span is needless or failed."""

    def __init__(self, spec: RouterSpec, group: int) -> None:
        self._spec = spec
        self._group = group

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (first,) = map(int, batch["item"])
        router = ray.get_actor(router_name(self._spec.run_name), namespace=NAMESPACE)
        low = ray.get(router.low.remote())
        return {"span": [self._span(each, low) for each in range(first, first + self._group)]}

    def _span(self, number: int, low: int) -> bytes:
        order = self._spec.order
        window, logical_rank = divmod(number, order.logical_ranks)
        if window <= low:
            return b""
        try:
            span = self._source().load(SpanName(*divmod(window, order.windows_per_epoch), logical_rank))
            return pickle.dumps(span, protocol=5)
        except Exception:  # the worker makes it itself, and what is raised there is told with its own traceback
            return b""

    def _source(self) -> DirectSource:
        spec = self._spec
        if spec.task not in _LOADED:
            sys.path.extend(path for path in spec.import_paths if path not in sys.path)
            task = cloudpickle.loads(spec.task)()
            reader = DatasetReader(spec.train_data, options=spec.data_options)
            _LOADED[spec.task] = DirectSource(reader, spec.order, task.preprocess)
        return _LOADED[spec.task]


def start_router(spec: RouterSpec) -> None:
    """Start the run's router, or find it."""
    ray.remote(Router).options(
        name=router_name(spec.run_name),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
    ).remote(spec)
