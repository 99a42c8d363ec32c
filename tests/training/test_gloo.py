"""gloo's groups with our abort: nobody waits, nothing else is touched, nothing is left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.vocabulary import Token
from jobs.rig import Rig, why_not
from tests.rotation import turn
from tests.training.groups import CONTEXT


def never() -> bool:
    return False


class Ranks:
    """Processes that each have a backend and do what they are told over a pipe."""

    def __init__(self, count: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for _ in range(count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=rank_main, args=(there, self.store.port), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def tell(self, rank: int, *words: Any) -> None:
        self.pipes[rank].send(words)

    def hear(self, rank: int, within_s: float = 30.0) -> Any:
        assert self.pipes[rank].poll(within_s), f"rank {rank} is silent"
        return self.pipes[rank].recv()

    def all(self, *words: Any) -> list[Any]:
        for rank in range(len(self.pipes)):
            self.tell(rank, *words)
        return [self.hear(rank) for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def ranks() -> Any:
    made = Ranks(3)
    yield made
    made.close()


def rank_main(pipe: Any, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    backend = GlooBackend("test", form_s=5.0, collective_s=2.0)
    # a connection that has nothing to do with the group and is opened around its formation
    mine, theirs = socket.socketpair()
    work: threading.Thread | None = None

    def reduce_for_ever() -> None:
        start = time.monotonic()
        try:
            while True:
                backend.all_reduce(torch.ones(1000)).wait()
        except (RuntimeError, CollectiveFailed) as error:
            pipe.send(
                (isinstance(error, CollectiveFailed) or backend.is_collective_error(error), time.monotonic() - start)
            )

    while True:
        order, *values = pipe.recv()
        if order == "form":
            generation, rank, world = values
            try:
                backend.form(Token(1, generation), rank, world, ("127.0.0.1", port), never)
                pipe.send("formed")
            except CollectiveFailed as error:
                pipe.send(str(error))
        elif order == "loop":
            work = threading.Thread(target=reduce_for_ever)
            work.start()
            pipe.send("started")
        elif order == "abort":
            backend.abort()
        elif order == "destroy":
            if work is not None:
                work.join()
            backend.destroy()
            mine.send(b"x")
            pipe.send((theirs.recv(1) == b"x", len(os.listdir("/proc/self/fd"))))


def form(ranks: Ranks, generation: int, members: list[int]) -> None:
    for rank, member in enumerate(members):
        ranks.tell(member, "form", generation, rank, len(members))
    assert [ranks.hear(member) for member in members] == ["formed"] * len(members)


def test_an_abort_frees_a_rank_whose_peer_is_stopped_though_gloo_would_wait_for_minutes(ranks: Ranks) -> None:
    form(ranks, 1, [0, 1, 2])
    ranks.all("loop")
    os.kill(ranks.processes[1].pid, 19)  # SIGSTOP: no socket tells anything
    time.sleep(0.3)

    for member in (0, 2):
        ranks.tell(member, "abort")
    for member in (0, 2):
        is_collective_error, seconds = ranks.hear(member, 5.0)
        assert is_collective_error
        assert seconds < 5.0
        ranks.tell(member, "destroy")
        assert ranks.hear(member)[0], "the abort shut a foreign socket down"
    form(ranks, 2, [0, 2])


def test_descriptors_of_generations_come_back(ranks: Ranks) -> None:
    """A group with an operation that gloo leaves pending is kept aside until its time-out, here 2 s, and not longer."""
    form(ranks, 1, [0, 1, 2])
    before = [answer[1] for answer in ranks.all("destroy")]
    for generation in range(2, 31):
        form(ranks, generation, [0, 1, 2])
        ranks.all("loop")
        for member in range(3):
            ranks.tell(member, "abort")
        assert all(ranks.hear(member)[0] for member in range(3))
        ranks.all("destroy")

    deadline = time.monotonic() + 30
    after = None
    while after != before:
        assert time.monotonic() < deadline, (before, after)
        generation += 1
        form(ranks, generation, [0, 1, 2])
        after = [answer[1] for answer in ranks.all("destroy")]


def test_a_peer_that_never_comes_is_named_within_the_bound(ranks: Ranks) -> None:
    ranks.tell(0, "form", 1, 0, 2)

    start = time.monotonic()
    assert "ranks 1 did not arrive" in ranks.hear(0)
    assert time.monotonic() - start < 8.0


FORM = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.vocabulary import Token
backend = GlooBackend("test", form_s={form_s}, collective_s=600.0)
try:
    backend.form(Token(1, 1), int(sys.argv[1]), 2, ("{store}", 5555), lambda: False)
except CollectiveFailed:
    sys.exit(3)
"""
STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", 5555, is_master=True, wait_for_workers=False)
print("up", flush=True)
time.sleep(200)
"""


@turn(4, 9)
def test_hosts_that_cannot_reach_each_other_give_a_formation_up_within_its_bound() -> None:
    """Both reach the store; who is to be connected to hears nothing at all, and gloo waits five time-outs for that."""
    if refused := why_not():
        pytest.skip(refused)
    form_s = 6.0
    rig = Rig(2)
    try:
        for host in rig.hosts:
            host.switch_on()
        store = rig.hosts[0].start([sys.executable, "-c", STORE], stdout=subprocess.PIPE)
        assert store.stdout is not None
        assert store.stdout.readline() == b"up\n"
        code = FORM.format(form_s=form_s, store=rig.hosts[0].address)
        for host in rig.hosts[1:]:
            host.isolate()
        ranks = [host.start([sys.executable, "-c", code, str(rank)]) for rank, host in enumerate(rig.hosts[1:])]
        began = time.monotonic()
        assert [rank.wait(60) for rank in ranks] == [3, 3]
        assert time.monotonic() - began < form_s + 12  # to start an interpreter with torch takes seconds
    finally:
        rig.close()
    store.stdout.close()
    store.wait(10)


def test_a_newer_order_ends_the_wait_for_peers() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = GlooBackend("test", form_s=60.0, collective_s=600.0)
    start = time.monotonic()

    with pytest.raises(CollectiveFailed, match="a newer order came"):
        backend.form(Token(1, 1), 0, 2, ("127.0.0.1", store.port), lambda: time.monotonic() - start > 0.1)
    assert time.monotonic() - start < 5.0


def test_a_users_error_is_not_taken_for_a_collectives() -> None:
    backend = GlooBackend("test", form_s=5.0, collective_s=600.0)

    assert not backend.is_collective_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not backend.is_collective_error(ValueError("gloo"))
    assert backend.is_collective_error(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] x"))


def test_a_broken_connection_to_the_store_is_made_again() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = GlooBackend("run", 5.0, 30.0)
    backend.form(Token(1, 1), 0, 1, ("127.0.0.1", store.port), never)
    backend.destroy()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as each:
            peer = each.getpeername()
            if (
                isinstance(peer, tuple) and peer[1] == store.port
            ):  # this side's end: as when something between forgets it
                each.shutdown(socket.SHUT_RDWR)

    with pytest.raises(CollectiveFailed):
        backend.form(Token(1, 2), 0, 1, ("127.0.0.1", store.port), never)
    backend.form(Token(1, 3), 0, 1, ("127.0.0.1", store.port), never)
    backend.destroy()
