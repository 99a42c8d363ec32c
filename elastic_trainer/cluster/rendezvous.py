"""The rendezvous store: a `TCPStore` server in a process that holds no rank, on a port that it binds itself."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta

import ray
from ray.actor import ActorHandle

from elastic_trainer.cluster import placement
from elastic_trainer.vocabulary import NAMESPACE

IDLE_S = 3600  # of one store operation on the server's own client, which is hardly used


class RendezvousStore:
    """Async Ray actor that hosts the store for the life of its process; ends when no controller touched it for long.

    Args:
        orphan_s: How long.
    """

    def __init__(self, orphan_s: float) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=IDLE_S)
        )
        self._orphan_s = orphan_s
        self._touched_at = time.monotonic()
        self._watching = asyncio.ensure_future(self._end_when_orphaned())

    async def touch(self) -> tuple[str, int]:
        """A controller lives; returns host and port that workers connect to."""
        self._touched_at = time.monotonic()
        return ray.util.get_node_ip_address(), self._store.port

    async def ended(self) -> None:
        """The controller's tripwire: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()

    async def _end_when_orphaned(self) -> None:
        while time.monotonic() - self._touched_at < self._orphan_s:
            await asyncio.sleep(self._orphan_s / 10)
        os._exit(0)


def make_store(run_name: str, number: int, orphan_s: float) -> ActorHandle:
    """Start the run's `number`-th store, beside the controller: one host less whose loss matters."""
    handle: ActorHandle = (
        ray.remote(RendezvousStore)
        .options(
            name=f"store:{run_name}:{number}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            max_concurrency=100,
            resources=placement.on_head(),
        )
        .remote(orphan_s)
    )
    return handle
