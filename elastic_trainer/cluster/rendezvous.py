"""The rendezvous store: a `TCPStore` server in a process that holds no rank, on a port that it binds itself."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

IDLE_S = 3600  # of one store operation on the server's own client, which is hardly used


class RendezvousStore:
    """Async Ray actor that hosts the store for the life of its process, which ends with the controller's."""

    def __init__(self, controller: ActorHandle) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=IDLE_S)
        )
        self._watching = asyncio.ensure_future(self._end_with(controller))

    async def _end_with(self, controller: ActorHandle) -> None:
        try:
            await controller.ended.remote()
        except RayActorError:
            os._exit(0)

    async def address(self) -> tuple[str, int]:
        """Host and port that workers connect to."""
        return ray.util.get_node_ip_address(), self._store.port

    async def ended(self) -> None:
        """The controller's tripwire: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()


def make_store(run_name: str, number: int, controller: ActorHandle) -> ActorHandle:
    """Start the run's `number`-th store."""
    handle: ActorHandle = (
        ray.remote(RendezvousStore)
        .options(
            name=f"store:{run_name}:{number}", lifetime="detached", num_cpus=0, max_restarts=0, max_concurrency=100
        )
        .remote(controller)
    )
    return handle
