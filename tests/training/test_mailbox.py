from __future__ import annotations

import threading
import time

import pytest

from elastic_trainer.control.effects import (
    AbortGeneration,
    EndRun,
    FormGeneration,
    ParkGeneration,
    RunTaskAgain,
    StopGeneration,
)
from elastic_trainer.training.mailbox import Mailbox
from elastic_trainer.vocabulary import RunStatus, Token, Worker

W = Worker(0, 0)


def form(generation: int) -> FormGeneration:
    return FormGeneration(Token(1, generation), (W,), ("10.0.0.1", 1), False, "why")


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(lambda event: None, lambda line: None)


def test_the_newest_order_to_form_supersedes_older_ones(mailbox: Mailbox) -> None:
    mailbox.put(form(1))
    mailbox.put(form(2))

    assert mailbox.is_superseded(Token(1, 1))
    assert not mailbox.is_superseded(Token(1, 2))
    assert mailbox.take(0) == form(2)
    assert mailbox.take(0) is None


def test_an_abort_acts_at_once_and_covers_older_generations_only(mailbox: Mailbox) -> None:
    aborted = []
    mailbox.on_abort(lambda: aborted.append(True))

    mailbox.put(AbortGeneration(Token(1, 3), (W,), "a peer died"))

    assert aborted == [True]
    assert mailbox.is_aborted(Token(1, 2))
    assert mailbox.is_aborted(Token(1, 3))
    assert not mailbox.is_aborted(Token(1, 4))
    assert mailbox.abort_reason == "a peer died"


def test_an_order_of_an_older_term_changes_nothing(mailbox: Mailbox) -> None:
    mailbox.put(ParkGeneration(Token(1, 9), (W,), ""))
    mailbox.put(StopGeneration(Token(1, 9), (W,), ""))

    assert not mailbox.wants_park(Token(2, 1))
    assert not mailbox.wants_stop(Token(2, 1))
    assert mailbox.wants_park(Token(1, 9))


def test_the_end_stays_and_stands_above_everything(mailbox: Mailbox) -> None:
    end = EndRun(RunStatus.STOPPED, "")
    mailbox.put(end)
    mailbox.put(form(5))
    mailbox.put(RunTaskAgain(W, ""))

    assert mailbox.take(0) == end
    assert mailbox.take(0) == end
    assert mailbox.is_aborted(Token(1, 99))


def test_waiting_ends_with_the_order(mailbox: Mailbox) -> None:
    threading.Timer(0.05, mailbox.put, (AbortGeneration(Token(1, 1), (W,), ""),)).start()
    start = time.monotonic()

    mailbox.await_verdict(Token(1, 1))

    assert time.monotonic() - start < 5.0
