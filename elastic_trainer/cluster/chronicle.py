"""What the controller tells: ledger, metrics, events, news for the driver, and the summary at the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from elastic_trainer.cluster.processes import ProcessId
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.state import State
from elastic_trainer.data.ledger import Audit, LedgerLine
from elastic_trainer.observability.journal import Journal
from elastic_trainer.observability.lines import EvaluationLine, Line, NoteLine, StepLine
from elastic_trainer.observability.standing import Standing
from elastic_trainer.storage.run_folder import RunFolder
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import RunStatus, Token, Worker

NEWS_KEPT = 1000  # the driver reads several times a second; what it missed stands in the events
SPEED_OVER = 50  # steps over which the shown speed is taken


@dataclass
class Generation:
    """A generation that was formed."""

    generation: int
    term: int
    world_size: int
    resume_step: int
    reason: str


class Chronicle:
    """Keeps the account of a run.

    Args:
        settings: Of the run.
        folder: Where to write.
        state: Of the control machine, which is only read.
    """

    def __init__(self, settings: TrainSettings, folder: RunFolder, state: State) -> None:
        self._settings = settings
        self._folder = folder
        self._state = state
        self._loop = asyncio.get_event_loop()
        self._journal = Journal(folder.write_new, self._tell_from_thread)
        self._audit = Audit(settings.plan.order)
        self._began_at = time.time()
        self._news: deque[tuple[int, str]] = deque(maxlen=NEWS_KEPT)
        self._count = 0
        self._has_news = asyncio.Event()
        self._recent: deque[StepLine] = deque(maxlen=SPEED_OVER)
        self._last: StepLine | None = None
        self._productive_s = 0.0
        self._evaluations: dict[int, dict[str, float]] = {}
        self._forming: f.FormGeneration | None = None
        self._is_faulted = False
        self._pids: dict[int, tuple[Worker, int]] = {}  # by worker id, as said at the last join
        self._lost: set[Worker] = set()
        self._pids_unchanged = True
        self.processes: dict[Worker, ProcessId] = {}
        self.generations: list[Generation] = []
        self.recovery_s: list[float] = []
        self.summary: dict[str, Any] = {}

    @property
    def acknowledged(self) -> int:
        """Steps below this have their line."""
        return self._audit.steps

    # ---- what comes in

    def record(self, lines: tuple[Line, ...]) -> tuple[Token, int] | None:
        """Take a worker's lines; returns token and number of done steps when a step is among them."""
        latest = None
        for line in lines:
            match line:
                case StepLine():
                    self._record_step(line)
                    latest = (line.token, line.step + 1)
                case EvaluationLine():
                    self._record_evaluation(line)
                case NoteLine():
                    self._tell(f"{line.worker}: {line.text}")
        return latest

    def saw(self, event: e.Event) -> None:
        """Note what an event means for the account."""
        match event:
            case e.WorkerLost():
                self._lost.add(event.worker)
            case e.GenerationJoined():
                self._joined(event)
            case e.TaskFailed():
                self._tell(f"{event.worker} raised in {event.failure.phase}: {event.failure.text.splitlines()[-1]}")

    def decided(self, effect: f.Effect) -> None:
        """Note a decision."""
        self._event(type(effect).__name__, effect)
        match effect:
            case f.FormGeneration():
                self._forming = effect
            case f.AbortGeneration():
                self._is_faulted = True
                self._tell(effect.reason)
            case f.StartStore() if effect.reason != self._state.why:
                self._tell(effect.reason)
            case f.Tell() | f.KillWorker() | f.ParkGeneration() | f.StopGeneration() | f.RunTaskAgain():
                self._tell(effect.reason)

    def _record_step(self, line: StepLine) -> None:
        ledger = LedgerLine(line.step, line.token, line.samples, line.digest)
        if not self._audit.add(ledger):
            return
        self._journal.add("ledger", line.step, line.token, ledger.to_json())
        metrics = {key: value for key, value in asdict(line).items() if key not in ("digest", "token")}
        self._journal.add("metrics", line.step, line.token, {"token": str(line.token), **metrics})
        if self._last is None or line.token != self._last.token:
            self._first_step_of(line)
        self._productive_s += line.step_s
        self._recent.append(line)
        self._last = line

    def _first_step_of(self, line: StepLine) -> None:
        """The first step of a generation; after a fault it ends the recovery, if there was a step to recover from."""
        if self._is_faulted and self._last is not None:
            seconds = line.done_at - self._last.done_at
            self.recovery_s.append(seconds)
            self._tell(f"recovered: step {line.step} done {seconds:.3f} s after the last one before the fault")
        self._is_faulted = False

    def _record_evaluation(self, line: EvaluationLine) -> None:
        if line.steps in self._evaluations:
            return
        self._evaluations[line.steps] = line.values
        shown = ", ".join(f"{name} {value:.4f}" for name, value in line.values.items())
        self._tell(f"evaluation after step {line.steps}: {shown}")
        self._journal.add("metrics", line.steps, line.token, {"evaluation": line.values, "steps": line.steps})

    def _joined(self, event: e.GenerationJoined) -> None:
        before = self._pids.get(event.worker.worker_id)
        if before is not None and before[0] not in self._lost and before[1] != event.pid:
            self._pids_unchanged = False
        self._pids[event.worker.worker_id] = (event.worker, event.pid)
        if self._forming is None or event.token != self._forming.token:
            return
        order, self._forming = self._forming, None
        made = Generation(event.token.generation, event.token.term, len(order.ranks), event.steps, order.reason)
        self.generations.append(made)
        self._tell(
            f"generation {made.generation}: {made.world_size} workers from step {made.resume_step}: {made.reason}"
        )

    # ---- what goes out

    def _tell(self, text: str) -> None:
        self._count += 1
        self._news.append((self._count, text))
        self._has_news.set()

    def _tell_from_thread(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._tell, text)

    def _event(self, name: str, effect: f.Effect) -> None:
        values = {key: _plain(value) for key, value in asdict(effect).items()}
        line = {"at": time.time(), "event": name, "phase": self._state.phase.value, **values}
        self._journal.add("events", self._state.done, self._state.token, line)

    async def await_news(self, cursor: int, timeout_s: float) -> None:
        """Until there is news behind `cursor`, at most so long."""
        if self._count > cursor:
            return
        self._has_news.clear()
        try:
            await asyncio.wait_for(self._has_news.wait(), timeout_s)
        except TimeoutError:
            return

    def snapshot(self, cursor: int, pids: dict[str, int], *, has_ended: bool) -> Standing:
        """How the run stands, with the news behind `cursor`."""
        last = self._last
        return Standing(
            phase=self._state.phase.value,
            step=self._audit.steps,
            steps=self._settings.steps,
            loss=None if last is None else last.loss,
            samples_per_s=self._per_second(sum(line.samples for line in list(self._recent)[1:])),
            steps_per_s=self._per_second(len(self._recent) - 1),
            world_size=len(self._state.group),
            news=tuple(text for number, text in self._news if number > cursor),
            cursor=self._count,
            has_ended=has_ended,
            pids=pids,
        )

    def _per_second(self, amount: float) -> float:
        if len(self._recent) < 2:
            return 0.0
        return amount / max(self._recent[-1].done_at - self._recent[0].done_at, 1e-9)

    def close(self, status: RunStatus, reason: str) -> None:
        """Write everything that is left, the summary last."""
        wall_s = time.time() - self._began_at
        last = self._last
        self.summary = {
            "name": self._settings.run_name,
            "status": status.value,
            "reason": reason,
            "steps": self._audit.steps,
            **self._audit.summary(self._settings.steps if status is RunStatus.FINISHED else 0),
            "generations": [asdict(generation) for generation in self.generations],
            "recovery_s": self.recovery_s,
            "survivor_pids_unchanged": self._pids_unchanged,
            "final_loss": None if last is None else last.loss,
            "evaluation": self._evaluations[max(self._evaluations)] if self._evaluations else None,
            "checkpoint": None,
            "wall_s": wall_s,
            "goodput": self._productive_s / wall_s,
            "path": str(self._folder.path / "summary.json"),
        }
        self._journal.close()
        try:
            self._folder.write_new("summary.json", (json.dumps(self.summary, indent=2) + "\n").encode())
        except OSError as error:
            self.summary["reason"] += f"; summary.json cannot be written: {error}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
