"""How the processes of a generation find each other: a store, arrival there, and the interface they talk over."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.vocabulary import Token

POLL_S = 0.001  # peers of one generation are ordered within some milliseconds of each other


class Rendezvous:
    """One worker's way to its peers, over one store connection for life.

    Args:
        run_name: Separates the runs that might share a store.
        form_s: Bound of a formation.
    """

    def __init__(self, run_name: str, form_s: float) -> None:
        self._run_name = run_name
        self._form_s = form_s
        self._store: dist.TCPStore | None = None
        self._address: tuple[str, int] | None = None

    def arrive(
        self,
        token: Token,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        is_superseded: Callable[[], bool],
    ) -> Arrival:
        """Say that this rank is there, and wait until all are: what forms a group cannot be interrupted.

        Raises:
            CollectiveFailed: Not all came in time, or a newer order did.
            RuntimeError: The store does not answer.
        """
        deadline = time.monotonic() + self._form_s
        # once for life: a connection can take seconds, when the server looks the name of the address up
        if self._store is None or self._address != store:
            self._store = dist.TCPStore(
                store[0], store[1], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self._form_s)
            )
            self._address = store
        prefix = dist.PrefixStore(f"{self._run_name}/{token}", self._store)
        arrival = Arrival(prefix, rank, world_size, deadline, is_superseded)
        arrival.exchange("here", "")
        return arrival

    def forget_store(self) -> None:
        """A formation failed, and it may be the connection to the store that is broken."""
        self._store = None


class Arrival:
    """All ranks of a generation are there.

    Attributes:
        store: For keys of this generation alone.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, deadline: float, is_superseded: Callable[[], bool]
    ) -> None:
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = deadline
        self._is_superseded = is_superseded

    @property
    def left(self) -> timedelta:
        """Of the bound, at least a second."""
        return timedelta(seconds=max(1.0, self._deadline - time.monotonic()))

    def exchange(self, topic: str, mine: str) -> list[str]:
        """What every rank says about a topic, by rank.

        Raises:
            CollectiveFailed: Not all said it in time, or a newer order came.
        """
        self.store.set(f"{topic}/{self._rank}", mine)
        keys = [f"{topic}/{rank}" for rank in range(self._world_size)]
        while not self.store.check(keys):
            self._raise_if_superseded()
            if time.monotonic() > self._deadline:
                missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                raise CollectiveFailed(f"ranks {', '.join(missing)} did not arrive")
            time.sleep(POLL_S)
        self._raise_if_superseded()
        return [said.decode() for said in self.store.multi_get(keys)]

    def _raise_if_superseded(self) -> None:
        if self._is_superseded():
            raise CollectiveFailed("a newer order came while waiting for peers")


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; None: none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
