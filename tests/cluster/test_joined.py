"""Runs on a cluster that exists: as a Ray job and from the command line, with token authentication on and off."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_trainer.cluster.processes import descendants, kill_all, with_mark
from tests.rayrun import ENDED_S, ROOT, await_value, job_config
from tests.rotation import rotating, turn

MARK = "ELASTIC_TRAINER_TEST"
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayCluster:
    """`ray start --head --block` with ports and a folder of its own."""

    def __init__(self, auth: str, folder: Path, cpus: int = 4) -> None:
        self.mark = uuid.uuid4().hex
        self.temp = tempfile.mkdtemp(prefix="et-", dir="/tmp")
        port, self.dashboard = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            MARK: self.mark,
            "RAY_AUTH_MODE": auth,
            "RAY_TMPDIR": self.temp,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        if auth == "token":
            environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self.environment = environment
        self.log = folder / "ray.log"
        dashboard = ("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}")
        self.nodes = [
            self._start(
                cpus,
                ("--head", f"--port={port}", "--include-dashboard=true", *dashboard),
            )
        ]

    def add_node_without(self, folder: Path, cpus: int) -> None:
        """Another node, with a mount namespace of its own in which `folder` is empty and its own."""
        apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
        # a raylet removes and unpacks anew the sent code that it finds in its folder, also under another's worker
        own = f"--temp-dir={self.temp}/{len(self.nodes)}"
        self.nodes.append(self._start(cpus, [f"--address={self.address}", own], apart))

    def _start(self, cpus: int, role: Sequence[str], inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        command = [*inside, str(BIN / "ray"), "start", "--block", f"--num-cpus={cpus}", *role]
        command += [f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}"]
        command += [f"--runtime-env-agent-port={free_port()}", "--object-store-memory=150000000"]
        with open(self.log, "a") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=self.log.parent, start_new_session=True
            )

    def jobs(self, *arguments: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """A `ray job` command."""
        return subprocess.run(
            [str(BIN / "ray"), "job", arguments[0], f"--address=http://127.0.0.1:{self.dashboard}", *arguments[1:]],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=ROOT,
            timeout=within_s,
        )

    def run(self, *arguments: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Our command, joined to the cluster."""
        return subprocess.run(
            [str(BIN / "elastic-trainer"), *arguments],
            capture_output=True,
            text=True,
            env={**self.environment, "RAY_ADDRESS": self.address},
            cwd=ROOT,
            timeout=within_s,
        )

    def await_ready(self) -> None:
        """Jobs can be submitted."""
        await_value(lambda: True if self.jobs("list").returncode == 0 else None, 60, lambda: self.log.read_text())

    def driver_pids(self, name: str) -> list[int]:
        """Processes of the run's driver in the cluster."""
        found = []
        for process in with_mark(MARK, self.mark):
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"elastic-trainer") for word in words[:2]) and name.encode() in b" ".join(words):
                found.append(process.pid)
        return found

    def end(self) -> None:
        """Everything of it."""
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
        for _ in range(50):
            left = with_mark(MARK, self.mark) + [each for node in self.nodes for each in descendants(node.pid)]
            if not left:
                break
            kill_all(left, signal.SIGKILL)
            time.sleep(0.05)
        for node in self.nodes:
            node.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture(params=rotating(["disabled", "token"], 1))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RayCluster]:
    running = RayCluster(request.param, tmp_path)
    try:
        running.await_ready()
        yield running
    finally:
        running.end()


def write_job(folder: Path, dataset: str, **fields: Any) -> Path:
    config = job_config(folder, dataset, None, **fields)
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_job_whose_driver_is_killed_goes_on_and_is_found_again(
    cluster: RayCluster, tmp_path: Path, dataset: str
) -> None:
    """Then `ray job stop` ends it, saved."""
    job = write_job(tmp_path, dataset, steps=100_000, task_args={"delay_s": 0.01})
    folder = tmp_path / "runs/job"
    submit = ("submit", "--no-wait", "--working-dir", ".", "--")

    first = cluster.jobs(*submit, "elastic-trainer", "run", str(job))
    assert first.returncode == 0, first.stdout + first.stderr
    accounts = folder / "accounts/000001.json"
    await_value(
        lambda: True if accounts.exists() and '"generation": 1' in accounts.read_text() else None,
        90,
        lambda: cluster.jobs("list").stdout,
    )
    for pid in cluster.driver_pids("job.yaml"):
        os.kill(pid, signal.SIGKILL)
    before = cluster.run("status", "job", "--storage", str(tmp_path / "runs"))
    assert "running" in before.stdout, before.stdout + before.stderr

    second = cluster.jobs(*submit[:1], "--submission-id", "again", *submit[1:], "elastic-trainer", "run", str(job))
    assert second.returncode == 0, second.stdout + second.stderr
    await_value(
        lambda: True if "attached to it" in cluster.jobs("logs", "again").stdout else None,
        60,
        lambda: cluster.jobs("logs", "again").stdout,
    )
    listed = cluster.run("runs", "ls", "--storage", str(tmp_path / "runs"))
    assert "job   running" in listed.stdout, listed.stdout + listed.stderr
    cluster.jobs("stop", "--no-wait", "again")

    summary = await_value(
        lambda: json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else None,
        60,
        lambda: cluster.jobs("logs", "again").stdout,
    )
    assert summary["status"] == "stopped"
    assert summary["terms"] == 1
    assert summary["checkpoint"]["steps"] == summary["steps"] > 0
    assert (summary["samples_missing"], summary["samples_repeated"]) == (0, 0)
    await_value(
        lambda: (
            True if "job   stopped" in cluster.run("runs", "ls", "--storage", str(tmp_path / "runs")).stdout else None
        ),
        ENDED_S,
        lambda: "the run does not end",
    )


@turn(0, 3)
@turn(1, 2)
def test_two_submissions_at_once_are_one_run_and_a_third_must_agree(tmp_path: Path, dataset: str) -> None:
    cluster = RayCluster("disabled", tmp_path)
    try:
        cluster.await_ready()
        job = write_job(tmp_path, dataset, steps=100_000, task_args={"delay_s": 0.01})
        environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        drivers = [
            subprocess.Popen(
                [str(BIN / "elastic-trainer"), "run", str(job)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            for _ in range(2)
        ]
        accounts = tmp_path / "runs/job/accounts/000001.json"
        await_value(
            lambda: True if accounts.exists() and '"generation": 1' in accounts.read_text() else None,
            90,
            lambda: "no generation",
        )

        other = write_job(tmp_path, dataset, steps=100_000, task_args={"delay_s": 0.01}, seed=5)
        refused = cluster.run("run", str(other))
        assert refused.returncode == 2, refused.stdout
        assert "seed = 5 differs from the 0" in refused.stderr
        stopped = cluster.run("runs", "stop", "job")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert "stopped: stopped by elastic-trainer runs stop; saved after step" in stopped.stdout

        outputs = [driver.communicate(timeout=60)[0] for driver in drivers]
        assert sum("attached to it" in output for output in outputs) == 1, outputs
        assert all("0 missing, 0 repeated" in output for output in outputs), outputs
        assert json.loads((tmp_path / "runs/job/summary.json").read_text())["terms"] == 1
    finally:
        cluster.end()


@turn(2, 6)
def test_a_missing_cluster_and_a_missing_token_are_explained(tmp_path: Path, dataset: str) -> None:
    job = write_job(tmp_path, dataset)
    cluster = RayCluster("token", tmp_path)
    try:
        cluster.await_ready()
        without = {n: v for n, v in cluster.environment.items() if n not in ("RAY_AUTH_TOKEN", MARK)}
        command = [str(BIN / "elastic-trainer"), "run", str(job), "--address", cluster.address]
        for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
            refused = subprocess.run(
                command, capture_output=True, text=True, env={**without, **wrong}, cwd=ROOT, timeout=120
            )
            assert refused.returncode == 1, refused.stdout + refused.stderr
            assert "RAY_AUTH_TOKEN" in refused.stderr, refused.stderr
            assert "Traceback" not in refused.stderr, refused.stderr
    finally:
        cluster.end()


@turn(2, 3)
def test_a_folder_that_the_nodes_do_not_share_is_found_at_the_start(tmp_path: Path, dataset: str) -> None:
    """And the node that has another one is named."""
    storage = tmp_path / "runs"
    storage.mkdir()
    job = write_job(tmp_path, dataset, scaling={"max_workers": 2, "resources_per_worker": {"CPU": 1}})
    cluster = RayCluster("disabled", tmp_path, cpus=1)
    try:
        cluster.await_ready()
        cluster.add_node_without(storage, cpus=1)
        refused = cluster.run("run", str(job))
        assert refused.returncode == 1, refused.stdout + refused.stderr
        assert "sees another folder at storage" in refused.stderr, refused.stdout + refused.stderr
        assert "Use a file system that all nodes share, or s3://" in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stdout + refused.stderr
        # the summary is written by the controller's node, which may be either; the other's folder is seen from outside
        places = [storage, Path(f"/proc/{cluster.nodes[-1].pid}/root{storage}")]
        summaries = [path for place in places if (path := place / "job/summary.json").exists()]
        assert [json.loads(path.read_text())["status"] for path in summaries] == ["failed"]
        assert not [path for place in places for path in place.glob("job/steps/*")]
    finally:
        cluster.end()
