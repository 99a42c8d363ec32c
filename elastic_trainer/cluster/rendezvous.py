"""The rendezvous store: a `TCPStore` server in a process that holds no rank, on a port that it binds itself."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import ray
from ray.actor import ActorHandle

IDLE_S = 3600  # of one store operation on the server's own client, which is hardly used


class RendezvousStore:
    """Async Ray actor that hosts the store for the life of its process."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=IDLE_S)
        )

    async def address(self) -> tuple[str, int]:
        """Host and port that workers connect to."""
        return ray.util.get_node_ip_address(), self._store.port

    async def ended(self) -> None:
        """The controller's tripwire: never answers, fails at once when this process dies."""
        await asyncio.Event().wait()


def make_store(run_name: str, number: int) -> ActorHandle:
    """Start the run's `number`-th store."""
    handle: ActorHandle = (
        ray.remote(RendezvousStore)
        .options(
            name=f"store:{run_name}:{number}", lifetime="detached", num_cpus=0, max_restarts=0, max_concurrency=100
        )
        .remote()
    )
    return handle
