"""A job run by the command line in a process of its own, watched from outside, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from elastic_trainer.cluster.processes import ProcessId, command_of, kill_all, with_mark

ROOT = Path(__file__).parent.parent
MARK = "ELASTIC_TRAINER_TEST"
ENDED_S = 20.0  # bound of every wait for processes to be gone


def job_config(folder: Path, dataset: str, held_out: str | None, **fields: Any) -> dict[str, Any]:
    """A job of some hundred quick steps on two workers of half a CPU."""
    values: dict[str, Any] = {
        "name": "job",
        "storage": str(folder / "runs"),
        "task": "tests.tasks:NetTask",
        "task_args": {"delay_s": 0.002},
        "data": {"train": dataset, "evaluation": held_out},
        "scaling": {"max_workers": 2, "resources_per_worker": {"CPU": 0.5}},
        "steps": 2000,
        "global_batch": 24,
        "micro_batch": 2,
        "logical_ranks": 12,
    }
    return {**values, **fields}


class CommandRun:
    """`elastic-trainer run` on a job, or another command of the project, in a process of its own or on a host."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any] | None,
        *command: str,
        inside: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.summary_path = Path("/nonexistent")
        self.config = config or {}
        arguments = [sys.executable, *command]
        if config is not None:
            path = folder / f"job-{self.mark[:8]}.yaml"
            path.write_text(yaml.safe_dump(config))
            arguments = [sys.executable, "-m", "elastic_trainer", "run", str(path), *command]
            self.summary_path = Path(config["storage"]) / str(config["name"]) / "summary.json"
        self.process = subprocess.Popen(
            inside(arguments),
            cwd=ROOT,
            env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """All that was printed so far."""
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def await_line(self, text: str, within_s: float = 60.0) -> str:
        """The first printed line that holds `text`."""
        return await_value(
            lambda: next((line for line in self.lines if text in line), None) or (self._dead(text)),
            within_s,
            lambda: f"no line with {text!r}:\n{self.output}",
        )

    def _dead(self, text: str) -> None:
        if self.process.poll() is not None and not any(text in line for line in self.lines):
            self._reader.join(5)
            assert any(text in line for line in self.lines), f"ended without {text!r}:\n{self.output}"

    def pids(self, role: str) -> list[int]:
        """Processes of the run whose title or command line holds `role`, such as `ray::WorkerActor`."""
        pids = [process.pid for process in with_mark(MARK, self.mark)]
        return sorted(pid for pid in pids if (command := command_of(pid)) and role in command)

    def await_pids(self, role: str, count: int, within_s: float = 60.0) -> list[int]:
        """The processes of that role, as soon as there are so many."""
        return await_value(
            lambda: pids if len(pids := self.pids(role)) >= count else None,
            within_s,
            lambda: f"not {count} processes of {role}: {self.pids(role)}\n{self.output}",
        )

    def end(self, within_s: float = 60.0) -> int:
        """Wait for the command to end by itself; returns its exit status."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {within_s} s:\n{self.output}") from None
        self._reader.join(5)
        return status

    def summary(self) -> dict[str, Any]:
        """The run's `summary.json`."""
        found: dict[str, Any] = json.loads(self.summary_path.read_text())
        return found

    def assert_nothing_left(self) -> None:
        """No process that descends from this run is left, within a bound."""
        await_value(
            lambda: True if not with_mark(MARK, self.mark) else None,
            ENDED_S,
            lambda: f"left over: {[self._describe(p) for p in with_mark(MARK, self.mark)]}\n{self.output}",
        )

    def clean_up(self) -> None:
        """End everything, whatever the test found."""
        for _ in range(3):
            kill_all(with_mark(MARK, self.mark), signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @staticmethod
    def _describe(process: ProcessId) -> str:
        return command_of(process.pid)[:120] or "gone"


def await_value(look: Callable[[], Any], within_s: float, complain: Callable[[], str]) -> Any:
    """What `look` returns once it is something; fails with words after the bound."""
    deadline = time.monotonic() + within_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, complain()
        time.sleep(0.02)
    return found
