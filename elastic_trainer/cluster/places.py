"""Where each worker's elastic unit lies, and where it shall lie when its node is silent or being taken away."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastic_trainer.cluster import placement
from elastic_trainer.control.events import Beat
from elastic_trainer.control.suspicion import BROKEN_S, SILENT_S
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
        self._prefix = f"unit:{run_name}:"
        self._resources = resources
        self._spawn = spawn
        self._groups: dict[int, PlacementGroup] = {}  # by worker id
        self._owners: dict[int, Worker] = {}  # by worker id: the life that the group was reserved for
        self._lies_on: dict[int, str] = {}  # by worker id: the node of that group
        self._moves: dict[int, int] = {}  # by worker id: how often it had to look for another place
        self._heard_at: dict[str, float] = {}  # by node id
        self._retired: set[Worker] = set()
        self.draining: set[str] = set()  # nodes that are being taken away
        self.is_ending = False

    def heard(self, beat: Beat) -> None:
        """A node's agent has spoken."""
        self._heard_at[beat.node] = time.monotonic()
        for pulse in beat.pulses:
            if self._owners.get(pulse.worker.worker_id) == pulse.worker:
                self._lies_on[pulse.worker.worker_id] = beat.node

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Agents of these nodes are gone, which says nothing of the nodes."""
        self._heard_at = {node_id: at for node_id, at in self._heard_at.items() if not is_meant(node_id)}

    def adopt(self, worker: Worker, group: PlacementGroup) -> None:
        """A worker of an earlier term lies there."""
        self._groups[worker.worker_id], self._owners[worker.worker_id] = group, worker

    async def take_stock(self) -> None:
        """Of the groups of earlier terms remove those in which nobody was found, and do not use their names again."""
        kept = {group.id for group in self._groups.values()}
        for name, group in await asyncio.to_thread(placement.named, self._prefix):
            worker_id, _, moves = name.removeprefix(self._prefix).partition(":")
            self._moves[int(worker_id)] = max(self._moves.get(int(worker_id), 0), int(moves or 0) + 1)
            if group.id not in kept:
                await asyncio.to_thread(remove_placement_group, group)

    async def reserve(self, worker: Worker) -> PlacementGroup | None:
        """The worker's place once its resources are there; None when the run ends, or wants it no more.

        Raises:
            GroupGone: Somebody has taken it away; the next try asks for another.
        """
        worker_id = worker.worker_id
        if (node_id := self._lies_on.get(worker_id)) is not None and self._is_lost(node_id):
            self._move(worker_id, node_id)
        self._owners[worker_id] = worker
        if (group := self._groups.get(worker_id)) is None:
            moves = self._moves.get(worker_id, 0)
            name = f"{self._prefix}{worker_id}" + (f":{moves}" if moves else "")
            group = self._groups[worker_id] = await asyncio.to_thread(placement.reserve, name, self._resources)
        try:
            while not await asyncio.to_thread(placement.is_reserved, group, POLL_S):
                if self.is_ending or worker in self._retired:
                    return None
        except placement.GroupGone:
            if worker in self._retired:
                return None
            self._drop(worker_id)
            raise
        return group

    async def node_of(self, group: PlacementGroup) -> str | None:
        """The node on which it lies, once something can be started there; None when the run ends meanwhile.

        Raises:
            GroupGone: Somebody has taken it away.
        """
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
        worker_id = worker.worker_id
        node_id = self._lies_on.get(worker_id)
        if self._owners.get(worker_id) == worker and node_id is not None and self._is_lost(node_id, BROKEN_S):
            self._move(worker_id, node_id)

    def _move(self, worker_id: int, node_id: str) -> None:
        if (group := self._groups.get(worker_id)) is not None:
            self._drop(worker_id)
            self._spawn(self._release_later(group, node_id))

    def _drop(self, worker_id: int) -> None:
        self._groups.pop(worker_id, None)
        self._lies_on.pop(worker_id, None)
        self._moves[worker_id] = self._moves.get(worker_id, 0) + 1  # a name is used once

    async def give_back(self, worker: Worker) -> None:
        """No life of this worker follows; who waits for its place gives up."""
        self._retired.add(worker)
        if self._owners.get(worker.worker_id) == worker and (group := self._groups.get(worker.worker_id)) is not None:
            self._drop(worker.worker_id)
            await asyncio.to_thread(remove_placement_group, group)

    async def release_all(self) -> None:
        """The run has ended."""
        for _, group in await asyncio.to_thread(placement.named, self._prefix):
            await asyncio.to_thread(remove_placement_group, group)

    def _is_lost(self, node_id: str, silent_s: float = SILENT_S) -> bool:
        heard_at = self._heard_at.get(node_id)
        return node_id in self.draining or (heard_at is not None and time.monotonic() - heard_at >= silent_s)

    async def _release_later(self, group: PlacementGroup, node_id: str) -> None:
        try:
            while self._is_lost(node_id) and await asyncio.to_thread(placement.is_on, group, node_id):
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(remove_placement_group, group)
        except Exception as error:  # Ray's head does not answer: `release_all` finds the group by its name
            print(f"a place could not be released yet: {error!r}", file=sys.stderr, flush=True)
