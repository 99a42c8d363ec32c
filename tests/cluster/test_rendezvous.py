"""The rendezvous store's process."""

from __future__ import annotations

import asyncio

import torch.distributed as dist

from elastic_trainer.cluster.rendezvous import RendezvousStore


def test_stores_of_one_machine_take_ports_that_are_free_and_tell_which() -> None:
    """As in ray#35907 and pytorch#126510: nobody chooses a port that another may have taken before it is bound."""

    async def start() -> list[int]:
        stores = [RendezvousStore(orphan_s=60.0) for _ in range(3)]
        ports = [(await store.touch())[1] for store in stores]
        for port in ports:
            client = dist.TCPStore("127.0.0.1", port, is_master=False)
            client.set("port", str(port))
        clients = [dist.TCPStore("127.0.0.1", port, is_master=False) for port in ports]
        return [int(client.get("port")) - port for client, port in zip(clients, ports, strict=True)]

    assert asyncio.run(start()) == [0, 0, 0]
