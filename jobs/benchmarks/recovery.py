"""How long training stands still when a worker is killed, stopped or hangs: ours, Ray Train 2.60 and torchft 0.2.0.

In turns each side trains the same small GPT with three workers in steps of 50 ms; one of the three gets SIGKILL, or
SIGSTOP, or waits for ever in its step. Measured is the longest time without a done step around that, how many done
steps are done again, and how many samples. A figure of ours counts only if its ledger is exact and its ranks agree to
the bit. Hosts are the matter of hosts.py.

    python -m jobs.benchmarks.recovery [--quick] [--json FILE] [--torchft PYTHON] [--only NAME] [--event NAME]

`--torchft` is the interpreter of an environment with torchft 0.2.0, which needs other pins than ours:
    python -m venv /tmp/torchft && /tmp/torchft/bin/pip install torchft==0.2.0 torch==2.13.0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.cluster.processes import kill_all, with_mark
from elastic_trainer.control.events import TaskPhase
from elastic_trainer.control.suspicion import FLOOR_S
from elastic_trainer.data.ledger import audit
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.reports.record import read_record
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.object_store import ObjectStore
from jobs.benchmarks.marks import Mark, pause_after, read_marks
from jobs.benchmarks.report import Report, median, p95
from jobs.benchmarks.small_gpt import FOLDER

MARK = "ELASTIC_TRAINER_BENCHMARK"
WORKERS = 3
BATCH = 12  # samples of a step over all workers
WARM_STEPS = 30  # before the kill
AFTER_STEPS = 20  # after it
START_S, RECOVER_S, END_S = 120.0, 90.0, 60.0
EVENTS: dict[str, Callable[[str, int], None]] = {
    "kill": lambda folder, pid: os.kill(pid, signal.SIGKILL),
    "stop": lambda folder, pid: os.kill(pid, signal.SIGSTOP),
    "deadlock": lambda folder, pid: Path(folder, f"{pid}.deadlock").touch(),
}
TORCHFT: dict[str, dict[str, Any]] = {
    "default": {"lighthouse": {"min_replicas": 2}, "manager": {}, "group": {}},
    # the best that was found for steps of 50 ms on one machine
    "tuned": {
        "lighthouse": {"min_replicas": 2, "quorum_tick_ms": 10, "join_timeout_ms": 2000, "heartbeat_timeout_ms": 250},
        "manager": {"timeout": 10.0, "quorum_timeout": 10.0, "connect_timeout": 5.0, "heartbeat_interval": 0.02},
        "group": {"timeout": 1.0},
    },
}


@dataclass(frozen=True)
class Outcome:
    """Of one kill."""

    gap_s: float  # RECOVER_S: it did not go on within that
    steps_lost: int
    is_right: bool


Event = Callable[[str, int], None]
Side = Callable[[random.Random, Event], Outcome]


class NotSeen(SystemExit):
    """Something that was waited for did not happen."""


class Session:
    """Processes that train in a folder of their own and end with it."""

    def __init__(self, commands: Callable[[str], list[list[str]]]) -> None:
        self.folder = tempfile.mkdtemp(prefix="recovery-")
        self.mark = uuid.uuid4().hex
        self._log = open(f"{self.folder}/log", "w")  # noqa: SIM115
        self.processes = [self._start(command) for command in commands(self.folder)]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            MARK: self.mark,
            FOLDER: self.folder,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True)

    def marks(self) -> list[Mark]:
        """All done steps so far, by time."""
        return read_marks(self.folder)

    def await_marks(self, holds: Callable[[list[Mark]], bool], within_s: float, what: str) -> list[Mark]:
        """The marks, once they are so; raises with the log's end when they never are."""
        deadline = time.monotonic() + within_s
        while not holds(marks := self.marks()):
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes[-1:]):
                raise NotSeen(f"no {what} within {within_s:g} s:\n" + Path(f"{self.folder}/log").read_text()[-2000:])
            time.sleep(0.05)
        return marks

    def close(self) -> None:
        """Nothing of it is left."""
        for _ in range(100):
            left = with_mark(MARK, self.mark)
            if not left:
                break
            kill_all(left, signal.SIGKILL)
            time.sleep(0.05)
        for process in self.processes:
            process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def session(commands: Callable[[str], list[list[str]]]) -> Iterator[Session]:
    """A session that is closed in any case."""
    made = Session(commands)
    try:
        yield made
    finally:
        made.close()


def strike(running: Session, chooser: random.Random, event: Event) -> tuple[float, int]:
    """Strike the second worker in mid-training: the longest gap around it, and the done steps that were done again."""
    full = lambda marks: [mark for mark in marks if mark.world == WORKERS]  # noqa: E731
    running.await_marks(
        lambda marks: len({m.pid for m in full(marks)}) >= WORKERS and max(m.steps for m in full(marks)) >= WARM_STEPS,
        START_S,
        f"{WARM_STEPS} steps of {WORKERS} workers",
    )
    time.sleep(chooser.uniform(0.0, 0.3))
    victim = next(mark.pid for mark in reversed(running.marks()) if mark.rank == 1)
    at = time.monotonic()
    event(running.folder, victim)
    try:
        marks = running.await_marks(
            lambda marks: len({m.steps for m in marks if m.at > at and m.pid != victim}) >= AFTER_STEPS,
            RECOVER_S,
            "steps after the event",
        )
    except NotSeen:
        return RECOVER_S, 0
    return pause_after([mark for mark in marks if mark.pid != victim], at)


def agree(marks: list[Mark]) -> bool:
    """Whether all ranks had the same parameters after the same steps."""
    sums: dict[int, set[float]] = {}
    for mark in marks:
        if mark.total is not None:
            sums.setdefault(mark.steps, set()).add(mark.total)
    return bool(sums) and all(len(found) == 1 for found in sums.values())


def ours(chooser: random.Random, event: Event) -> Outcome:
    """The run is stopped, saved, and its ledger recomputed."""
    with session(lambda folder: [[sys.executable, "-m", "jobs.benchmarks.recovery_ours", folder]]) as running:
        gap, lost = strike(running, chooser, event)
        marks = running.marks()
        running.processes[0].send_signal(signal.SIGTERM)
        running.processes[0].wait(END_S)
        store = ObjectStore(f"{running.folder}/run")
        config = read_record(store, "run").history.config
        assert config is not None
        found = audit(order_of(config), read_stream(store.names("ledger"), store.read))
        is_right = agree(marks) and not found.bad_steps() and found.steps > WARM_STEPS + AFTER_STEPS
        return Outcome(gap, lost, is_right)


def ray_train(chooser: random.Random, event: Event) -> Outcome:
    """Comes back from its last checkpoint."""
    with session(lambda folder: [[sys.executable, "-m", "jobs.benchmarks.recovery_raytrain", folder]]) as running:
        return Outcome(*strike(running, chooser, event), is_right=True)


def torchft(python: str, settings: dict[str, Any]) -> Side:
    """Three replica groups and a lighthouse."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [str(part) for name, value in settings["lighthouse"].items() for part in (f"--{name}", value)]

    def commands(folder: str) -> list[list[str]]:
        script = str(Path(__file__).parent / "recovery_torchft.py")
        lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", *flags]
        own = {name: settings[name] for name in ("manager", "group")}
        address = f"http://127.0.0.1:{port}"
        groups = [[python, script, folder, str(number), address, json.dumps(own)] for number in range(WORKERS)]
        return [lighthouse, *groups]

    def measure(chooser: random.Random, event: Event) -> Outcome:
        with session(commands) as running:
            return Outcome(*strike(running, chooser, event), is_right=True)

    return measure


def main() -> None:
    """Run the sides in turns and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two of each, and rivals are only killed")
    parser.add_argument("--repeats", type=int, default=5, help="of each when not quick")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--torchft", metavar="PYTHON", help="of an environment with torchft 0.2.0")
    parser.add_argument("--only", action="append", default=[], help="of the sides, e.g. ours")
    parser.add_argument("--event", action="append", default=[], choices=list(EVENTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sides: dict[str, Side] = {"ours": ours, "Ray Train 2.60": ray_train}
    if options.torchft:
        sides |= {f"torchft 0.2.0, {name}": torchft(options.torchft, found) for name, found in TORCHFT.items()}
    else:
        print("torchft is left out: name an interpreter that has it with --torchft")
    sides = {name: side for name, side in sides.items() if not options.only or name in options.only}
    chooser, report, is_right = random.Random(options.seed), Report(), True
    for event in options.event or EVENTS:
        taking_part = {n: s for n, s in sides.items() if n == "ours" or event == "kill" or not options.quick}
        found: dict[str, list[Outcome]] = {name: [] for name in taking_part}
        for repeat in range(2 if options.quick else options.repeats):
            for name in chooser.sample(list(taking_part), len(taking_part)):
                found[name].append(each := taking_part[name](chooser, EVENTS[event]))
                gap = f"{each.gap_s:.3f} s" if each.gap_s < RECOVER_S else f"did not go on within {RECOVER_S:g} s"
                print(f"{name}, {event} {repeat + 1}: {gap}, {each.steps_lost} steps done again", flush=True)
        _tell(report, event, found)
        is_right = is_right and all(each.is_right for outcomes in found.values() for each in outcomes)
    if not is_right:
        print("WRONG: a ledger is not exact, or ranks disagree")
    report.end(options.json, is_right=is_right)


def _tell(report: Report, event: str, found: dict[str, list[Outcome]]) -> None:
    gaps = {name: [each.gap_s for each in outcomes] for name, outcomes in found.items()}
    lost = {name: [each.steps_lost for each in outcomes] for name, outcomes in found.items()}
    report.table(f"{event}: last done step to the next one", gaps)
    report.table(f"{event}: done steps that are done again", lost, unit="steps")
    again = {name: [steps * BATCH for steps in each] for name, each in lost.items()}
    report.table(f"{event}: samples that are trained again", again, unit="")
    print()
    if "ours" not in gaps:
        return
    mine = gaps["ours"]
    if event == "kill":
        report.check("kill, median", median(mine), "<= 0.25 s", median(mine) <= 0.25)
        report.check("kill, p95", p95(mine), "<= 0.5 s", p95(mine) <= 0.5)
    elif event == "stop":
        report.check("stop, p95", p95(mine), "<= 1.5 s", p95(mine) <= 1.5)
    else:
        bound = FLOOR_S[TaskPhase.LOSS] + 0.5  # the budget in force: eight of these steps are shorter
        report.check("deadlock, p95", p95(mine), f"<= {bound:g} s", p95(mine) <= bound)
    report.check(f"{event}, steps lost", sum(lost["ours"]), "0", sum(lost["ours"]) == 0)
    for name in gaps:
        if name != "ours":
            ratio = median(gaps[name]) / median(mine)
            report.check(f"{event}, {name} / ours, median", ratio, "> 1", ratio > 1)
            if "tuned" in name and event == "kill":
                worst = max(gaps[name]) / max(mine)
                report.check(f"{event}, {name} / ours, longest", worst, ">= 2", worst >= 2)


if __name__ == "__main__":
    main()
