"""What workers print: read from Ray's own files on their node while they live, kept in the run's folder afterwards."""

from __future__ import annotations

import glob
import os
import signal
import time
from collections.abc import Callable

import ray

from elastic_trainer.cluster.processes import ProcessId, kill_all
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import Worker

KEPT_BYTES = 256 << 10  # of each stream of a worker that is gone: its last words
READ_BYTES = 1 << 20  # of one answer
FOLDER = "logs"
STACKS = signal.SIGUSR2  # a worker answers it with the stacks of its threads, whatever holds its interpreter
STACKS_S = 0.1  # until they are written


def log_since(pid: int, since: dict[str, int]) -> dict[str, str]:
    """The text of a process's streams (`out`, `err`) from these byte offsets on."""
    return {stream: _read(path, since.get(stream, 0), READ_BYTES) for stream, path in _files(pid).items()}


def stacks_of(process: ProcessId) -> str:
    """What the threads of a worker's process are doing, by its own word; a process that is stopped says nothing."""
    before = {stream: os.path.getsize(path) for stream, path in _files(process.pid).items()}
    kill_all([process], STACKS)
    time.sleep(STACKS_S)
    return log_since(process.pid, before).get("err", "").strip()


def keep_log(open_store: Callable[[], ObjectStore], pid: int, worker: Worker) -> None:
    """Copy the last words of a worker that is gone into the run's folder, if the store lets us."""
    text = ""
    for stream, path in _files(pid).items():
        start = max(0, os.path.getsize(path) - KEPT_BYTES)
        if said := _read(path, start, KEPT_BYTES):
            text += f"--- std{stream} of process {pid} on {ray.util.get_node_ip_address()}\n{said}"
    if not text:
        return
    try:
        open_store().put(f"{FOLDER}/{worker}.{pid}.txt", text.encode())
    except ElasticTrainerError:
        return  # what was printed is a help, never a reason to hold anything up


def _files(pid: int) -> dict[str, str]:
    folder = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs")
    found = {}
    for stream in ("out", "err"):
        for path in glob.glob(os.path.join(glob.escape(folder), f"worker-*-{pid}.{stream}")):
            found[stream] = path
    return found


def _read(path: str, start: int, most: int) -> str:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(most).decode(errors="replace")
