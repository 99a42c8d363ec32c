from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.rendezvous import Rendezvous, interface_of
from elastic_trainer.vocabulary import Token


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def never() -> bool:
    return False


def test_ranks_hear_what_each_of_them_says_by_rank(store: dist.TCPStore) -> None:
    heard: dict[int, list[str]] = {}

    def come(rank: int) -> None:
        arrival = Rendezvous("run", 10.0).arrive(Token(1, 1), rank, 3, ("127.0.0.1", store.port), never)
        heard[rank] = arrival.exchange("topic", f"of {rank}")

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard == {rank: ["of 0", "of 1", "of 2"] for rank in range(3)}


def test_who_does_not_come_is_named_within_the_bound(store: dist.TCPStore) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveFailed, match="ranks 0, 2 did not arrive"):
        Rendezvous("run", 0.3).arrive(Token(1, 1), 1, 3, ("127.0.0.1", store.port), never)
    assert time.monotonic() - start < 5.0


def test_what_was_said_in_another_generation_or_run_does_not_count(store: dist.TCPStore) -> None:
    address = ("127.0.0.1", store.port)
    assert Rendezvous("run", 5.0).arrive(Token(1, 1), 0, 1, address, never).exchange("x", "old") == ["old"]
    for name, token in (("run", Token(1, 2)), ("another", Token(1, 1))):
        with pytest.raises(CollectiveFailed, match="ranks 0 did not arrive"):
            Rendezvous(name, 0.2).arrive(token, 1, 2, address, never)


def test_a_newer_order_ends_the_wait(store: dist.TCPStore) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveFailed, match="a newer order came"):
        Rendezvous("run", 60.0).arrive(
            Token(1, 1), 0, 2, ("127.0.0.1", store.port), lambda: time.monotonic() - start > 0.1
        )
    assert time.monotonic() - start < 5.0


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.255") is None
