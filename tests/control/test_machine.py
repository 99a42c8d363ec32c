"""The control machine: transcripts that read as stories, and long random histories that keep its laws.

A transcript (tests/scenarios/*.txt) is a list of events, each followed by the effects that it must have. To accept a
change after reading it: `UPDATE_SCENARIOS=1 pytest tests/control/test_machine.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import ENDED, Limits, Phase, State
from elastic_trainer.vocabulary import RunStatus, Token, Worker
from tests.control.pretend import Pretence

SCENARIOS = Path(__file__).parent.parent / "scenarios"
LIMITS = {"place_s": 30.0, "form_s": 20.0, "leave_s": 300.0}


def worker(text: str) -> Worker:
    worker_id, incarnation = re.fullmatch(r"w(\d+)\.(\d+)", text).groups()  # type: ignore[union-attr]
    return Worker(int(worker_id), int(incarnation))


def events_of(line: str) -> tuple[float, list[e.Event]]:
    """`12.5 GroupLeft w0.0 w1.0 1-1 cause=parked holds=7 "words"`: one event for each worker named."""
    words = re.findall(r'"[^"]*"|\S+', line)
    time, kind = float(words[0]), getattr(e, words[1])
    workers, values = [], {}
    for word in words[2:]:
        if re.fullmatch(r"w\d+\.\d+", word):
            workers.append(worker(word))
        elif re.fullmatch(r"\d+-\d+", word):
            term, generation = word.split("-")
            values["token"] = Token(int(term), int(generation))
        elif word.startswith('"'):
            text = {e.WorkerLost: "cause", e.StoreLost: "cause", e.GroupLeft: "detail", e.StopRequested: "by"}[kind]
            values[text] = word.strip('"')
        else:
            name, _, value = word.partition("=")
            values[name] = value_of(name, value)
    if kind is e.TaskFailed:
        values["failure"] = e.Failure(values.pop("phase"), "ValueError", values.pop("line"), "ValueError: bad row")
        values.setdefault("token", None)
    if kind is e.StoreReady:
        values = {"host": "10.0.0.1", "port": 4000}
    return time, [kind(each, **values) for each in workers] if workers else [kind(**values)]


def value_of(name: str, text: str) -> Any:
    if name == "cause":
        return e.Left(text.replace("_", " "))
    if name == "phase":
        return e.TaskPhase(text)
    if name == "line":
        return text
    return {"-": None, "yes": True}.get(text, int(text) if text.isdigit() else text)


def words_of(effect: f.Effect) -> str:
    """An effect as a transcript has it."""
    name = type(effect).__name__
    match effect:
        case f.StartWorker() | f.KillWorker() | f.RunTaskAgain():
            what = str(effect.worker)
        case f.FormGeneration():
            fresh = " fresh" if effect.is_fresh else ""
            sources = f" from {' '.join(str(each.steps) for each in effect.sources)}" if effect.sources else ""
            what = f"{effect.token} ranks {' '.join(map(str, effect.ranks))}{fresh}{sources}"
        case f.AbortGeneration() | f.ParkGeneration() | f.StopGeneration():
            what = f"{effect.token} {' '.join(map(str, effect.workers))}"
        case f.WritePieces() | f.CommitSave() | f.SettleSave():
            workers = getattr(effect, "writers", getattr(effect, "workers", ()))
            attempt = "" if isinstance(effect, f.SettleSave) else f" attempt={effect.attempt}"
            what = f"step={effect.steps} {effect.token}{attempt} {' '.join(map(str, workers))}".rstrip()
        case f.RecordResumption():
            what = f"{effect.token} step={effect.steps}"
        case f.EndRun():
            what = effect.status.value
        case f.StartStore() | f.Tell():
            what = ""
    reason = effect.reason.replace("\n", " / ")
    return f"    -> {name} {what} | {reason}".replace("  |", " |")


def play(text: str) -> str:
    """The transcript with the effects that the machine really decides."""
    machine: Machine | None = None
    out = []
    for line in text.splitlines():
        if line.startswith("    ->"):
            continue
        out.append(line)
        if line.startswith("limits"):
            found = dict(word.split("=") for word in line.split()[1:])
            low, high = int(found.pop("min")), int(found.pop("max"))
            machine = Machine(Limits(low, high, **{**LIMITS, **{k: float(v) for k, v in found.items()}}))
        elif line and not line.startswith("#"):
            assert machine is not None
            time, events = events_of(line)
            for event in events:
                before = machine.snapshot()
                effects = machine.handle(event, time)
                machine.check()
                assert_goes_through_json(machine)
                if not effects and machine.snapshot() == before:
                    out.append("    -> ignored") if not isinstance(event, e.TimePassed) else None
                out += [words_of(effect) for effect in effects]
    return "\n".join(out) + "\n"


def assert_goes_through_json(machine: Machine) -> None:
    again = State.from_dict(json.loads(json.dumps(machine.snapshot())))
    assert again == machine.state


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    played = play(text)
    if os.environ.get("UPDATE_SCENARIOS"):
        path.write_text(played)
        return
    assert played == text


def test_there_are_scenarios() -> None:
    assert len(list(SCENARIOS.glob("*.txt"))) >= 10


def long_history(seed: int, steps: int) -> Pretence:
    """A random run: workers come up, step, die, raise, and their reports arrive twice, late and out of order."""
    chooser = random.Random(seed)
    least = chooser.choice([1, 1, 2])
    machine = Machine(Limits(least, chooser.choice([2, 3, 4]), **LIMITS))
    pretence = Pretence(machine, chooser, last_step=steps)
    pretence.run()
    return pretence


def assert_ended_well(pretence: Pretence, seed: int) -> None:
    if "no saved step can be restored" in pretence.reason:
        return  # three times in a row, by chance
    assert pretence.machine.state.phase is Phase.FINISHED, f"seed {seed}: {pretence.reason}"
    assert pretence.highest == pretence.last_step, f"seed {seed}"


@pytest.mark.parametrize("part", range(20))
def test_random_histories_keep_the_laws_and_come_to_an_end(part: int, seed_of_the_day: int) -> None:
    for number in range(15):
        seed = (seed_of_the_day * 20 + part) * 15 + number
        pretence = long_history(seed, 60)
        assert pretence.machine.state.phase in ENDED, f"seed {seed} hangs: {pretence.machine.snapshot()}"
        assert_ended_well(pretence, seed)


@pytest.mark.soak
def test_many_random_histories() -> None:
    for seed in range(20_000):
        pretence = long_history(seed, 40)
        assert pretence.machine.state.phase in ENDED, f"seed {seed} hangs"
        assert_ended_well(pretence, seed)


def test_deaths_at_every_step_do_not_end_a_run() -> None:
    pretence = Pretence(
        Machine(Limits(1, 3, settle_s=(0.0,), **LIMITS)), random.Random(1), last_step=100, kill_each_step=True
    )
    pretence.run()

    assert pretence.status is RunStatus.FINISHED
    assert pretence.kills >= 50


def test_after_the_end_nothing_has_effects() -> None:
    machine = Machine(Limits(1, 2, **LIMITS))
    machine.handle(e.RunBegan(), 0.0)
    assert machine.handle(e.StopRequested("a test", at_once=True), 1.0) == [
        f.EndRun(RunStatus.STOPPED, "stopped by a test")
    ]

    assert machine.handle(e.WorkerPlaced(Worker(0, 0)), 2.0) == []
    assert machine.next_deadline() is None
