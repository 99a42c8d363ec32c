"""Placement: one group per elastic unit, because a larger one can neither be resized nor recover piece by piece."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)

DRAIN_POLL_S = 0.25  # notices come half a minute or two before the end
HEAD = "node:__internal_head__"  # the resource by which Ray marks it


class GroupGone(Exception):
    """A placement group does not exist any more."""


def workers_that_fit(resources_per_worker: Mapping[str, float], *, beside_cpus: int = 0) -> int:
    """How many workers the cluster's living nodes can hold, taken as if they were empty.

    Args:
        resources_per_worker: Of each.
        beside_cpus: Whole CPUs that are set aside where that costs fewest workers; with fewer in all, none fit.
    """
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    for _ in range(beside_cpus):
        able = [node for node in nodes if node.get("CPU", 0.0) >= 1]
        if not able:
            return 0
        cheapest = min(able, key=lambda node: _cost(node, resources_per_worker))
        cheapest["CPU"] -= 1
    return sum(_held(node, resources_per_worker) for node in nodes)


def _held(node: Mapping[str, float], need: Mapping[str, float]) -> int:
    # a sum of tenths falls short of its whole number by rounding
    return min(math.floor(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items())


def _cost(node: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Workers that do not fit any more when one CPU is taken."""
    return _held(node, need) - _held({**node, "CPU": node["CPU"] - 1}, need)


def describe_cluster() -> str:
    """What the living nodes have, in words: `2 nodes with {CPU: 4}, {CPU: 2}`."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shown = [describe({name: n for name, n in sorted(node.items()) if _is_of_interest(name)}) for node in nodes]
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {', '.join(shown)}"


def describe(resources: Mapping[str, float]) -> str:
    """Resources in words: `{CPU: 0.5, GPU: 1}`."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"


def reserve(name: str, resources: Mapping[str, float]) -> PlacementGroup:
    """Ask for the resources of one elastic unit, or find what was asked for before; returns before they are there."""
    if (found := _find(name)) is not None:
        return found
    return placement_group([dict(resources)], strategy="STRICT_PACK", name=name, lifetime="detached")


def _find(name: str) -> PlacementGroup | None:
    return next((group for found, group in named(name) if found == name), None)


def is_reserved(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until a unit's resources are there; blocks.

    Raises:
        GroupGone: Somebody has removed the group.
    """
    try:
        return bool(group.wait(timeout_s))
    except RayError:
        raise
    except Exception as error:  # Ray has no class for it
        raise GroupGone(str(error)) from None


def node_of(group: PlacementGroup) -> str:
    """The node id on which a reserved unit lies, empty while Ray moves it; blocks for one round trip."""
    found = placement_group_table(group)
    if found.get("state") in (None, "REMOVED"):
        raise GroupGone("its placement group was removed")
    return str(next(iter(found["bundles_to_node_id"].values()), ""))


def named(prefix: str) -> list[tuple[str, PlacementGroup]]:
    """Name and group of all that begin so and are not removed."""
    return [
        (group["name"], PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
        for group_id, group in placement_group_table().items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    ]


def _is_of_interest(name: str) -> bool:
    return not name.startswith(("node:", "memory", "object_store_memory", "bundle_"))


def on_head() -> dict[str, float]:
    """Resources that put an actor on the cluster's head: it is the last to go, and the cluster goes with it.

    Not a soft affinity, which Ray 2.60 heeds for some actors without CPUs and not for others.
    """
    has_mark = any(node["Alive"] and HEAD in node["Resources"] for node in ray.nodes())
    return {HEAD: 0.001} if has_mark else {}


def is_on(group: PlacementGroup, node_id: str) -> bool:
    """Whether Ray still takes a unit to lie on this node."""
    found = placement_group_table(group)
    return found.get("state") == "CREATED" and node_id in found["bundles_to_node_id"].values()


def host_of(node_id: str) -> tuple[str, str]:
    """A node's name and address."""
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return str(node["NodeManagerHostname"]), str(node["NodeManagerAddress"])
    return node_id[:12], ""


def watch_drains(tell: Callable[[dict[str, float]], None]) -> None:
    """Call `tell` with the nodes that are being taken away and the seconds that each has left, when they change.

    In a thread of its own: Ray's answer can take as long as its head does.
    """

    def watch() -> None:
        before: set[str] = set()
        while True:
            try:
                deadlines = ray._private.state.state.get_draining_nodes()
            except Exception:  # the head is away: there is nothing to hear now
                deadlines = dict.fromkeys(before, 0)
            if set(deadlines) != before:
                before = set(deadlines)
                now_ms = 1000 * time.time()
                tell({node: max(0.0, (at - now_ms) / 1000) if at else 0.0 for node, at in deadlines.items()})
            time.sleep(DRAIN_POLL_S)

    threading.Thread(target=watch, name="drains", daemon=True).start()


def listening(nodes: Collection[str]) -> dict[str, tuple[str, int]]:
    """By node, address and port of its raylet, as far as Ray takes it to live."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in nodes
    }
