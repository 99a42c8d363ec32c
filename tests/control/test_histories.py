"""A Hypothesis state machine over control: it shrinks to the shortest history that breaks a law.

In it are kills, joins, new controllers, late, doubled and reordered reports, and saves whose outcome stays unknown.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elastic_trainer.control import events as e
from elastic_trainer.control.machine import Machine
from elastic_trainer.control.state import ENDED, Limits, State
from elastic_trainer.vocabulary import RunStatus, Stage
from tests.control.pretend import Pretence

LAST = 60


class Histories(RuleBasedStateMachine):
    """Each rule lets one thing happen; the laws are checked after every event inside `Pretence`."""

    @initialize(least=st.integers(1, 2), more=st.integers(0, 2), seed=st.integers(0, 1 << 20))
    def begin(self, least: int, more: int, seed: int) -> None:
        limits = Limits(least, least + more, place_s=30.0, form_s=20.0, leave_s=300.0)
        self.world = Pretence(Machine(limits), random.Random(seed), last_step=LAST)
        self.stopped = False
        self.world.begin()

    @property
    def is_over(self) -> bool:
        return self.world.machine.state.phase in ENDED

    @precondition(lambda self: not self.is_over)
    @rule(times=st.integers(1, 20))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            if not self.is_over:
                self.world.advance()

    @precondition(lambda self: not self.is_over and self.world.workers)
    @rule(which=st.integers(0, 10))
    def a_worker_dies(self, which: int) -> None:
        living = sorted(self.world.workers)
        self.world.die(living[which % len(living)])

    @precondition(lambda self: not self.is_over and self.world.workers)
    @rule()
    def everybody_dies(self) -> None:
        for worker in sorted(self.world.workers):
            self.world.die(worker)

    @precondition(lambda self: not self.is_over)
    @rule(which=st.integers(0, 10))
    def the_task_raises(self, which: int) -> None:
        training = [w for w in sorted(self.world.workers) if self.world.workers[w].stage is Stage.TRAINING]
        if training:
            worker = training[which % len(training)]
            self.world.fail(worker, self.world.workers[worker].holds or 0)

    @precondition(lambda self: not self.is_over)
    @rule()
    def another_controller_takes_over(self) -> None:
        self.world.next_term()

    @precondition(lambda self: not self.is_over)
    @rule()
    def the_store_dies(self) -> None:
        self.world.decide(e.StoreLost("killed"))

    @precondition(lambda self: not self.is_over and not self.stopped)
    @rule()
    def somebody_stops_the_run(self) -> None:
        self.stopped = True
        self.world.decide(e.StopRequested("somebody"))

    @precondition(lambda self: self.is_over)
    @rule()
    def nothing_more_happens(self) -> None:
        assert self.world.machine.handle(e.TimePassed(), self.world.now) == []

    @invariant()
    def the_state_goes_to_json_and_back(self) -> None:
        if hasattr(self, "world"):
            state = self.world.machine.state
            assert State.from_dict(state.to_dict()) == state

    def teardown(self) -> None:
        """Whatever happened, left alone the run comes to an end that fits."""
        if not hasattr(self, "world"):
            return
        while not self.is_over:
            assert self.world.now < 100_000, f"hangs: {self.world.machine.snapshot()}"
            self.world.advance()
        status = self.world.status
        if status is RunStatus.FINISHED:
            assert self.world.highest == LAST
        elif status is RunStatus.STOPPED:
            assert self.stopped
        else:
            known = ("no saved step can be restored", "the task raised on every worker at first start")
            assert self.world.reason.startswith(known), self.world.reason


def test_histories_keep_the_laws_and_come_to_an_end() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.soak
def test_many_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=3000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
