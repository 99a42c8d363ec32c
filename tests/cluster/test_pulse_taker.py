"""How processes are, by the system's own word: real ones that sleep, compute, are stopped, and let children compute."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elastic_trainer.cluster.processes import ProcessId, process_of
from elastic_trainer.cluster.pulse_taker import PulseTaker
from elastic_trainer.control.events import Pulse, TaskPhase, Whereabouts
from elastic_trainer.vocabulary import Worker

W = Worker(0, 0)
SLEEP = "import time; print(flush=True); time.sleep(60)"
SPIN = "print(flush=True)\nwhile True: pass"
CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']); " + SLEEP


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.stdout.close()
    subprocess.run(["kill", "-KILL", "--", f"-{started.pid}"], check=True)
    started.wait()


def watched(pid: int, seconds: float, where: Whereabouts | None = None) -> Pulse:
    found = process_of(pid)
    assert found is not None
    taker = PulseTaker()
    if where is not None:
        taker.told(W, where)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        (pulse,) = taker.take({W: found})
        time.sleep(0.05)
    return pulse


@pytest.mark.parametrize("process", [SLEEP], indirect=True)
def test_one_that_sleeps_is_idle(process: subprocess.Popen[str]) -> None:
    pulse = watched(process.pid, 2.0)
    assert (pulse.where, pulse.is_stopped, pulse.is_busy) == (None, False, False)
    assert pulse.told_s > 1.5


@pytest.mark.parametrize("process", [SPIN], indirect=True)
def test_one_that_computes_is_busy(process: subprocess.Popen[str]) -> None:
    where = Whereabouts(TaskPhase.LOSS, 3, 1, 0, 0.0)
    pulse = watched(process.pid, 0.8, where)
    assert (pulse.where, pulse.is_stopped, pulse.is_busy) == (where, False, True)


@pytest.mark.parametrize("process", [CHILD], indirect=True)
def test_one_that_stands_while_its_child_computes_is_busy(process: subprocess.Popen[str]) -> None:
    assert watched(process.pid, 2.2).is_busy


@pytest.mark.parametrize("process", [SPIN], indirect=True)
def test_one_that_is_stopped_is_told_so_at_once(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    assert watched(process.pid, 0.1).is_stopped
    process.send_signal(signal.SIGCONT)
    time.sleep(0.05)
    assert not watched(process.pid, 0.1).is_stopped


def test_one_that_is_gone_has_no_pulse() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    found = process_of(ended.pid)
    assert found is not None
    ended.wait()
    assert PulseTaker().take({W: found}) == ()
    assert PulseTaker().take({W: ProcessId(1, 1)}) == ()  # its number belongs to somebody else
