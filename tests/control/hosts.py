"""Pretended hosts for the control machine: they beat, and fall silent, stop or stand still when they are told."""

from __future__ import annotations

import json
from typing import Any

from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import Limits, Phase, State
from elastic_trainer.vocabulary import Token, Worker

BEAT_S = 0.15
TOKEN = Token(1, 1)
W = [Worker(number, 0) for number in range(8)]


class Cluster:
    """Workers on a host each, in a running generation; time goes by in beats."""

    def __init__(self, workers: int = 3, least: int = 1, **limits: Any) -> None:
        self.machine = Machine(Limits(least, workers, place_s=30.0, form_s=20.0, leave_s=300.0, **limits))
        self.now = 100.0
        self.effects: list[f.Effect] = []
        self.where = {w: e.Whereabouts(e.TaskPhase.LOSS, 5, 0, 50, 0.02) for w in W[:workers]}
        self.moving = set(W[:workers])
        self.silent: set[Worker] = set()
        self.stopped: set[Worker] = set()
        self.busy: set[Worker] = set()
        self.mute: set[Worker] = set()
        self.told_s = 5.0  # ago, by those
        self.unreachable: tuple[tuple[str, str], ...] | None = ()  # None: who is asked does not answer
        self.take(e.RunBegan())
        for w in W[:workers]:
            self.take(e.WorkerPlaced(w))
            self.take(e.WorkerWarm(w, 0, None))
        self.take(e.StoreReady("10.0.0.9", 4000))  # now a generation can be formed
        for w in W[:workers]:
            self.take(e.GenerationJoined(w, TOKEN, 5))
        assert self.machine.state.phase is Phase.RUNNING
        self.pass_time(3.0)
        self.effects.clear()

    def take(self, event: e.Event) -> None:
        new = self.machine.handle(event, self.now)
        self.effects += new
        self.machine.check()
        if not isinstance(event, e.Beat):
            state = json.loads(json.dumps(self.machine.snapshot()))
            assert State.from_dict(state).to_dict() == self.machine.snapshot()
        for effect in new:
            if isinstance(effect, f.ProbeHosts) and self.unreachable is not None:
                self.take(e.HostsProbed(effect.nodes, self.unreachable))

    def beat(self, w: Worker) -> None:
        if w in self.moving:
            self.enter(w, self.where[w].phase)
        told_s = self.told_s if w in self.mute else 0.1
        pulse = e.Pulse(w, self.where[w], told_s, w in self.stopped, w in self.busy)
        self.take(e.Beat(f"n{w.worker_id}", f"host{w.worker_id}", f"10.0.0.{w.worker_id}", (pulse,)))

    def enter(self, w: Worker, phase: e.TaskPhase, **values: Any) -> None:
        before = self.where[w]
        values = {"stays": before.stays, "longest_s": before.longest_s, "pace_s": before.pace_s, **values}
        self.where[w] = e.Whereabouts(phase, before.steps, before.mark + 1, **values)

    def waits(self, *workers: Worker) -> None:
        for w in workers:
            self.enter(w, e.TaskPhase.REDUCE)
            self.moving.discard(w)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_S
            for w in self.where:
                if w not in self.silent:
                    self.beat(w)
            self.take(e.TimePassed())
            deadline = self.machine.next_deadline()
            assert deadline is None or deadline > self.now, "a deadline that has passed would be waited for again"

    def until_given_up(self, most_s: float) -> tuple[float, list[Worker], str]:
        """After how many seconds who was given up, and why."""
        began = self.now
        while self.now < began + most_s:
            self.pass_time(BEAT_S)
            if aborts := [each for each in self.effects if isinstance(each, f.AbortGeneration)]:
                killed = [each.worker for each in self.effects if isinstance(each, f.KillWorker)]
                return self.now - began, killed, aborts[0].reason
        raise AssertionError(f"nobody was given up in {most_s} s")

    @property
    def kills(self) -> list[f.KillWorker]:
        return [each for each in self.effects if isinstance(each, f.KillWorker)]
