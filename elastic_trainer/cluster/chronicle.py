"""What the controller tells: ledger, metrics, events, news for the driver, and the summary at the end.

The account goes on over the terms of a run: each term begins with what the one before had last written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from elastic_trainer.cluster.messages import Acknowledged
from elastic_trainer.cluster.processes import ProcessId
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control import quorum
from elastic_trainer.control.state import Phase, State
from elastic_trainer.data.ledger import Audit, LedgerLine
from elastic_trainer.errors import StorageError
from elastic_trainer.observability.account import Account, Generation, Rebuild
from elastic_trainer.observability.journal import Journal
from elastic_trainer.observability.lines import EvaluationLine, Line, NoteLine, StepLine
from elastic_trainer.observability.standing import Standing
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import RunStatus, Token, Worker, counted

SUMMARY = "summary.json"
ACCOUNTS = "accounts"
NEWS_KEPT = 1000  # the driver reads several times a second; what it missed stands in the events
SHOWN = 8  # samples of a step
SPEED_OVER = 50  # steps over which the shown speed is taken


class Chronicle:
    """Keeps the account of a run for one term.

    Args:
        settings: Of the run.
        store: Where to write.
        state: Of the control machine, which is only read.
        audit: Of the ledger, as far as earlier terms have written it.
        account: Of the earlier terms.
    """

    def __init__(
        self, settings: TrainSettings, store: ObjectStore, state: State, audit: Audit, account: Account
    ) -> None:
        self._settings = settings
        self._store = store
        self._state = state
        self._loop = asyncio.get_event_loop()
        self._journal = Journal(store.create, self.tell_from_thread)
        self._audit = audit
        self._durable = Acknowledged(audit.steps)
        self.account = account
        self._term_began_at = time.time()
        self._active_before_s = account.active_s
        self._failed_before = account.saves_failed
        self._given_up_before = account.workers_given_up
        account.began_at = account.began_at or self._term_began_at
        self._news: deque[tuple[int, str]] = deque(maxlen=NEWS_KEPT)
        self._count = 0
        self._has_news = asyncio.Event()
        self._has_line = asyncio.Event()
        self._recent: deque[StepLine] = deque(maxlen=SPEED_OVER)
        self._last: StepLine | None = None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._forming: f.FormGeneration | None = None
        self._rebuild = Rebuild()
        self._ordered_at = 0.0  # when the generation that is being formed was ordered
        self._is_faulted = False
        self._pids: dict[int, tuple[Worker, int]] = {}  # by worker id, as said at the last join
        self._lost: set[Worker] = set()
        self.processes: dict[Worker, ProcessId] = {}
        self.has_new_generation = False
        self.summary: dict[str, Any] = {}

    @property
    def acknowledged(self) -> Acknowledged:
        """What stands in files."""
        return self._durable

    @property
    def steps(self) -> int:
        """Done steps without a gap."""
        return self._audit.steps

    @property
    def skipped_in_a_row(self) -> tuple[int, ...]:
        """The newest steps that updated nothing, but for those that the run went back to leave out."""
        rollback = self._state.rollback
        return self._audit.skipped_in_a_row(rollback.skipped if rollback is not None else ())

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
                    self.tell(f"{line.worker}: {line.text}")
        if latest is not None:
            self._has_line.set()
        return latest

    def saw(self, event: e.Event) -> None:
        """Note what an event means for the account."""
        match event:
            case e.WorkerLost():
                self._lost.add(event.worker)
                if event.worker in self._state.group:
                    self._notice()
            case e.GroupLeft():
                self._notice()
            case e.GroupFormed():
                self._rebuild.formed_at = time.time()
            case e.GenerationJoined():
                self._rebuild.joined_at = time.time()
                self._joined(event)
            case e.TaskFailed():
                self.tell(f"{event.worker} raised in {event.failure.phase}: {event.failure.text.splitlines()[-1]}")

    def decided(self, effect: f.Effect) -> None:
        """Note a decision."""
        self._event(type(effect).__name__, effect)
        match effect:
            case f.FormGeneration():
                self._forming = effect
                self._rebuild.ordered_at = self._ordered_at = time.time()
            case f.RecordResumption():
                if effect.steps < self._audit.steps:
                    self.tell(
                        f"steps {effect.steps} to {self._audit.steps - 1} are lost with their workers: done again"
                    )
                self._audit.go_back_to(effect.steps)
                self._durable = Acknowledged(min(self._durable.steps, effect.steps), self._durable.token)
            case f.AbortGeneration():
                self._is_faulted = True
                self._notice()
                self.tell(effect.reason)
            case f.StartStore() if effect.reason != "first start":
                self.tell(effect.reason)
            case f.KillWorker() | f.RetireWorker():
                self._lost.add(effect.worker)
                self.tell(f"{effect.worker}: {effect.reason}")
            case f.Tell() | f.SaveGeneration() | f.ParkGeneration() | f.StopGeneration() | f.RunTaskAgain():
                self.tell(effect.reason)

    def _notice(self) -> None:
        self._rebuild.noticed(time.time(), self._last.done_at if self._last else 0.0)

    def _record_step(self, line: StepLine) -> None:
        ledger = LedgerLine(line.step, line.token, line.samples, line.digest, line.skipped)
        if not self._audit.add(ledger):
            return
        self._journal.add("ledger", line.step, line.token, ledger.to_json())
        metrics = {key: value for key, value in asdict(line).items() if key not in ("digest", "token", "skipped")}
        if not math.isfinite(line.loss):
            metrics["loss"] = None  # JSON has no such numbers
        self._journal.add("metrics", line.step, line.token, {"token": str(line.token), **metrics})
        if line.skipped:
            self._skipped(line)
        if self._last is None or line.token != self._last.token:
            self._first_step_of(line)
        if (present := self._generation_of(line.token)) is not None:
            present.last_step_at = line.done_at
        self.account.productive_s += line.step_s
        self._recent.append(line)
        self._last = line
        if math.isfinite(line.loss):
            self.account.final_loss = line.loss

    def _skipped(self, line: StepLine) -> None:
        """Say which samples a step had that updated nothing."""
        order = self._settings.plan.order
        ids = [int(each) for rank in range(order.logical_ranks) for each in order.ids(line.step, rank)]
        shown = ", ".join(map(str, ids[:SHOWN])) + (", …" if len(ids) > SHOWN else "")
        reason = f"step {line.step} updates nothing: {line.skipped}; it had samples {shown}"
        self.tell(reason)
        event = {"at": time.time(), "event": "StepSkipped", "phase": self._state.phase.value, "reason": reason}
        self._journal.add("events", self._state.done, line.token, {**event, "step": line.step, "samples": ids})

    def _first_step_of(self, line: StepLine) -> None:
        """The first step of a generation; after a fault it ends the recovery, if there was a step to recover from."""
        if self._is_faulted and self._last is not None:
            seconds = line.done_at - self._last.done_at
            self.account.recovery_s.append(seconds)
            self.tell(f"recovered: step {line.step} done {seconds:.3f} s after the last one before the fault")
        self._is_faulted = False
        if (present := self._generation_of(line.token)) is not None:
            present.phases_s = self._rebuild.phases(line.done_at)
            self._rebuild = Rebuild()

    def _generation_of(self, token: Token) -> Generation | None:
        """The newest generation, when it has this token."""
        newest = self.account.generations[-1] if self.account.generations else None
        return newest if newest is not None and (newest.term, newest.generation) == token else None

    def _record_evaluation(self, line: EvaluationLine) -> None:
        if line.steps in self._evaluations:
            return
        self._evaluations[line.steps] = self.account.evaluation = line.values
        shown = ", ".join(f"{name} {value:.4f}" for name, value in line.values.items())
        self.tell(f"evaluation after step {line.steps}: {shown}")
        self._journal.add("metrics", line.steps, line.token, {"evaluation": line.values, "steps": line.steps})

    def _joined(self, event: e.GenerationJoined) -> None:
        before = self._pids.get(event.worker.worker_id)
        if before is not None and before[0] not in self._lost and before[1] != event.pid:
            self.account.pids_unchanged = False
        self._pids[event.worker.worker_id] = (event.worker, event.pid)
        if self._forming is None or event.token != self._forming.token:
            return
        order, self._forming = self._forming, None
        newest = order.sources[0].steps if order.sources else 0
        made = Generation(
            event.token.generation,
            event.token.term,
            len(order.ranks),
            event.steps,
            order.reason if event.steps >= newest else f"{order.reason}, which could not be restored",
            self._ordered_at,
            [str(worker) for worker in order.ranks],
        )
        self.account.generations.append(made)
        self.has_new_generation = True
        self.tell(
            f"generation {made.generation}: {counted(made.world_size, 'worker')} from step {made.resume_step}: "
            f"{made.reason}"
        )

    # ---- what goes out

    def tell(self, text: str) -> None:
        """A piece of news for whoever watches."""
        self._count += 1
        self._news.append((self._count, text))
        self._has_news.set()

    def tell_from_thread(self, text: str) -> None:
        """The same, from a thread other than the loop's."""
        self._loop.call_soon_threadsafe(self.tell, text)

    def _event(self, name: str, effect: f.Effect) -> None:
        values = {key: _plain(value) for key, value in asdict(effect).items()}
        line = {"at": time.time(), "event": name, "phase": self._state.phase.value, **values}
        token = max(self._state.token, Token(self._state.term, 0))  # of this term, even before its first generation
        self._journal.add("events", self._state.done, token, line)

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
            term=self._state.term,
            saved=self._state.saved[-1].steps if self._state.saved else None,
            members=tuple(map(str, self._state.group)),
            spares=len(quorum.ready_workers(self._state)) if self._state.phase is Phase.RUNNING else 0,
        )

    def _per_second(self, amount: float) -> float:
        if len(self._recent) < 2:
            return 0.0
        return amount / max(self._recent[-1].done_at - self._recent[0].done_at, 1e-9)

    # ---- what is written

    async def flush(self) -> bool:
        """Write what has come in since the last time; returns whether all of it stands."""
        steps, token = self._audit.steps, self._last.token if self._last else self._durable.token
        self._bring_up_to_date()
        account = json.dumps(asdict(self.account)).encode()
        is_done = await asyncio.to_thread(self._flush, account)
        if is_done:
            self._durable = max(self._durable, Acknowledged(min(steps, self._audit.steps), token))
        return is_done

    async def account_of(self, steps: int, within_s: float) -> dict[str, Any]:
        """What a saved entry says besides, once every line of the steps that it contains stands in a file.

        Raises:
            StorageError: The lines did not come, or cannot be written.
        """
        deadline = self._loop.time() + within_s
        while self._audit.steps < steps or not await self.flush():
            if self._loop.time() > deadline:
                raise StorageError(f"the ledger's lines up to step {steps} could not be written in {within_s:g} s")
            self._has_line.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_line.wait(), 0.2)
        return {
            "evaluation": self._evaluations.get(steps, {}),
            "audit": self._audit.to_dict(steps),
            "ledger": self._journal.take_ledger_segments(),
        }

    async def close(self, status: RunStatus, reason: str) -> None:
        """Write everything that is left, the summary last."""
        self.summary = self.facts(status, reason)
        await self.flush()
        try:
            content = (json.dumps(self.summary, indent=2) + "\n").encode()
            await asyncio.to_thread(self._store.put, SUMMARY, content)
        except StorageError as error:
            self.summary["reason"] += f"; {SUMMARY} cannot be written: {error}"

    def facts(self, status: RunStatus, reason: str) -> dict[str, Any]:
        """The content of `summary.json`."""
        self._bring_up_to_date()
        account = self.account
        newest = self._state.saved[-1] if self._state.saved else None
        return {
            "name": self._settings.run_name,
            "status": status.value,
            "reason": reason,
            "steps": self._audit.steps,
            **self._audit.summary(self._settings.steps if status is RunStatus.FINISHED else 0),
            "terms": self._state.term,
            "generations": [asdict(generation) for generation in account.generations],
            "recovery_s": account.recovery_s,
            "survivor_pids_unchanged": account.pids_unchanged,
            "final_loss": account.final_loss,
            "evaluation": account.evaluation,
            "checkpoint": None if newest is None else {"steps": newest.steps, "path": newest.path},
            "saves_failed": account.saves_failed,
            "workers_given_up": account.workers_given_up,
            "wall_s": account.active_s,
            "goodput": account.productive_s / max(account.active_s, 1e-9),
            "path": f"{self._store.url}/{SUMMARY}",
        }

    def _flush(self, account: bytes) -> bool:
        is_done = self._journal.flush()
        try:
            # one file a term: an older controller that wakes writes into its own
            self._store.put(f"{ACCOUNTS}/{self._state.term:06d}.json", account)
        except StorageError as error:
            self.tell_from_thread(f"the account cannot be written: {error}")
        return is_done

    def _bring_up_to_date(self) -> None:
        self.account.at = time.time()
        self.account.active_s = self._active_before_s + self.account.at - self._term_began_at
        self.account.saves_failed = self._failed_before + self._state.saves_failed
        self.account.workers_given_up = self._given_up_before + self._state.suspected


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
