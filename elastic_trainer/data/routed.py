"""A worker's side of the Ray Data engine: asks the run's router for spans, and makes a late one itself."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_trainer.data.direct import DirectSource
from elastic_trainer.data.engine import Span, SpanName
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.router import router_name
from elastic_trainer.vocabulary import NAMESPACE

LATE_S = 0.25  # training waits so long for Ray Data before a worker makes the span itself
ANSWER_S = 0.05  # for the answer of a router that was late so far: what it holds comes in some 10 ms
TELL_S = 10.0  # Ray Data must be late, or in time again, for so long before it is worth a word
FETCH_S = 10.0  # for the bytes of a group to come from another node


class RoutedSource:
    """Takes spans from the run's router; makes one directly when it is late.

    Args:
        run_name: Whose router.
        order: Of the samples.
        direct: Makes spans here.
        note: Takes words for people.
    """

    threads = 4  # most of them wait

    def __init__(
        self,
        run_name: str,
        order: SampleOrder,
        direct: DirectSource,
        note: Callable[[str], None],
    ) -> None:
        self._name = router_name(run_name)
        self._order = order
        self._direct = direct
        self._router: Any = None
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[int, Any]] = {}  # by first span: how many, and what they are
        self._hurried: dict[int, float] = {}  # windows that training waits for, and since when
        self._followed: tuple[int, range] = (-1, range(0))  # the window that is trained, and by which logical ranks
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
        at = epoch * self._order.windows_per_epoch + window
        if (at, logical_ranks) == self._followed:
            return
        self._followed = (at, logical_ranks)
        self._hurried = {each: since for each, since in self._hurried.items() if each >= at}
        with self._lock:
            low = at * self._order.logical_ranks
            self._blocks = {first: block for first, block in self._blocks.items() if first + block[0] > low}
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
        number = self._window(name) * self._order.logical_ranks + name.logical_rank
        content = self._kept(number)
        if content is None:
            content = self._fetched(number, name)
        return pickle.loads(content) if content else None

    def _kept(self, number: int) -> memoryview | None:
        with self._lock:
            for first, (count, table) in self._blocks.items():
                if first <= number < first + count:
                    return memoryview(table.column("span")[number - first].as_buffer())
        return None

    def _fetched(self, number: int, name: SpanName) -> memoryview | None:
        since = time.monotonic()
        try:
            asked = self._ask().get.remote(number, *self._followed)
            while not ray.wait([asked], timeout=0.05)[0]:
                if self._is_overdue(name, since):
                    return None
            if (found := ray.get(asked)) is None:
                return None
            first, count, (ref,) = found
            table = ray.get(ref, timeout=FETCH_S)
        except (ValueError, RayError):
            self._router = None
            return None
        with self._lock:
            self._blocks[first] = count, table
        return self._kept(number)

    def _is_overdue(self, name: SpanName, asked_at: float) -> bool:
        now = time.monotonic()
        if self._is_closed:
            return True
        if self._punctuality.is_late and now - asked_at > ANSWER_S:
            return True
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
