"""One replica group of a torchft 0.2.0 session for `recovery.py`; runs in an environment that has torchft.

Its own hook for DDP raises AssertionError in every survivor when a peer dies (as installed, gloo); the hook here does
what it is meant to do, so that the figures are of its protocol.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).parents[2]))
from jobs.benchmarks.marks import Marks
from jobs.benchmarks.small_gpt import SmallGPT, fill_up, loss_of, tokens_of


def reduce_bucket(manager, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
    """The manager notes a failure itself and lets the step be discarded."""
    tensor = bucket.buffer()
    manager.allreduce(tensor).wait()
    future: Any = torch.futures.Future()
    future.set_result(tensor)
    return future


def main(folder: str, number: int, lighthouse: str, settings: dict[str, Any], address: str = "127.0.0.1") -> None:
    """Train in `folder` until killed; `address` is this host's."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = SmallGPT()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    optimizer: Any = None

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def times(values: dict[str, float]) -> dict[str, timedelta]:
        return {name: timedelta(seconds=value) for name, value in values.items()}

    manager = Manager(
        pg=ProcessGroupGloo(**times(settings["group"])),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"group{number}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname=address,
        **times(settings["manager"]),
    )
    DistributedDataParallel._comm_hook = staticmethod(reduce_bucket)
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    marks = Marks(folder)
    batches = 0
    while True:
        began = time.monotonic()
        optimizer.zero_grad()  # begins the quorum
        loss_of(ddp, tokens_of(4, batches * 3 + number)).backward()
        fill_up(began)
        before = manager.current_step()
        optimizer.step()
        batches += 1
        if manager.current_step() > before:
            marks.done(manager.current_step(), number, manager.num_participants(), model)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), *sys.argv[5:])
