"""How long the survivors of a run stand still when a host is lost, cut off, stopped, taken away or new.

Each figure is of a run of its own on hosts in namespaces (jobs/rig.py): three workers in steps of 50 ms, the longest
time between two done steps around the event, and what of it went into which phase. It counts only if the ledger is
exact and no step is done again. Beside them, in turns, those of Ray Train 2.60 (elastic) and of torchft 0.2.0, if there
is an interpreter that has it (recovery.py says how); `--quick` leaves the rivals out, whose figures take minutes.

    sudo .venv/bin/python -m jobs.benchmarks.hosts [--quick] [--json FILE] [--only NAME] [--torchft PYTHON]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from elastic_trainer import Run, prepare
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.object_store import ObjectStore
from jobs.benchmarks import hosts_rivals
from jobs.benchmarks.recovery import TORCHFT
from jobs.benchmarks.recovery_ours import paced_steps
from jobs.benchmarks.report import Report, median, p95
from jobs.benchmarks.small_gpt import STEP_S, tokens_of
from jobs.rig import Host, Rig, why_not

HOSTS = 3
BEFORE, AFTER = 40, 60  # steps
WITHIN_S = 120.0


@dataclass(frozen=True)
class Pause:
    """What one event cost: `gap_s` between two done steps, and by phase."""

    gap_s: float
    phases_s: dict[str, float]
    is_right: bool


def train(run: Run) -> None:
    """What the hosts train."""
    for _ in paced_steps(run):
        pass


class HostRun:
    """A job on the rig, and what its folder tells."""

    def __init__(self, rig: Rig, folder: Path, workers: int) -> None:
        self._rig = rig
        self.folder = folder / "runs" / "hosts"
        job = {
            "name": "hosts",
            "storage": str(folder / "runs"),
            "task": "jobs.benchmarks.hosts:train",
            "data": {"train": str(folder / "data")},
            "scaling": {"max_workers": workers},
            "steps": 1_000_000,
            "global_batch": 12,
            "micro_batch": 2,
            "logical_ranks": 6,
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "elastic_trainer", "run", str(folder / "job.yaml"), "--address", rig.address]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self._process = rig.hosts[0].start(command, stdout=log, stderr=log)

    def times(self) -> list[float]:
        """When each step was done."""
        if not (self.folder / "metrics").exists():
            return []
        store = ObjectStore(str(self.folder))
        return sorted(line["done_at"] for line in read_stream(store.names("metrics"), store.read) if "step" in line)

    def await_steps(self, since: float, count: int, workers: int) -> None:
        """Until so many steps were done after a moment, by so many workers in the end."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            if sum(at > since for at in self.times()) >= count and len(self.hosts()) == workers:
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"not {count} steps by {workers} workers:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def hosts(self) -> list[Host]:
        """Those with a worker."""
        return [host for host in self._rig.hosts if host.pids("ray::WorkerActor")]

    def end(self, since: float) -> Pause:
        """Stop it, saved; the longest pause after a moment."""
        self._signal()
        self._process.wait(WITHIN_S)
        gaps = [later - earlier for earlier, later in pairwise(self.times()) if later > since]
        summary = json.loads((self.folder / "summary.json").read_text())
        is_right = summary["status"] == "stopped" and summary["steps_redone"] == 0
        is_right = is_right and summary["samples_missing"] == summary["samples_repeated"] == 0
        return Pause(max(gaps), summary["generations"][-1]["phases_s"], is_right)

    def _signal(self) -> None:
        for pid in self._rig.hosts[0].pids("elastic_trainer run"):
            os.kill(pid, signal.SIGTERM)


def of_fault(fault: Callable[[Host], None], left: int) -> Callable[[Rig, Path], Pause]:
    """Three train, one has the fault, `left` go on."""

    def measure(rig: Rig, folder: Path) -> Pause:
        run = HostRun(rig, folder, HOSTS)
        run.await_steps(0.0, BEFORE, HOSTS)
        time.sleep(0.2)  # where in a step it comes is left to chance
        since = time.time()
        fault(run.hosts()[1])
        run.await_steps(since, AFTER, left)
        return run.end(since)

    return measure


def stop_worker(host: Host) -> None:
    """SIGSTOP to the worker alone; its host is well."""
    (pid,) = host.pids("ray::WorkerActor")
    os.kill(pid, signal.SIGSTOP)


def growth(rig: Rig, folder: Path) -> Pause:
    """Two train, a host comes."""
    new = rig.hosts[-1]
    new.power_off()
    rig.await_nodes(len(rig.hosts) - 1)
    run = HostRun(rig, folder, HOSTS)
    run.await_steps(0.0, BEFORE, HOSTS - 1)
    since = time.time()
    new.boot()
    run.await_steps(since, AFTER, HOSTS)
    time.sleep(3.0)
    return run.end(since)


KINDS: dict[str, tuple[float, Callable[[Rig, Path], Pause]]] = {
    "host loses power": (1.0, of_fault(Host.power_off, HOSTS - 1)),
    "host is cut off": (1.5, of_fault(Host.cut, HOSTS)),  # its worker lives on, and waits
    "worker is stopped": (1.5, of_fault(stop_worker, HOSTS)),
    "host is taken away": (STEP_S + 0.1, of_fault(Host.announce_preemption, HOSTS - 1)),
    "host comes": (STEP_S + 0.1, growth),
}
PLANNED = ("host is taken away", "host comes")
FAULTS: dict[str, Callable[[Host], None]] = {
    "host loses power": Host.power_off,
    "host is cut off": Host.cut,
    "worker is stopped": hosts_rivals.stop_trainer,
    "host is taken away": Host.announce_preemption,
}


def rivals(python: str | None) -> dict[str, Callable[[Rig, Path, str], tuple[float, int] | None]]:
    """By name: the pause of an event and the steps done again; None when training never went on."""

    def side(start: hosts_rivals.Start, join: Callable[[Path, Host], Any] | None) -> Any:
        def measure(rig: Rig, folder: Path, kind: str) -> tuple[float, int] | None:
            if kind in FAULTS:
                return hosts_rivals.pause_of_fault(rig, folder, start, FAULTS[kind])
            joins = None if join is None else functools.partial(join, folder)
            return hosts_rivals.pause_of_new_host(rig, folder, start, joins)

        return measure

    found = {"Ray Train 2.60": side(hosts_rivals.ray_train, None)}
    for name, settings in TORCHFT.items() if python is not None else ():
        assert python is not None

        def join(folder: Path, host: Host, settings: dict[str, Any] = settings) -> Any:
            assert python is not None
            return hosts_rivals.torchft_group(host, folder, python, settings)

        found[f"torchft 0.2.0, {name}"] = side(hosts_rivals.torchft(python, settings), join)
    return found


def main() -> None:
    """Every kind in turns, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one of each instead of five, and no rivals")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", action="append", default=[], choices=list(KINDS))
    parser.add_argument("--repeats", type=int, default=5, help="of each when not quick")
    parser.add_argument("--torchft", metavar="PYTHON", help="of an environment with torchft 0.2.0")
    options = parser.parse_args()
    if problem := why_not():
        sys.exit(f"no hosts can be made here: {problem}")
    kinds = {name: kind for name, kind in KINDS.items() if not options.only or name in options.only}
    found: dict[str, list[Pause]] = {name: [] for name in kinds}
    rivals_found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    others = list(rivals(options.torchft).items())
    rig = Rig(HOSTS)
    try:
        rig.start()
        for _ in range(1 if options.quick else options.repeats):
            for name, (_, measure) in kinds.items():
                for rival, of_rival in {} if options.quick else others:
                    with prepared(rig) as folder:
                        theirs = of_rival(rig, folder, name)
                    gap_s, lost = theirs or (hosts_rivals.WITHIN_S, 0)
                    rivals_found[name].setdefault(rival, []).append(gap_s)
                    said = f"{gap_s:.3f} s, {lost} steps done again" if theirs else f"never within {gap_s:g} s"
                    print(f"{name}, {rival}: {said}", flush=True)
                with prepared(rig) as folder:
                    np.savez(folder / "tokens.npz", tokens=tokens_of(6000, 0).numpy())
                    prepare(folder / "tokens.npz", folder / "data")
                    found[name].append(pause := measure(rig, folder))
                phases = ", ".join(f"{phase} {1000 * each:.0f}" for phase, each in pause.phases_s.items())
                print(f"{name}: {pause.gap_s:.3f} s; ms by phase: {phases}", flush=True)
    finally:
        rig.close()
    report = Report()
    for name, pauses in found.items():
        rows = {"ours": [each.gap_s for each in pauses], **rivals_found[name]}
        report.table(f"{name}: last done step to the next one", rows)
    print()
    for name, pauses in found.items():
        goal = kinds[name][0]
        beyond = [each.gap_s - _of_the_group(each) if name in PLANNED else each.gap_s for each in pauses]
        what = f"{name}, beyond group and state" if name in PLANNED else name
        for figure, value in (("median", median(beyond)), ("p95", p95(beyond))):
            report.check(f"{what}, {figure}", value, f"<= {goal:.2f} s", value <= goal)
    report.end(options.json, is_right=all(each.is_right for pauses in found.values() for each in pauses))


@contextlib.contextmanager
def prepared(rig: Rig) -> Iterator[Path]:
    """A folder, and afterwards hosts as new."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    try:
        yield folder
    finally:
        rig.end_actors()
        rig.mend()
        shutil.rmtree(folder, ignore_errors=True)


def _of_the_group(pause: Pause) -> float:
    return sum(pause.phases_s.get(phase, 0.0) for phase in ("form", "state"))


if __name__ == "__main__":
    main()
