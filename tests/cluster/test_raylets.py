"""Raylets that stand in for hosts where namespaces are refused: tests of hosts pass on them, or are skipped."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest

from jobs.rig import Rig, why_not
from tests.cluster.hosts_run import HOSTS, HostsRun
from tests.raylets import Raylets
from tests.rotation import rotating, turn

REFUSED = "as if namespaces were refused"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    made = Raylets(HOSTS, REFUSED)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("fault", rotating(["power_off", "freeze", "stop_worker", "announce_preemption"], 1, 1, 4))
def test_what_a_raylet_can_suffer(train: Callable[..., HostsRun], fault: str) -> None:
    run = train(steps=160)
    run.await_step(20)
    victim = run.hosts()[1]
    workers = {host.index: run.worker_on(host) for host in run.hosts() if host is not victim}

    run.strike(victim, fault)

    run.command.await_line("generation 2: 2 workers from step", 30)
    assert {host.index: run.worker_on(host) for host in run.hosts() if host is not victim} == workers
    run.finish()


@turn(1, 4)
def test_what_needs_a_network_of_its_own_is_skipped_and_says_why(rig: Rig) -> None:
    host = rig.hosts[1]
    for strike in (
        host.cut,
        host.isolate,
        lambda: host.cut_to(rig.hosts[0]),
        lambda: host.slow("100mbit"),
        lambda: host.blip(0.1),
    ):
        with pytest.raises(pytest.skip.Exception, match=f"cannot be .*: {REFUSED}"):
            strike()


def test_hosts_are_had_where_namespaces_are() -> None:
    """Else a mistake in looking for them would have everybody test raylets, and nobody notice."""
    name = f"et{uuid.uuid4().hex[:8]}"
    try:
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no hosts here: {error}")
    if tried.returncode:
        pytest.skip(f"no hosts here: {tried.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)
    assert why_not() == ""
