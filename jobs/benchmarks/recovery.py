"""How long training stands still when a worker is killed: ours beside Ray Train 2.60 and torchft 0.2.0, in turns.

Each side trains the same small GPT with three workers in steps of 50 ms; one of the three gets SIGKILL. Measured is the
longest time without a done step around the kill, how many done steps are done again, and how many samples. A figure of
ours counts only if its ledger is exact and its ranks agree to the bit.

    python -m jobs.benchmarks.recovery [--quick] [--json FILE] [--torchft PYTHON] [--only NAME]

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
from elastic_trainer.data.ledger import audit
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.reports.record import read_record
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.object_store import ObjectStore
from jobs.benchmarks.report import Report, median, p95

MARK = "ELASTIC_TRAINER_BENCHMARK"
WORKERS = 3
BATCH = 12  # samples of a step over all workers
WARM_STEPS = 30  # before the kill
AFTER_STEPS = 20  # after it
START_S, RECOVER_S, END_S = 120.0, 120.0, 60.0
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
class Mark:
    """A step that a process has done."""

    at: float
    steps: int
    rank: int
    world: int
    total: float | None
    pid: int


@dataclass(frozen=True)
class Outcome:
    """Of one kill."""

    gap_s: float
    steps_lost: int
    is_right: bool


class Session:
    """Processes that train in a folder of their own and end with it."""

    def __init__(self, commands: Callable[[str], list[list[str]]]) -> None:
        self.folder = tempfile.mkdtemp(prefix="recovery-")
        self.mark = uuid.uuid4().hex
        self._log = open(f"{self.folder}/log", "w")  # noqa: SIM115
        self.processes = [self._start(command) for command in commands(self.folder)]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True)

    def marks(self) -> list[Mark]:
        """All done steps so far, by time."""
        found = []
        for path in Path(self.folder).glob("*.marks"):
            for line in path.read_text().split("\n")[:-1]:
                each = json.loads(line)
                place = (each["at"], each["steps"], each["rank"], each["world"], each["sum"])
                found.append(Mark(*place, int(path.stem)))
        return sorted(found, key=lambda mark: mark.at)

    def await_marks(self, holds: Callable[[list[Mark]], bool], within_s: float, what: str) -> list[Mark]:
        """The marks, once they are so; raises with the log's end when they never are."""
        deadline = time.monotonic() + within_s
        while not holds(marks := self.marks()):
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes[-1:]):
                raise SystemExit(f"no {what} within {within_s:g} s:\n" + Path(f"{self.folder}/log").read_text()[-2000:])
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


def kill_one(running: Session, chooser: random.Random) -> tuple[float, int]:
    """Kill the second worker in mid-training: the longest gap around it, and the done steps that were done again."""
    full = lambda marks: [mark for mark in marks if mark.world == WORKERS]  # noqa: E731
    running.await_marks(
        lambda marks: len({m.pid for m in full(marks)}) >= WORKERS and max(m.steps for m in full(marks)) >= WARM_STEPS,
        START_S,
        f"{WARM_STEPS} steps of {WORKERS} workers",
    )
    time.sleep(chooser.uniform(0.0, 0.3))
    victim = next(mark.pid for mark in reversed(running.marks()) if mark.rank == 1)
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    marks = running.await_marks(
        lambda marks: len({m.steps for m in marks if m.at > at and m.pid != victim}) >= AFTER_STEPS,
        RECOVER_S,
        "steps after the kill",
    )
    others = [mark for mark in marks if mark.pid != victim]
    times = [mark.at for mark in others]
    first = next(i for i, moment in enumerate(times) if moment > at)
    # a step that was nearly done may still be done after the kill: the gap is the longest of the first few
    last = min(len(times) - 1, first + 2 * WORKERS)
    place = max(range(first, last + 1), key=lambda i: times[i] - times[i - 1])
    before = max(mark.steps for mark in others[:place])
    return times[place] - times[place - 1], max(0, before - (others[place].steps - 1))


def agree(marks: list[Mark]) -> bool:
    """Whether all ranks had the same parameters after the same steps."""
    sums: dict[int, set[float]] = {}
    for mark in marks:
        if mark.total is not None:
            sums.setdefault(mark.steps, set()).add(mark.total)
    return bool(sums) and all(len(found) == 1 for found in sums.values())


def ours(chooser: random.Random) -> Outcome:
    """The run is stopped, saved, and its ledger recomputed."""
    with session(lambda folder: [[sys.executable, "-m", "jobs.benchmarks.recovery_ours", folder]]) as running:
        gap, lost = kill_one(running, chooser)
        marks = running.marks()
        running.processes[0].send_signal(signal.SIGTERM)
        running.processes[0].wait(END_S)
        store = ObjectStore(f"{running.folder}/run")
        config = read_record(store, "run").history.config
        assert config is not None
        found = audit(order_of(config), read_stream(store.names("ledger"), store.read))
        is_right = agree(marks) and not found.bad_steps() and found.steps > WARM_STEPS + AFTER_STEPS
        return Outcome(gap, lost, is_right)


def ray_train(chooser: random.Random) -> Outcome:
    """Comes back from its last checkpoint."""
    with session(lambda folder: [[sys.executable, "-m", "jobs.benchmarks.recovery_raytrain", folder]]) as running:
        return Outcome(*kill_one(running, chooser), is_right=True)


def torchft(python: str, settings: dict[str, Any]) -> Callable[[random.Random], Outcome]:
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

    def measure(chooser: random.Random) -> Outcome:
        with session(commands) as running:
            return Outcome(*kill_one(running, chooser), is_right=True)

    return measure


def main() -> None:
    """Run the sides in turns and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two kills a side instead of five")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--torchft", metavar="PYTHON", help="of an environment with torchft 0.2.0")
    parser.add_argument("--only", action="append", default=[], help="of the sides, e.g. ours")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sides: dict[str, Callable[[random.Random], Outcome]] = {"ours": ours, "Ray Train 2.60": ray_train}
    if options.torchft:
        sides |= {f"torchft 0.2.0, {name}": torchft(options.torchft, found) for name, found in TORCHFT.items()}
    else:
        print("torchft is left out: name an interpreter that has it with --torchft")
    sides = {name: side for name, side in sides.items() if not options.only or name in options.only}
    found: dict[str, list[Outcome]] = {name: [] for name in sides}
    chooser = random.Random(options.seed)
    for repeat in range(2 if options.quick else 5):
        for name in chooser.sample(list(sides), len(sides)):
            found[name].append(sides[name](chooser))
            each = found[name][-1]
            print(f"{name}, kill {repeat + 1}: {each.gap_s:.3f} s, {each.steps_lost} steps done again", flush=True)
    report = Report()
    gaps = {name: [each.gap_s for each in outcomes] for name, outcomes in found.items()}
    report.table("last done step to the next one", gaps)
    report.table(
        "done steps that are done again", {n: [each.steps_lost for each in o] for n, o in found.items()}, unit="steps"
    )
    again = {name: [each.steps_lost * BATCH for each in outcomes] for name, outcomes in found.items()}
    report.table("samples that are trained again", again, unit="")
    is_right = all(each.is_right for outcomes in found.values() for each in outcomes)
    print()
    if "ours" in gaps:
        mine = gaps["ours"]
        report.check("recovery, median", median(mine), "<= 0.25 s", median(mine) <= 0.25)
        report.check("recovery, p95", p95(mine), "<= 0.5 s", p95(mine) <= 0.5)
        for name in gaps:
            if name != "ours":
                ratio = median(gaps[name]) / median(mine)
                report.check(f"{name} / ours, median", ratio, "> 1", ratio > 1)
    if not is_right:
        print("WRONG: a ledger is not exact, or ranks disagree")
    report.end(options.json, is_right=is_right)


if __name__ == "__main__":
    main()
