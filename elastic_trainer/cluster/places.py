"""Where each worker's elastic unit lies, and where it shall lie when its node is silent or being taken away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastic_trainer.cluster import placement
from elastic_trainer.control.events import Beat
from elastic_trainer.control.suspicion import SILENT_S
from elastic_trainer.vocabulary import Worker

POLL_S = 1.0  # one look at a placement group; the machine bounds the whole wait


class Places:
    """The placement groups of a run's workers.

    Args:
        run_name: Names them.
        resources: Of each.
        spawn: Runs a coroutine beside the caller.
    """

    def __init__(
        self, run_name: str, resources: Mapping[str, float], spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._run_name = run_name
        self._resources = resources
        self._spawn = spawn
        self._groups: dict[int, PlacementGroup] = {}  # by worker id
        self._moves: dict[int, int] = {}  # by worker id: how often it had to look for another place
        self._held_back: list[PlacementGroup] = []
        self._heard_at: dict[str, float] = {}  # by node id
        self._node_of: dict[Worker, str] = {}
        self._retired: set[Worker] = set()
        self.draining: set[str] = set()  # nodes that are being taken away
        self.is_ending = False

    def heard(self, beat: Beat) -> None:
        """A node's agent has spoken."""
        self._heard_at[beat.node] = time.monotonic()
        for pulse in beat.pulses:
            self._node_of[pulse.worker] = beat.node

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Agents of these nodes are gone, which says nothing of the nodes."""
        self._heard_at = {node_id: at for node_id, at in self._heard_at.items() if not is_meant(node_id)}

    def adopt(self, worker: Worker, group: PlacementGroup) -> None:
        """A worker of an earlier term lies there."""
        self._groups[worker.worker_id] = group

    async def reserve(self, worker: Worker) -> PlacementGroup | None:
        """The worker's place once its resources are there; None when the run ends, or wants it no more.

        Raises:
            GroupGone: Somebody has taken it away; the next try asks for another.
        """
        worker_id = worker.worker_id
        if (group := self._groups.get(worker_id)) is None:
            moves = self._moves.get(worker_id, 0)
            name = f"unit:{self._run_name}:{worker_id}" + (f":{moves}" if moves else "")
            group = self._groups[worker_id] = await asyncio.to_thread(placement.reserve, name, self._resources)
        try:
            while not await asyncio.to_thread(placement.is_reserved, group, POLL_S):
                if self.is_ending or worker in self._retired:
                    return None
        except placement.GroupGone:
            if worker in self._retired:
                return None
            self._groups.pop(worker_id, None)
            raise
        return group

    async def node_of(self, group: PlacementGroup) -> str | None:
        """The node on which it lies, once something can be started there; None when the run ends meanwhile."""
        while not self.is_ending:
            node_id = await asyncio.to_thread(placement.node_of, group)
            if node_id and not self._is_lost(node_id):  # what starts on a lost one would be waited for in vain
                return node_id
            await asyncio.sleep(POLL_S)
        return None

    def leave(self, worker: Worker) -> None:
        """The worker is given up: where its node is lost, its next life looks for resources elsewhere.

        What it had is kept until the node is back or Ray takes it for dead: else Ray would offer it again.
        """
        group, node_id = self._groups.get(worker.worker_id), self._node_of.get(worker)
        if group is not None and node_id is not None and self._is_lost(node_id):
            del self._groups[worker.worker_id]
            self._moves[worker.worker_id] = self._moves.get(worker.worker_id, 0) + 1
            self._spawn(self._release_later(group, node_id))

    async def give_back(self, worker: Worker) -> None:
        """No life of this worker follows; who waits for its place gives up."""
        self._retired.add(worker)
        if (group := self._groups.pop(worker.worker_id, None)) is not None:
            await asyncio.to_thread(remove_placement_group, group)

    async def release_all(self) -> None:
        """The run has ended."""
        for group in [*self._groups.values(), *self._held_back]:
            await asyncio.to_thread(remove_placement_group, group)

    def _is_lost(self, node_id: str) -> bool:
        heard_at = self._heard_at.get(node_id)
        return node_id in self.draining or (heard_at is not None and time.monotonic() - heard_at > SILENT_S)

    async def _release_later(self, group: PlacementGroup, node_id: str) -> None:
        self._held_back.append(group)
        while self._is_lost(node_id) and await asyncio.to_thread(placement.is_on, group, node_id):
            await asyncio.sleep(POLL_S)
        self._held_back.remove(group)
        await asyncio.to_thread(remove_placement_group, group)
