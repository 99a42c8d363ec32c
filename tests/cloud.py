"""A cloud of the rig's hosts for Ray's own autoscaler: it asks for hosts, which are then switched on, and off again.

The autoscaler runs on the head, in namespaces from which the other hosts cannot be made. So `RigProvider` writes what
it wants into a folder, and `Cloud`, in the process that has the rig, does it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_CLUSTER_NAME,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from jobs.rig import GCS_PORT, RAY, RAYLET, ROOT, Host, Rig

ANSWER_S = 60.0  # starting a raylet takes seconds
IDLE_MINUTES = 0.2
HEAD = "i-head"


class Cloud:
    """Does what the provider asks for.

    Attributes:
        launched: How many hosts were switched on.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._folder = rig.folder / "cloud"
        self._folder.mkdir()
        tags = {
            TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
            TAG_RAY_USER_NODE_TYPE: "head",
            TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
        }
        # by instance: index of the host, tags
        self._nodes: dict[str, dict[str, Any]] = {HEAD: {"host": 0, "tags": {**tags, TAG_RAY_CLUSTER_NAME: rig.name}}}
        self.launched = 0
        self._ends = threading.Event()
        start = f"{RAY} start --address=$RAY_HEAD_IP:{GCS_PORT} --node-ip-address=$NODE_IP {' '.join(RAYLET)}"
        config = {
            "cluster_name": rig.name,
            "max_workers": len(rig.hosts) - 1,
            "upscaling_speed": 100.0,
            "idle_timeout_minutes": IDLE_MINUTES,
            "provider": {"type": "external", "module": "tests.cloud.RigProvider", "folder": str(self._folder)},
            "auth": {"ssh_user": "root"},
            "available_node_types": {
                "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {
                    "resources": {"CPU": 1},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": len(rig.hosts) - 1,
                },
            },
            "head_node_type": "head",
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [f"{start} --temp-dir={rig.folder}/u$NODE_IP"],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            **{f"{part}setup_commands": [] for part in ("", "head_", "worker_")},
            "initialization_commands": [],
        }
        path = rig.folder / "autoscaling.yaml"
        path.write_text(yaml.safe_dump(config))
        rig.hosts[0].flags.append(f"--autoscaling-config={path}")
        rig.environment |= {"PYTHONPATH": str(ROOT), "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        rig.environment |= {
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_NODE_TYPE_NAME": "head",
            "RAY_enable_autoscaler_v2": "1",
        }
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def hosts(self) -> list[Host]:
        """Those that are let, beside the head."""
        return [self._rig.hosts[node["host"]] for node in list(self._nodes.values()) if node["host"]]

    def close(self) -> None:
        """Nothing is done any more."""
        self._ends.set()
        self._thread.join(ANSWER_S)

    def _serve(self) -> None:
        while not self._ends.wait(0.05):
            for path in sorted(self._folder.glob("*.ask")):
                asked = json.loads(path.read_text())
                path.unlink()
                # a raylet takes seconds to start: others are not to wait for it
                threading.Thread(target=self._answer, args=(path.with_suffix(".answer"), asked), daemon=True).start()

    def _answer(self, path: Path, asked: dict[str, Any]) -> None:
        verb = asked.pop("verb")
        try:
            answer = {"value": getattr(self, f"_{verb}")(**asked)}
        except Exception as error:
            answer = {"error": repr(error)}
        written = path.with_suffix(".part")
        written.write_text(json.dumps(answer))
        written.rename(path)

    def _nodes_with(self, tags: dict[str, str]) -> list[str]:
        return [i for i, node in list(self._nodes.items()) if tags.items() <= node["tags"].items()]

    def _node(self, instance: str) -> dict[str, Any] | None:
        node = self._nodes.get(instance)
        return None if node is None else {**node, "address": self._rig.hosts[node["host"]].address}

    def _tag(self, instance: str, tags: dict[str, str]) -> None:
        if instance in self._nodes:
            self._nodes[instance]["tags"].update(tags)

    def _create(self, tags: dict[str, str], count: int) -> dict[str, Any]:
        let = {node["host"] for node in self._nodes.values()}
        free = [host for host in self._rig.hosts[1:] if host.index not in let][:count]
        made = {}
        for host in free:
            host.power_off()
            host.switch_on()
            self.launched += 1
            instance = f"i-{self.launched:04d}"
            self._nodes[instance] = made[instance] = {"host": host.index, "tags": dict(tags)}
        return made

    def _terminate(self, instance: str) -> None:
        node = self._nodes.pop(instance, None)
        if node is not None:
            self._rig.hosts[node["host"]].power_off()

    def _run(self, instance: str, command: str, environment: dict[str, str]) -> str:
        host = self._rig.hosts[self._nodes[instance]["host"]]
        given = [f"{name}={value}" for name, value in environment.items()] + [f"NODE_IP={host.address}"]
        with (self._rig.folder / f"{host.index}.log").open("ab") as log:
            started = host.start(["env", *given, "bash", "-c", command], stdout=log, stderr=log)
            if started.wait(ANSWER_S):
                raise RuntimeError(f"{command!r} ended with {started.returncode}")
        return ""


def _ask(folder: str, verb: str, **arguments: Any) -> Any:
    name = Path(folder) / f"{time.time():.6f}-{uuid.uuid4().hex}"
    part = name.with_suffix(name.suffix + ".part")
    part.write_text(json.dumps({"verb": verb, **arguments}))
    asked = Path(f"{name}.ask")
    part.rename(asked)
    answer = asked.with_suffix(".answer")
    deadline = time.monotonic() + ANSWER_S
    while not answer.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cloud does not answer to {verb}")
        time.sleep(0.02)
    found = json.loads(answer.read_text())
    answer.unlink()
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["value"]


class _Runner(CommandRunnerInterface):
    def __init__(self, folder: str, instance: str) -> None:
        self._folder, self._instance = folder, instance

    def run(self, cmd: str | None = None, *_: Any, environment_variables: Any = None, **__: Any) -> str:
        values = environment_variables or {}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        return str(_ask(self._folder, "run", instance=self._instance, command=cmd, environment=texts))

    def run_rsync_up(self, *_: Any, **__: Any) -> None:
        """All hosts see the same files."""

    def run_rsync_down(self, *_: Any, **__: Any) -> None:
        """All hosts see the same files."""

    def remote_shell_command_str(self) -> str:
        return "true"

    def run_init(self, **_: Any) -> bool | None:
        return None


class RigProvider(NodeProvider):
    """Ray's interface to a cloud, on the head."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder = provider_config["folder"]

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        found: list[str] = _ask(self._folder, "nodes_with", tags=tag_filters)
        return found

    def is_running(self, node_id: str) -> bool:
        return _ask(self._folder, "node", instance=node_id) is not None

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict((_ask(self._folder, "node", instance=node_id) or {"tags": {}})["tags"])

    def internal_ip(self, node_id: str) -> str | None:
        node = _ask(self._folder, "node", instance=node_id)
        return None if node is None else str(node["address"])

    external_ip = internal_ip

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        _ask(self._folder, "tag", instance=node_id, tags=tags)

    def create_node(self, node_config: Any, tags: dict[str, str], count: int) -> dict[str, Any]:
        made: dict[str, Any] = _ask(self._folder, "create", tags=tags, count=count)
        if not made:
            raise NodeLaunchException("InsufficientInstanceCapacity", "all hosts are let", None)
        return made

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> dict[str, Any]:
        return self.create_node(node_config, tags, count)

    def terminate_node(self, node_id: str) -> None:
        _ask(self._folder, "terminate", instance=node_id)

    def get_command_runner(self, log_prefix: str, node_id: str, *_: Any, **__: Any) -> _Runner:
        return _Runner(self._folder, node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config
