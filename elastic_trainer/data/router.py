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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_trainer.data.dataset import DatasetReader
from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import Span, SpanName
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.ray_context import quiet_context
from elastic_trainer.data.routing import Routing
from elastic_trainer.vocabulary import NAMESPACE

EXECUTION_GROUPS = 1024  # of one execution: planning takes longer with more, and the next one is ready in a second
AHEAD_WINDOWS = 2  # the one being trained and the next are always let in, whatever their bytes
SKIPPED_GROUPS = 64  # that training is ahead of the execution: to begin anew is quicker than to skip more
STORE_SHARE = 0.25  # of Ray's shared memory that may hold spans; tasks hold as much again while they make them
LATE_S = 0.25  # training waits so long for Ray Data before a worker makes the span itself
TELL_S = 10.0  # Ray Data must be late, or in time again, for so long before it is worth a word
FETCH_S = 10.0  # for the bytes of a group to come from another node
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


@dataclass
class _Held:
    """Groups of spans that wait for their owners, by number."""

    refs: dict[int, ray.ObjectRef] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def drop_below(self, number: int) -> None:
        for each in [each for each in self.refs if each < number]:
            del self.refs[each], self.sizes[each]


class Router:
    """Async Ray actor, one a run. Windows are counted over all epochs; span = window * L + logical rank."""

    def __init__(self, spec: RouterSpec) -> None:
        # the execution has a thread of its own; Ray warns of every wait in it as if it were in the loop
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        self._spec = spec
        self._group = spec.routing.group_of(spec.order)
        shared = ray.cluster_resources().get("object_store_memory", 0.0)
        self._ahead_bytes = min(spec.routing.ahead_bytes, int(STORE_SHARE * shared))  # nothing is to be spilled
        self._ranks = spec.order.logical_ranks
        self._progress = _Progress(self._ranks)
        self._held = _Held()
        self._lock = threading.Condition()
        self._next = -1  # the group that the execution delivers next
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
            low = self._progress.low * self._ranks // self._group
            first = min(self._held.refs, default=self._next)
            self._held.drop_below(low)
            has_begun = self._next >= 0 or self._begin_at is not None
            if not has_begun or low < first or low > self._next + SKIPPED_GROUPS:
                self._begin_at = low
            self._lock.notify_all()

    async def get(self, number: int, at: int, logical_ranks: range) -> list[ray.ObjectRef]:
        """A group of spans, in a list, as soon as it is there; an empty list when it does not come in time.

        The list keeps the reference from being resolved on the way. The caller trains window `at` with `logical_ranks`:
        told again, because a router that was started anew knows nothing.
        """
        await self.follow(logical_ranks, at)
        deadline = time.monotonic() + ASK_S
        while time.monotonic() < deadline:
            with self._lock:
                if number in self._held.refs:
                    return [self._held.refs[number]]
                if not self._is_delivering:
                    return []  # it is only starting, or has no CPU
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
        return []

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
            try:
                self._execute(self._next)
            except Exception as error:
                _print(f"Ray Data failed, beginning again: {error!r}")
                time.sleep(AGAIN_S)
            self._is_delivering = False
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _execute(self, first: int) -> None:
        spec = self._spec
        cpus = placement_group([{"CPU": 1.0}] * spec.routing.cpus, strategy="PACK")
        try:
            if not cpus.wait(CPUS_S):
                print(
                    f"router: no {spec.routing.cpus} CPUs are free for Ray Data (data.cpus)",
                    file=sys.stderr,
                    flush=True,
                )
                return
            with quiet_context() as context:
                limits = context.execution_options.resource_limits
                context.execution_options.resource_limits = limits.copy(
                    cpu=float(spec.routing.cpus), object_store_memory=float(self._ahead_bytes)
                )
                numbers = list(range(first, first + EXECUTION_GROUPS))
                made = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
                    _Maker(spec), batch_size=None, scheduling_strategy=PlacementGroupSchedulingStrategy(cpus)
                )
                number = first
                for bundle in made.iter_internal_ref_bundles():
                    for entry in bundle.blocks:
                        if not self._deliver(number, entry.ref, entry.metadata.size_bytes or 0):
                            return
                        number += 1
        finally:
            remove_placement_group(cpus)

    def _deliver(self, number: int, ref: ray.ObjectRef, size: int) -> bool:
        """Hold a span once there is room; False when the execution is to begin anew."""
        with self._lock:
            while self._begin_at is None and not self._has_room(number, size):
                self._lock.wait()
            if self._begin_at is not None:
                return False
            if (number + 1) * self._group > self._progress.low * self._ranks:
                self._held.refs[number], self._held.sizes[number] = ref, size
            self._next, self._is_delivering = number + 1, True
        self._loop.call_soon_threadsafe(self._arrived.set)
        return True

    def _has_room(self, number: int, size: int) -> bool:
        is_near = number * self._group < (max(self._progress.low, 0) + AHEAD_WINDOWS) * self._ranks
        return is_near or self._held.size + size <= self._ahead_bytes


def _print(text: str) -> None:
    print(f"router: {text}", file=sys.stderr, flush=True)


_LOADED: dict[bytes, DirectSource] = {}  # by task, in a process that makes spans


class _Maker:
    """Makes a group of spans, in a task of Ray Data: a row each, empty where the span is needless or failed."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (number,) = batch["item"]
        group = self._spec.routing.group_of(self._spec.order)
        first = int(number) * group
        router = ray.get_actor(router_name(self._spec.run_name), namespace=NAMESPACE)
        low = ray.get(router.low.remote())
        return {"span": [self._span(each, low) for each in range(first, first + group)]}

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


# ---- a worker's side


class RoutedSource:
    """Takes spans from the run's router; makes one directly when it is late.

    Args:
        run_name: Whose router.
        order: Of the samples.
        routing: Of the run.
        direct: Makes spans here.
        note: Takes words for people.
    """

    threads = 4  # most of them wait

    def __init__(
        self,
        run_name: str,
        order: SampleOrder,
        routing: Routing,
        direct: DirectSource,
        note: Callable[[str], None],
    ) -> None:
        self._name = router_name(run_name)
        self._order = order
        self._group = routing.group_of(order)
        self._direct = direct
        self._router: Any = None
        self._lock = threading.Lock()
        self._blocks: dict[int, Future[Any]] = {}  # of groups that were asked for
        self._hurried: dict[int, float] = {}  # windows that training waits for, and since when
        self._followed: tuple[int, range] = (-1, range(0))  # the window that is trained, and by which logical ranks
        self._came_at = time.monotonic()  # to that window
        self._window_s = LATE_S  # how long training one takes
        self._is_closed = False
        self._punctuality = _Punctuality(note)

    def load(self, name: SpanName) -> Span:
        """The span from the router, or made here when it is late."""
        span = self._routed(name)
        self._punctuality.saw(is_late=span is None)
        return self._direct.load(name) if span is None else span

    def hurry(self, name: SpanName) -> None:
        """From now on the window's spans are late soon."""
        self._hurried.setdefault(self._window(name), time.monotonic())

    def follow(self, epoch: int, window: int, logical_ranks: range) -> None:
        """Tell the router how far training is, once a window."""
        at, before = epoch * self._order.windows_per_epoch + window, self._followed
        if (at, logical_ranks) == before:
            return
        now = time.monotonic()
        if at == before[0] + 1:
            self._window_s = now - self._came_at
        self._came_at, self._followed = now, (at, logical_ranks)
        self._hurried = {each: since for each, since in self._hurried.items() if each >= at}
        with self._lock:
            low = at * self._order.logical_ranks // self._group
            self._blocks = {number: block for number, block in self._blocks.items() if number >= low}
        try:
            self._ask().follow.remote(logical_ranks, at)
        except (ValueError, RayError):
            pass  # it is gone, or not there yet; a question for spans tells it too

    def close(self) -> None:
        """Let go of those who wait."""
        self._is_closed = True

    def _window(self, name: SpanName) -> int:
        return name.epoch * self._order.windows_per_epoch + name.window

    def _ask(self) -> Any:
        if self._router is None:
            self._router = ray.get_actor(self._name, namespace=NAMESPACE)
        return self._router

    def _routed(self, name: SpanName) -> Span | None:
        number, place = divmod(self._window(name) * self._order.logical_ranks + name.logical_rank, self._group)
        since = time.monotonic()
        with self._lock:
            block, is_first = self._blocks.get(number), number not in self._blocks
            if block is None:
                block = self._blocks[number] = Future()
        if is_first:
            block.set_result(self._fetched(number, name, since))
        while not wait([block], 0.05).done:
            if self._is_overdue(name, since):
                return None
        table = block.result()
        if table is None:
            with self._lock:
                if self._blocks.get(number) is block:
                    del self._blocks[number]  # it may come yet, for others
            return None
        content = table.column("span")[place].as_buffer()
        return pickle.loads(content) if content.size else None

    def _fetched(self, number: int, name: SpanName, since: float) -> Any:
        try:
            asked = self._ask().get.remote(number, *self._followed)
            while not ray.wait([asked], timeout=0.05)[0]:
                if self._is_overdue(name, since):
                    return None
            found = ray.get(asked)
            return ray.get(found[0], timeout=FETCH_S) if found else None
        except (ValueError, RayError):
            self._router = None
            return None

    def _is_overdue(self, name: SpanName, asked_at: float) -> bool:
        now = time.monotonic()
        if self._is_closed:
            return True
        if self._punctuality.is_late and now - asked_at > self._window_s / 2:
            return True  # whoever was late is not waited for until training stands still
        hurried_at = self._hurried.get(self._window(name))
        return hurried_at is not None and now - hurried_at > LATE_S


class _Punctuality:
    """Whether Ray Data keeps up; tells people when that has changed for long."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.is_late = True  # until the first span has come
        self._told_late = False
        self._since = time.monotonic()

    def saw(self, *, is_late: bool) -> None:
        now = time.monotonic()
        if is_late != self.is_late:
            self.is_late, self._since = is_late, now
        elif is_late != self._told_late and now - self._since > TELL_S:
            self._told_late = is_late
            self._note(
                "Ray Data is late: the workers read and preprocess meanwhile" if is_late else "Ray Data keeps up again"
            )


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
