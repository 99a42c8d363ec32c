"""The process that owns a local Ray cluster: it starts the raylets and outlives nothing that started it.

Run as `python -m elastic_trainer.cluster.cluster_process` by `local.py`. Two facts make leftovers impossible:
its standard input is a pipe whose other end only the owner holds, so a SIGKILL of the owner is read here as end of
file; and it is a child subreaper, so whatever Ray or a worker forks stays among its descendants, whoever dies between.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from types import FrameType

from ray.cluster_utils import Cluster

from elastic_trainer.cluster.processes import descendants, kill_all

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Read one line of settings from standard input, start, answer with one line, end when the input ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the owner, which decides what ends and when
    settings = json.loads(sys.stdin.readline() or "null")
    try:
        if settings is None:
            return
        answer = _start(settings)
        _answer(answer)
        while sys.stdin.readline():
            pass
    finally:
        _kill_descendants()
        if settings is not None:
            shutil.rmtree(settings["folder"], ignore_errors=True)  # an owner that was killed cannot do it


def _start(settings: dict[str, object]) -> dict[str, object]:
    node_args = settings["node_args"]
    assert isinstance(node_args, list)
    try:
        cluster = Cluster(initialize_head=True, head_node_args=node_args[0], shutdown_at_exit=False)
        for args in node_args[1:]:
            cluster.add_node(**args)
        return {"address": cluster.address}
    except BaseException as error:  # whatever Ray raises becomes the owner's ClusterError
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _kill_descendants() -> None:
    # at once: told to end, Ray takes two seconds over its farewell to a cluster that nobody needs any more
    while left := descendants(os.getpid()):  # a descendant may fork while it is being killed, hence the loop
        kill_all(left, signal.SIGKILL)
        _reap_exited()
        time.sleep(0.01)


def _reap_exited() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
