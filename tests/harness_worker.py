"""The worker side of `harness.py`: what `cluster/worker.py` is to Ray, for a pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from elastic_trainer.training.entry import work
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.training.mailbox import Mailbox
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Worker

RESULT: dict[str, Any] = {}  # what a task leaves here goes back to the test


Backend = Callable[[Worker, TrainSettings], ProcessGroupBackend]


def gloo(worker: Worker, settings: TrainSettings) -> ProcessGroupBackend:
    """What workers without a GPU have."""
    return GlooBackend("test", settings.form_s, settings.collective_s)


def main(
    pipe: Connection, task: Callable[[], Any], worker: Worker, settings: TrainSettings, backend: Backend = gloo
) -> None:
    """Live as a worker."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            pipe.send(message)

    mailbox = Mailbox(send, send)

    def listen() -> None:
        while True:
            try:
                mailbox.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    work(task, worker, settings, mailbox, backend(worker, settings))
    send(("result", RESULT))
