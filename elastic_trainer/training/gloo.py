"""gloo behind `ProcessGroupBackend`, with the abort that gloo lacks.

In torch 2.13 none of gloo's own abort and shutdown calls unblocks a pending collective. What does is shutdown(2) on
the sockets of the group: every pending operation fails within milliseconds, and the descriptors stay gloo's to close.
The sockets are found as those that appeared while the group was formed and whose local or remote port is the listening
port of a member; ports are published through the store, so that other threads' connections are never touched.

Even so one collective in about sixty that is starting just then stays pending until its time-out: gloo does not tell an
operation whose first write meets a connection that has just been closed. So every wait here looks up in between, and a
group with such an operation is not destroyed, which would wait for it, but kept aside until it is through.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch._dynamo
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.device import Device, Host
from elastic_trainer.training.rendezvous import Rendezvous
from elastic_trainer.vocabulary import Token

LISTENS_TIMES = 6  # who is to be connected to waits five of gloo's time-outs for that; nothing interrupts it
LOOK_UP = timedelta(milliseconds=20)  # how late a wait may notice an abort that gloo does not tell it about


class GlooPending:
    """A collective on gloo."""

    def __init__(self, work: dist.Work, tensors: list[torch.Tensor], backend: GlooBackend) -> None:
        self._work = work
        self._tensors = tensors  # an operation that is left behind may still write to them
        self._backend = backend

    def wait(self) -> None:
        """See `Pending.wait`."""
        while True:
            try:
                self._work.wait(LOOK_UP)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # at once: its own error, or none when it has just arrived
                    return
                if self._backend.is_broken:
                    raise CollectiveFailed("the group was aborted") from None

    def wait_on_host(self) -> None:
        """See `Pending.wait_on_host`."""
        self.wait()

    def is_completed(self) -> bool:
        """See `Pending.is_completed`."""
        return self._work.is_completed()


class GlooBackend:
    """One worker's gloo groups, one after the other.

    Args:
        run_name: Separates the runs that might share a store.
        form_s: Bound of a formation.
        collective_s: gloo's own time-out of a collective; only a bound, since faults are told by sockets and orders.
    """

    def __init__(self, run_name: str, form_s: float, collective_s: float) -> None:
        self.device: Device = Host()
        self._rendezvous = Rendezvous(run_name, form_s)
        self._collective_s = collective_s
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, str]] = []
        self.is_broken = False
        self._pending: list[GlooPending] = []
        self._aside: list[tuple[dist.ProcessGroup, list[GlooPending]]] = []

    def form(
        self,
        token: Token,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        is_superseded: Callable[[], bool],
    ) -> None:
        """See `ProcessGroupBackend.form`."""
        self.is_broken = False
        try:
            arrival = self._rendezvous.arrive(token, rank, world_size, store, is_superseded)
            before = _sockets()
            timeout = arrival.left / LISTENS_TIMES
            dist.init_process_group("gloo", store=arrival.store, rank=rank, world_size=world_size, timeout=timeout)
            opened = [(fd, link) for fd, link in _sockets().items() if before.get(fd) != link]
            published = arrival.exchange("ports", ",".join(map(str, _listening_ports(opened))))
        except (RuntimeError, CollectiveFailed) as error:
            self.destroy()
            if not is_superseded():
                self._rendezvous.forget_store()
            raise CollectiveFailed(f"generation {token} could not be formed: {error}") from None
        ports = {int(port) for text in published for port in text.split(",") if port}
        with self._lock:
            self._sockets = [(fd, link) for fd, link in opened if _uses(fd, link, ports)]
        _set_pg_timeout(timedelta(seconds=self._collective_s), dist.group.WORLD)

    def all_reduce(self, tensor: torch.Tensor) -> GlooPending:
        """See `ProcessGroupBackend.all_reduce`."""
        return self._launched(dist.all_reduce(tensor, async_op=True), [tensor])

    def broadcast(self, tensor: torch.Tensor, source: int) -> GlooPending:
        """See `ProcessGroupBackend.broadcast`."""
        return self._launched(dist.broadcast(tensor, source, async_op=True), [tensor])

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor) -> GlooPending:
        """See `ProcessGroupBackend.all_gather`."""
        return self._launched(dist.all_gather(tensors, tensor, async_op=True), [*tensors, tensor])

    def _launched(self, work: dist.Work | None, tensors: list[torch.Tensor]) -> GlooPending:
        assert work is not None
        self._pending = [each for each in self._pending if not each.is_completed()]
        pending = GlooPending(work, tensors, self)
        self._pending.append(pending)
        return pending

    def abort(self) -> None:
        """See `ProcessGroupBackend.abort`."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self.is_broken = True
            for fd, link in sockets:
                with _held(fd, link) as each:
                    if each is not None:
                        _shut_down(each)

    def destroy(self) -> None:
        """See `ProcessGroupBackend.destroy`."""
        with self._lock:
            self._sockets = []
        if dist.is_initialized():
            self._keep_aside()
            dist.destroy_process_group()
        self._aside = [kept for kept in self._aside if not all(pending.is_completed() for pending in kept[1])]

    def _keep_aside(self) -> None:
        left = [pending for pending in self._pending if not pending.is_completed()]
        self._pending = []
        if left:
            assert dist.group.WORLD is not None
            self._aside.append((dist.group.WORLD, left))

    def is_collective_error(self, error: BaseException) -> bool:
        """See `ProcessGroupBackend.is_collective_error`."""
        if isinstance(error, dist.DistError):
            return True
        return type(error) is RuntimeError and ("gloo" in str(error) or self.is_broken)


def _sockets() -> dict[int, str]:
    links = {int(fd): _link(int(fd)) for fd in os.listdir("/proc/self/fd")}
    return {fd: link for fd, link in links.items() if link is not None and link.startswith("socket:")}


def _link(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


@contextmanager
def _held(fd: int, link: str) -> Iterator[socket.socket | None]:
    """A socket of our own on the same connection; None when gloo has closed it, or something else has its number."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        yield None
        return
    if _link(duplicate) != link:
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as each:
        yield each


def _shut_down(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster


def _listening_ports(opened: Iterable[tuple[int, str]]) -> list[int]:
    ports = []
    for fd, link in opened:
        with _held(fd, link) as each:
            if each is not None and each.family in (socket.AF_INET, socket.AF_INET6) and _listens(each):
                ports.append(int(each.getsockname()[1]))
    return ports


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _uses(fd: int, link: str, ports: set[int]) -> bool:
    with _held(fd, link) as each:
        # the listener itself is left alone: gloo ends the process when it is shut down
        if each is None or each.family not in (socket.AF_INET, socket.AF_INET6) or _listens(each):
            return False
        try:
            return bool({each.getsockname()[1], each.getpeername()[1]} & ports)
        except OSError:
            return False  # not connected any more
