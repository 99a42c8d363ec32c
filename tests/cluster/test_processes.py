from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from elastic_trainer.cluster.processes import (
    ProcessId,
    descendants,
    kill_all,
    memory_kills,
    process_of,
    this_process,
    with_mark,
)

FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""


def family(mark: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY], env={**os.environ, "A_MARK": mark}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def test_marked_processes_are_found_and_killed_even_when_their_parent_is_dead() -> None:
    process = family("family-one")
    assert len(with_mark("A_MARK", "family-one")) == 2
    assert with_mark("A_MARK", "family") == []
    process.kill()
    process.wait()

    kill_all(with_mark("A_MARK", "family-one"))

    deadline = time.monotonic() + 10
    while with_mark("A_MARK", "family-one"):
        assert time.monotonic() < deadline


def test_descendants_are_found_with_their_own() -> None:
    process = family("family-two")

    found = descendants(os.getpid())
    assert {p.pid for p in with_mark("A_MARK", "family-two")} <= {p.pid for p in found}

    kill_all(with_mark("A_MARK", "family-two"))
    process.wait()


def test_a_pid_that_was_used_again_is_not_hit() -> None:
    me = this_process()

    kill_all([ProcessId(me.pid, me.start_ticks - 1)], signal.SIGKILL)

    assert process_of(me.pid) == me
    assert process_of(2**22 + 5) is None


def test_the_kernels_count_of_memory_kills_is_read() -> None:
    assert memory_kills() >= 0
