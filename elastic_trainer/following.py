"""Following a run from outside until it ends, over the deaths of its controllers; finding and stopping it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_trainer.cluster.local import join_cluster
from elastic_trainer.cluster.named_controller import find_controller
from elastic_trainer.errors import ClusterError, RunFailed
from elastic_trainer.observability.progress import ProgressView
from elastic_trainer.observability.standing import Standing
from elastic_trainer.vocabulary import RunStatus

WATCH_S = 30.0  # one answer of the controller, which takes a quarter of a second
BEGIN_S = 120.0  # for a controller to read the run's history: seconds, but a slow bucket may need all its repetitions
BACK_S = 60.0  # for Ray to start a dead controller again: 1.4 s where its node lives, else until the node is given up
OnStanding = Callable[[Standing], None]


@dataclass(frozen=True)
class Result:
    """How a run ended; `summary` is the content of its `summary.json`."""

    status: RunStatus
    summary: dict[str, Any]

    @property
    def path(self) -> str:
        """Of `summary.json`."""
        return str(self.summary["path"])


def attach(name: str, *, address: str | None = None, on_standing: OnStanding | None = None) -> Result:
    """Watch a run that is going on in a cluster until it ends; signals do not reach it.

    Args:
        name: Of the run.
        address: Of the cluster, by default the one that this process is connected to or that `RAY_ADDRESS` names.
        on_standing: Called with each look at the run.

    Raises:
        ClusterError: There is no such cluster, or the run is not going on in it.
        RunFailed: The run ended without finishing.
    """
    with join_cluster(address or "auto"), ProgressView(name) as view:
        controller = find_controller(name)
        if controller is None:
            raise ClusterError(
                f"run {name!r} is not going on in this cluster. `elastic-trainer runs ls` shows the runs."
            )
        return follow(name, controller, view, on_standing)


def follow(
    name: str,
    controller: ActorHandle,
    view: ProgressView,
    on_standing: OnStanding | None,
    on_other: Callable[[], None] = lambda: None,
) -> Result:
    """Watch a run until it ends, over the deaths of its controllers; `on_other` is called with each new one."""
    cursor = 0
    while True:
        try:
            standing: Standing = ray.get(controller.watch.remote(cursor), timeout=WATCH_S)
            cursor = standing.cursor
            view.show(standing)
            if on_standing is not None:
                on_standing(standing)
            if standing.has_ended:
                summary = ray.get(controller.summary.remote(), timeout=WATCH_S)
                break
        except RayActorError:
            view.say("the run's controller died; training goes on, and another takes over")
            controller, cursor = _await_controller(name), 0
            on_other()
        except GetTimeoutError:
            view.say(f"the run's controller has not answered for {WATCH_S:g} s; asking again")
            controller, cursor = _await_controller(name), 0
    controller.leave.remote()
    if summary["status"] == RunStatus.FAILED:
        where = f"\nSummary: {summary['path']}" if summary["path"] else ""
        raise RunFailed(f"run {name!r} failed: {summary['reason']}{where}")
    return Result(RunStatus(summary["status"]), summary)


def stop(name: str, by: str, at_once: bool) -> None:
    """Ask a run to end; one that is just beginning, or whose controller is being replaced, as soon as it is there."""
    with contextlib.suppress(ClusterError, RayActorError, GetTimeoutError):  # it is followed, and asked again then
        controller, _ = reach(name)
        ray.get(controller.stop.remote(by, at_once), timeout=WATCH_S)


def reach(name: str) -> tuple[ActorHandle, dict[str, Any]]:
    """The run's controller and how it describes itself; one that was just killed is on its way back."""
    deadline, why = time.monotonic() + BACK_S, ""
    while time.monotonic() < deadline:
        controller = find_controller(name)
        if controller is not None:
            try:
                return controller, ray.get(controller.describe.remote(), timeout=BEGIN_S)
            except RayActorError as error:
                why = f" ({str(error).strip().splitlines()[-1]})"
            except GetTimeoutError:
                break
        time.sleep(0.1)
    raise ClusterError(
        f"the controller of run {name!r} did not answer within {BACK_S:g} s{why}. Run the same name again: it resumes "
        "at the newest saved step."
    )


def _await_controller(name: str) -> ActorHandle:
    controller, found = reach(name)
    if found["problem"]:
        raise ClusterError(f"the controller of run {name!r} cannot go on: {found['problem']}")
    return controller
