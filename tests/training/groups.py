"""Some ranks of a plain gloo group in processes of their own, for tests of what collectives do."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.training.groups", "torch", "torch._dynamo", "elastic_trainer.training.run"])


def backend() -> Any:
    """A backend on the group that a rank of `on_ranks` has."""
    from elastic_trainer.training.gloo import GlooBackend

    return GlooBackend("test", form_s=20.0, collective_s=60.0)


def on_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, world_size, *arguments)` on each rank of a group; the results by rank."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe() for _ in range(world_size)]
    processes = [
        CONTEXT.Process(target=_main, args=(pipes[rank][1], rank, world_size, store.port, work, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for rank, (here, _) in enumerate(pipes):
            assert here.poll(60), f"rank {rank} did not answer"
            kind, value = here.recv()
            assert kind == "result", value
            results.append(value)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _main(pipe: Any, rank: int, world_size: int, port: int, work: Callable[..., Any], arguments: Any) -> None:
    import torch
    import torch._dynamo
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        pipe.send(("result", work(rank, world_size, *arguments)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
