"""A worker group in plain processes, without Ray: the real control machine, worker code, gloo and store, over pipes.

`Harness` plays the controller: it starts processes, passes reports to the machine and orders back, and kills on demand.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from elastic_trainer.checkpoint.committer import Committer
from elastic_trainer.checkpoint.history import fold
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits
from elastic_trainer.data.batch_plan import BatchPlan
from elastic_trainer.data.dataset import read_index
from elastic_trainer.data.ledger import Audit, LedgerLine
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.observability.lines import EvaluationLine, Line, NoteLine, StepLine
from elastic_trainer.storage.log import RunLog
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import SavedStep, Worker
from tests.harness_worker import Backend, gloo, main

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.harness_worker", "tests.nccl_like"])


def settings_for(
    data: str,
    *,
    steps: int,
    batch: int = 24,
    micro: int = 2,
    ranks: int = 12,
    window: int = 3,
    evaluation: str | None = None,
    **others: Any,
) -> TrainSettings:
    """Settings of a small run on a dataset folder."""
    index = read_index(data)
    order = SampleOrder(index.rows, index.row_group, batch, ranks, window, 7, others.pop("drop_last", False))
    plan = BatchPlan(order, micro, others.pop("fixed_shapes", False))
    defaults: dict[str, Any] = {
        "seed": 7,
        "clip_norm": None,
        "evaluate_every": None,
        "form_s": 20.0,
        "collective_s": 60.0,
        "data_options": {},
        "routing": None,
        "precision": "fp32",
        "run_url": "",
        "storage_options": {},
        "storage_s": 10.0,
        "save_every": None,
        "save_every_s": None,
        "save_s": 60.0,
    }
    return TrainSettings("test", plan, data, evaluation, steps=steps, **{**defaults, **others})


@dataclass
class Outcome:
    """What a run came to."""

    status: str
    reason: str
    losses: list[float]
    audit: Audit
    evaluations: dict[int, dict[str, float]]
    notes: list[str]
    final: dict[int, Any]  # by worker id: what the task put into its result
    generations: list[tuple[int, int]]  # (world size, resume step)
    pids: list[dict[int, int]]  # of each generation, by worker id
    line_tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    saved: list[SavedStep] = field(default_factory=list)
    folder: str = ""

    @property
    def last_members(self) -> list[Any]:
        """The results of the last generation's members; a newcomer may not have joined any more before the end."""
        return [self.final[worker_id] for worker_id in self.pids[-1]]


class Harness:
    """Runs one job to its end.

    Args:
        task: Picklable function without arguments that makes the task; runs in the workers.
        on_step: Called in this process with (harness, number of done steps) when that grows.
    """

    def __init__(
        self,
        task: Callable[[], Any],
        settings: TrainSettings,
        *,
        workers: int,
        least: int = 1,
        on_step: Callable[[Harness, int], None] | None = None,
        on_event: Callable[[Harness, e.Event], None] | None = None,
        limits: Limits | None = None,
        restart_delay_s: float = 0.0,
        backend: Backend = gloo,
    ) -> None:
        self._task = task
        self._backend = backend
        self._temporary = None if settings.run_url else tempfile.TemporaryDirectory(prefix="et-run-")
        url = self._temporary.name if self._temporary else settings.run_url
        self._settings = settings = dataclasses.replace(settings, run_url=url)
        store = settings.open_store()
        log = RunLog(store)
        history = fold(log.read())
        self.committer = Committer(store, log, history, history.term + 1)
        self.committer.append("term", {"owner": "test", "config": {}, "code": ""})
        self._disk = ThreadPoolExecutor(1)  # as the controller: one call at a time
        self._on_step = on_step
        self._on_event = on_event
        self._restart_delay_s = restart_delay_s
        limits = limits or Limits(least, workers, place_s=60.0, form_s=20.0, leave_s=60.0, save_s=60.0, settle_s=(0.0,))
        self.machine = Machine(limits, term=history.term)
        self._events: queue.Queue[e.Event] = queue.Queue()
        self._processes: dict[Worker, mp.process.BaseProcess] = {}
        self._pipes: dict[Worker, Connection] = {}
        self._store: dist.TCPStore | None = None
        self._ended: f.EndRun | None = None
        self._lines: dict[int, StepLine] = {}
        self._evaluations: dict[int, dict[str, float]] = {}
        self._notes: list[str] = []
        self._final: dict[int, Any] = {}
        self._audit = Audit(settings.plan.order)
        self._generations: list[tuple[int, int]] = []
        self._joined: dict[int, dict[int, int]] = {}
        self._told = 0
        self.effects: list[f.Effect] = []

    def kill(self, worker_id: int, signum: signal.Signals = signal.SIGKILL) -> Worker | None:
        """Signal the present process of a worker."""
        worker = self.machine.state.workers[worker_id].worker
        process = self._processes.get(worker)
        if process is None or process.pid is None:
            return None
        os.kill(process.pid, signum)
        return worker

    def lose_store(self) -> None:
        """The rendezvous store's sockets close, as when its process dies."""
        self._store = None
        self.put(e.StoreLost("its process died"))

    def put(self, event: e.Event) -> None:
        """Let something happen."""
        self._events.put(event)

    def run(self, within_s: float = 120.0) -> Outcome:
        """Until the run ends."""
        deadline = time.monotonic() + within_s
        try:
            history = self.committer.history
            self._handle(e.RunBegan(saved=tuple(history.saved), rollback=history.rollback))
            while self._ended is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no end after {within_s} s: {self.machine.snapshot()}")
                due = self.machine.next_deadline()
                wait = 0.5 if due is None else min(0.5, max(0.0, due - time.monotonic()))
                try:
                    event = self._events.get(timeout=wait)
                except queue.Empty:
                    event = e.TimePassed()
                self._handle(event)
            self._let_go()
        finally:
            for process in list(self._processes.values()):
                process.kill()
                process.join()
            self._disk.shutdown()
            if self._temporary is not None:
                self._temporary.cleanup()
        ended = self._ended
        return Outcome(
            ended.status.value,
            ended.reason,
            [self._lines[step].loss for step in sorted(self._lines)],
            self._audit,
            self._evaluations,
            self._notes,
            self._final,
            self._generations,
            [self._joined[generation] for generation in sorted(self._joined)],
            {step: line.token for step, line in self._lines.items()},
            list(self.committer.history.saved),
            self._settings.run_url,
        )

    def _handle(self, event: e.Event) -> None:
        if self._on_event is not None:
            self._on_event(self, event)
        if isinstance(event, e.PiecesWritten):
            self.committer.take(event)
        if isinstance(event, e.GenerationJoined):
            joined = self._joined.setdefault(event.token.generation, {})
            if not joined:
                self._generations.append((len(self.machine.state.group), event.steps))
            joined[event.worker.worker_id] = event.pid
        for effect in self.machine.handle(event, time.monotonic()):
            self.effects.append(effect)
            self._carry_out(effect)
        self.machine.check()
        if self._on_step is not None and self.machine.state.done > self._told:
            self._told = self.machine.state.done
            self._on_step(self, self._told)

    def _carry_out(self, effect: f.Effect) -> None:
        match effect:
            case f.StartWorker():
                delay = self._restart_delay_s if effect.worker.incarnation else 0.0
                threading.Timer(delay, self._start, (effect.worker,)).start()
            case f.StartStore():
                self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                self.put(e.StoreReady("127.0.0.1", self._store.port))
            case f.FormGeneration():
                self._send(effect.ranks, effect)
            case f.AbortGeneration() | f.ParkGeneration() | f.StopGeneration() | f.SettleSave():
                self._send(effect.workers, effect)
            case f.WritePieces():
                self._send(effect.writers, effect)
            case f.CommitSave():
                self._disk.submit(self._commit, effect)
            case f.RecordResumption():
                self._audit.go_back_to(effect.steps)
                values = {"token": list(effect.token), "steps": effect.steps, "rollback": effect.rollback}
                self._disk.submit(self.committer.append, "resumed", values)
            case f.RunTaskAgain():
                self._send((effect.worker,), effect)
            case f.KillWorker() | f.RetireWorker():
                self._processes[effect.worker].kill()
            case f.EndRun():
                self._ended = effect
            case f.Tell():
                pass

    def _commit(self, effect: f.CommitSave) -> None:
        try:
            saved = self.committer.write_manifest(effect.steps, effect.token, effect.attempt)
            self.committer.stand(saved, effect.token, {"audit": {}, "evaluation": {}, "ledger": []})
        except ElasticTrainerError as error:
            self.put(e.SaveFailed(effect.token, effect.steps, str(error)))
        else:
            self.put(e.StepSaved(effect.token, saved))

    def _send(self, workers: tuple[Worker, ...], order: f.Order) -> None:
        for worker in workers:
            if worker in self._pipes:
                try:
                    self._pipes[worker].send(order)
                except OSError:
                    continue  # dead: its tripwire tells

    def _start(self, worker: Worker) -> None:
        if self._ended is not None:
            return
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=main, args=(there, self._task, worker, self._settings, self._backend), daemon=True
        )
        self._pipes[worker] = here
        process.start()
        self._processes[worker] = process
        there.close()
        self.put(e.WorkerPlaced(worker))
        threading.Thread(target=self._read, args=(worker, here), daemon=True).start()

    def _read(self, worker: Worker, pipe: Connection) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, StepLine | EvaluationLine | NoteLine):
                self._record(worker, message)
            elif isinstance(message, tuple):
                self._final[worker.worker_id] = message[1]
            else:
                self.put(message)
        self.put(e.WorkerLost(worker, "its process died"))

    def _record(self, worker: Worker, line: Line) -> None:
        match line:
            case StepLine():
                if self._audit.add(LedgerLine(line.step, line.token, line.samples, line.digest, line.skipped)):
                    self._lines[line.step] = line
                self.put(e.StepsDone(worker, line.token, line.step + 1))
                rollback = self.machine.state.rollback
                if skipped := self._audit.skipped_in_a_row(rollback.skipped if rollback else ()):
                    self.put(e.StepsSkipped(line.token, skipped))
            case EvaluationLine():
                self._evaluations[line.steps] = line.values
            case NoteLine():
                self._notes.append(line.text)

    def _let_go(self) -> None:
        assert self._ended is not None
        self._send(tuple(self._pipes), self._ended)
        for process in list(self._processes.values()):
            process.join(10.0)
