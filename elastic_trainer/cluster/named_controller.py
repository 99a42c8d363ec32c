"""The controller as Ray knows it: its name, how it is found, and how it is started."""

from __future__ import annotations

import ray
from ray.actor import ActorHandle

from elastic_trainer.cluster import placement
from elastic_trainer.cluster.controller import Controller, ControllerSpec
from elastic_trainer.vocabulary import NAMESPACE


def controller_name(run_name: str) -> str:
    """The actor's name in Ray."""
    return f"controller:{run_name}"


def find_controller(run_name: str) -> ActorHandle | None:
    """The run's controller in this cluster, if it lives."""
    try:
        return ray.get_actor(controller_name(run_name), namespace=NAMESPACE)
    except ValueError:
        return None


def make_controller(spec: ControllerSpec) -> ActorHandle:
    """Start the controller of a run, or find the one that somebody else has just started."""
    handle: ActorHandle = (
        ray.remote(Controller)
        .options(
            name=controller_name(spec.unit.run_name),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
            resources=placement.on_head(),
        )
        .remote(spec)
    )
    return handle
