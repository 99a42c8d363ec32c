"""The agent by itself, without Ray: whom it obeys, and what it keeps for a controller that is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from elastic_trainer.cluster.messages import Acknowledged, Report
from elastic_trainer.cluster.node_agent import AgentSpec, NodeAgent
from elastic_trainer.cluster.processes import this_process
from elastic_trainer.control import effects as f
from elastic_trainer.control import events as e
from elastic_trainer.errors import Fenced
from elastic_trainer.storage.probe import leave_marker
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Stage, Token, Worker
from tests.harness import settings_for

W = Worker(0, 0)
KNOWN = Acknowledged(7, Token(1, 1))


@pytest.fixture
def settings(dataset: str, tmp_path: Path) -> TrainSettings:
    return settings_for(dataset, steps=5, run_url=str(tmp_path))


class Method:
    """What `handle.report.remote(...)` is to an actor's handle."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    async def remote(self, term: int, reports: list[Report], beat: e.Beat) -> Acknowledged:
        if self._controller.state == "dead":
            raise RayActorError
        if self._controller.state == "stopped":
            await asyncio.Event().wait()
        self._controller.got += reports
        return KNOWN


class Controller:
    """Stands for a controller's handle."""

    def __init__(self) -> None:
        self.state = "alive"
        self.got: list[Report] = []
        self.report = Method(self)


def test_an_older_term_is_refused_whatever_it_wants(settings: TrainSettings) -> None:
    async def check() -> None:
        agent = NodeAgent(AgentSpec("mark", "node", ("host", "127.0.0.1"), settings, 600.0))
        controller: Any = Controller()
        await agent.attach(2, controller)

        order = f.AbortGeneration(Token(1, 1), (W,), "")
        for call in (
            agent.attach(1, controller),
            agent.deliver(1, [(W, order)]),
            agent.adopt(1, W, controller),
            agent.reap(1, W),
        ):
            with pytest.raises(Fenced, match="belongs to the controller of term 2"):
                await call
        await agent.deliver(2, [(W, order)])
        assert (await agent.exchange(Report(W, 0))).orders == (order,)

    asyncio.run(check())


@pytest.mark.parametrize("state", ["dead", "stopped"])
def test_reports_are_kept_while_there_is_no_controller(state: str, settings: TrainSettings) -> None:
    async def check() -> None:
        agent = NodeAgent(AgentSpec("mark", "node", ("host", "127.0.0.1"), settings, 600.0))
        first: Any = Controller()
        await agent.attach(1, first)
        first.state = state
        await agent.report(Report(W, 1, events=(e.WorkerWarm(W, 0, 5),)))  # overtook the one before it
        await agent.report(Report(W, 0, process=this_process()))
        await asyncio.sleep(0.05)  # the agent tries to deliver

        second: Any = Controller()
        found, _ = await agent.attach(2, second)
        for _ in range(200):
            if len(second.got) == 2:
                break
            await asyncio.sleep(0.02)

        assert [each.events for each in second.got] == [(), (e.WorkerWarm(W, 0, 5),)]
        assert found == (e.FoundWorker(W, Stage.WARM, holds=5),)
        answer = await agent.exchange(Report(W, 2))
        assert (answer.term, answer.acknowledged) == (2, KNOWN)

    asyncio.run(check())


def test_a_node_that_sees_another_folder_says_so(settings: TrainSettings) -> None:
    async def check() -> None:
        agent = NodeAgent(AgentSpec("mark", "node", ("host", "127.0.0.1"), settings, 600.0))
        marker = leave_marker(settings.open_store())

        assert await agent.look_at_storage(marker) == ""
        problem = await agent.look_at_storage((".probe/elsewhere", b"x"))
        assert f"sees another folder at storage {settings.run_url!r}" in problem

    asyncio.run(check())
