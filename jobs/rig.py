"""Hosts on one machine, to try elasticity: namespaces on a bridge of their own, each with a raylet, and their faults.

    sudo .venv/bin/python -m jobs.rig --hosts 3

starts a Ray cluster of three hosts with a CPU each and takes commands: run a job on it, switch a host off, cut its
cable, freeze it, announce that it will be taken away, and see what the run makes of it. All traffic stays inside: the
bridge lives in a namespace too, and nothing is routed out of it. A keeper process ends everything when this one does,
however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.cluster.processes import command_of

ROOT = Path(__file__).parent.parent
SUBNET = "10.213.0"
GCS_PORT = 6379
START_S = 60.0  # eight seconds on two idle cores
END_S = 30.0  # a killed process with gigabytes of memory on a busy machine
RAY = str(Path(sys.executable).with_name("ray"))
# Ray gives a silent node up after some six seconds instead of 15 to 60: what finds it sooner is ours, and a host that
# is started again does not wait for its former self
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
}
PORTS = ("--min-worker-port=20000", "--max-worker-port=20999")
RAYLET = ("--disable-usage-stats", "--object-store-memory=100000000", *PORTS)
ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", **HEALTH}


SLOW = "rate {rate} burst 64kb latency 50ms"


def why_not() -> str:
    """Why namespaces cannot be had here; empty where they can."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "the commands ip and nsenter are not installed"
    name = f"et{uuid.uuid4().hex[:8]}"
    inside = f"ip netns exec {name}"
    try:
        for what, command in (
            ("network namespaces", f"ip netns add {name}"),
            ("process namespaces", f"{inside} unshare -u -p -f --mount-proc true"),
            ("bridges", f"{inside} ip link add name bridge0 type bridge"),
            ("virtual cables", f"{inside} ip link add name cable0 type veth peer name cable1"),
            ("slow cables", f"{inside} tc qdisc add dev cable0 root tbf {SLOW.format(rate='1mbit')}"),
            (
                "isolated cables",
                f"{inside} bash -c 'ip link set cable0 master bridge0 && bridge link set dev cable0 isolated on'",
            ),
        ):
            tried = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=10)
            if tried.returncode:
                return f"{what} are refused: {tried.stderr.strip()}"
        return ""
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Host:
    """One of them; `index` 0 is the head."""

    def __init__(self, rig: Rig, index: int) -> None:
        self._rig = rig
        self.index = index
        self.name = f"{rig.name}h{index}"
        self.link = f"{rig.name}v{index}"  # the bridge's end of its cable
        self.address = f"{SUBNET}.{index + 1}"
        self.init: subprocess.Popen[bytes] | None = None
        self.ray: subprocess.Popen[bytes] | None = None
        self.had_fault = False  # since it was switched on
        self.flags: list[str] = []  # more for its `ray start`

    @property
    def head(self) -> Host:
        """The head of its cluster."""
        return self._rig.hosts[0]

    def boot(self) -> None:
        """Switch it on and start its raylet; does not wait for that."""
        self.switch_on()
        folder = self._rig.folder / f"{self.index}.{uuid.uuid4().hex[:4]}"
        common = ["--block", f"--node-ip-address={self.address}", f"--temp-dir={folder}", *RAYLET, *self.flags]
        if self.index == 0:
            port = self._rig.address.rpartition(":")[2]
            which = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
        else:
            which = [f"--address={self._rig.address}", "--num-cpus=1"]
        with open(self._rig.folder / f"{self.index}.log", "ab") as log:
            self.ray = self.start([RAY, "start", *which, *common], stdout=log, stderr=log)

    def switch_on(self) -> None:
        """Switch it on, without a raylet."""
        # the shell is process 1 of the host: it reaps what is orphaned there, and its end is the end of all
        shell = ["bash", "-c", f"hostname {self.name}; sleep infinity & wait"]
        apart = ["unshare", "-u", "-p", "-f", "--mount-proc", "--kill-child", *shell]
        command = ["ip", "netns", "exec", self.name, *apart]
        self.had_fault = False
        self.init = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        _await(lambda: self._first_pid() is not None, 10, lambda: f"{self.name} did not come up")

    def inside(self, command: list[str]) -> list[str]:
        """A command line that runs `command` on this host."""
        join = ["nsenter", "-t", str(self._first_pid()), "-n", "-u", "-p", "-m", f"--wd={ROOT}"]
        return [*join, "env", "RAY_AUTH_MODE=disabled", *command]

    def start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command on this host."""
        env = {**ENV, **self._rig.environment}
        return subprocess.Popen(self.inside(command), env=env, cwd=ROOT, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]

    def pids(self, role: str = "") -> list[int]:
        """Its processes, as this machine numbers them, whose title or command line holds `role`."""
        here = _process_namespace(os.getpid())  # also of what only brought a command there
        inside = [pid for pid in self._on_its_network() if _process_namespace(pid) not in (here, None)]
        return sorted(pid for pid in inside if (command := command_of(pid)) and role in command)

    def _on_its_network(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in listed.split()]

    def signal_all(self, signum: signal.Signals) -> None:
        """To each of its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signum)

    # ---- faults

    def power_off(self) -> None:
        """Every process of it is gone at once."""
        self.had_fault = True
        first = self._first_pid()
        if first is not None:
            os.kill(first, signal.SIGKILL)
        for bringer in (self.init, self.ray):  # they stop when what they brought is stopped, and nobody wakes them
            if bringer is not None:
                bringer.kill()
                bringer.wait()
        self.init = self.ray = None
        _await(lambda: not self.pids(), END_S, lambda: f"left on {self.name}: {self.pids()}")

    def cut(self) -> None:
        """Nothing comes in or goes out any more."""
        self.had_fault = True
        self._rig.on_hub("ip", "link", "set", self.link, "down")

    def blip(self, seconds: float) -> None:
        """What it sends is lost for so long. A cable that is put back carries nothing for up to a second more."""
        everybody = f"blackhole {SUBNET}.0/25"
        self._on_it("bash", "-c", f"ip route add {everybody}; sleep {seconds}; ip route del {everybody}")

    def isolate(self) -> None:
        """It reaches no other isolated host, but the head."""
        self.had_fault = True
        self._rig.on_hub("bridge", "link", "set", "dev", self.link, "isolated", "on")

    def cut_to(self, other: Host) -> None:
        """What it sends to the other host is lost; what that sends arrives."""
        self.had_fault = True
        self._on_it("ip", "route", "add", "blackhole", f"{other.address}/32")

    def slow(self, rate: str) -> None:
        """Its cable carries no more than `rate`, such as 100mbit."""
        self.had_fault = True
        self._rig.on_hub(*f"tc qdisc replace dev {self.link} root tbf {SLOW.format(rate=rate)}".split())

    def freeze(self) -> None:
        """Its processes stand still, its network answers."""
        self.had_fault = True
        self.signal_all(signal.SIGSTOP)

    def announce_preemption(self) -> None:
        """SIGTERM to `ray start --block`, as a cloud's agent sends it."""
        self.had_fault = True
        os.kill(self.pids(f"{RAY} start")[0], signal.SIGTERM)

    def heal(self) -> None:
        """Undo what can be undone: cuts, isolation, slowness, a freeze."""
        self.signal_all(signal.SIGCONT)
        self._rig.on_hub("ip", "link", "set", self.link, "up")
        self._rig.on_hub("bridge", "link", "set", "dev", self.link, "isolated", "off")
        subprocess.run(
            ["ip", "netns", "exec", self._rig.hub, "tc", "qdisc", "del", "dev", self.link, "root"], capture_output=True
        )
        for other in self._rig.hosts:
            route = ["ip", "-n", self.name, "route", "del", "blackhole", f"{other.address}/32"]
            subprocess.run(route, capture_output=True)

    def _on_it(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True)

    def _first_pid(self) -> int | None:
        if self.init is None:
            return None
        try:
            children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None


class Rig:
    """A cluster of a head without CPUs and `workers` hosts with one CPU each.

    Args:
        workers: Hosts beside the head.
        remembers: Ray's state is kept on disk, so that a head that is switched off and on knows its cluster again.
    """

    def __init__(self, workers: int, *, remembers: bool = False) -> None:
        self.name = f"et{uuid.uuid4().hex[:5]}"
        self.hub = f"{self.name}hub"
        self.address = f"{SUBNET}.1:{GCS_PORT}"
        self.folder = Path(tempfile.mkdtemp(prefix="et", dir="/tmp"))  # short: Ray's sockets lie below it
        self.environment = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{self.folder}/gcs"}
        self.environment = self.environment if remembers else {}
        self.hosts = [self._make_host(index) for index in range(workers + 1)]
        clean = f"trap '' INT TERM HUP; cat > /dev/null; ({self._clean_up()}; rm -rf {self.folder}) > /dev/null 2>&1"
        self._keeper = subprocess.Popen(["bash", "-c", clean], stdin=subprocess.PIPE, start_new_session=True)
        self._wire()

    def _make_host(self, index: int) -> Host:
        return Host(self, index)

    def _clean_up(self) -> str:
        names = " ".join([self.hub, *(host.name for host in self.hosts)])
        end = f"for n in {names}; do ip netns pids $n | xargs -r kill -9; ip netns del $n; done"
        return f"{end}; rm -rf /etc/netns/{self.name}*"

    def _wire(self) -> None:
        subprocess.run(["ip", "netns", "add", self.hub], check=True)
        self.on_hub("ip", "link", "add", "bridge0", "type", "bridge")
        self.on_hub("ip", "link", "set", "bridge0", "up")
        self.on_hub("ip", "addr", "add", f"{SUBNET}.254/24", "dev", "bridge0")
        for host in self.hosts:
            (folder := Path("/etc/netns") / host.name).mkdir(parents=True)
            # as Debian has it: a host's own name is an address at which no other can reach it
            own = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n"
            others = "".join(f"{each.address} {each.name}\n" for each in self.hosts if each is not host)
            (folder / "hosts").write_text(own + others)
            # a name server that refuses at once; one that is out of reach costs every process ten seconds
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
            subprocess.run(["ip", "netns", "add", host.name], check=True)
            self.on_hub("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            self.on_hub("ip", "link", "set", host.link, "master", "bridge0", "up")
            for command in (f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run(["ip", "-n", host.name, *command.split()], check=True)

    def start(self) -> None:
        """Switch every host on; returns when Ray has all of them."""
        self.start_head()
        for host in self.hosts[1:]:
            host.boot()
        self.await_nodes(len(self.hosts))

    def start_head(self) -> None:
        """Switch the head on alone, and wait until it can be asked."""
        self.hosts[0].boot()
        self._await_head()

    def mend(self) -> None:
        """Every host as new: those that had a fault are switched off and on."""
        for host in self.hosts[1:]:
            if host.had_fault:  # Ray may be about to end it for having been silent
                host.heal()
                host.power_off()
                host.boot()
        self.await_nodes(len(self.hosts))

    def await_nodes(self, count: int) -> None:
        """Until Ray has exactly so many living nodes."""
        self._ask_ray(
            f"end = time.monotonic() + {START_S}\n"
            f"while sum(node['Alive'] for node in ray.nodes()) != {count}:\n"
            "    sys.exit('nodes: %d' % sum(n['Alive'] for n in ray.nodes())) if time.monotonic() > end else None\n"
            "    time.sleep(0.1)\n"
        )

    def end_actors(self) -> None:
        """Of runs that are still going on."""
        self._ask_ray(
            "for each in ray.util.list_named_actors(all_namespaces=True):\n"
            "    if each['namespace'] == 'elastic_trainer':\n"
            "        try: ray.kill(ray.get_actor(each['name'], namespace='elastic_trainer'))\n"
            "        except ValueError: pass\n"
            "from ray.util.placement_group import *\n"
            "for group_id in placement_group_table():\n"
            "    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))\n"
        )

    def _ask_ray(self, code: str) -> None:
        begin = (
            f"import ray, sys, time\nray.init(address='{self.address}', log_to_driver=False, logging_level='error')\n"
        )
        command = self.hosts[0].inside([sys.executable, "-c", begin + code])
        asked = subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True)
        assert asked.returncode == 0, f"{asked.stderr}\n{self.logs()}"

    def _await_head(self) -> None:
        def listens() -> bool:
            asked = self.hosts[0].inside(["bash", "-c", f"</dev/tcp/{self.address.replace(':', '/')}"])
            return subprocess.run(asked, capture_output=True).returncode == 0

        _await(listens, START_S, self.logs)

    def logs(self) -> str:
        """What `ray start` said on every host."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def on_hub(self, *command: str) -> None:
        """Run a command where the bridge is."""
        subprocess.run(["ip", "netns", "exec", self.hub, *command], check=True)

    def close(self) -> None:
        """Switch everything off and take it down."""
        for host in self.hosts:
            host.power_off()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(30)
        left = self._left()
        assert self.name not in left, left

    def _left(self) -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def _process_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _await(look: Callable[[], bool], within_s: float, complain: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not look():
        if time.monotonic() > deadline:
            raise RuntimeError(complain())
        time.sleep(0.02)


COMMANDS = """\
run JOB.yaml [...]   start a job on the head, as `elastic-trainer run` would
off N | on N         switch host N off or on
cut N | heal N       pull its cable, and put everything right again
freeze N             its processes stand still
isolate N            it reaches no other isolated host, but the head
oneway N             what it sends to the head is lost
slow N               100 Mbit/s
preempt N            announce that it will be taken away
hosts                who is there
quit"""


class _Console:
    """Takes commands."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._jobs: list[subprocess.Popen[bytes]] = []

    def obey(self, line: str) -> None:
        """One line."""
        verb, *rest = line.split()
        if verb == "run":
            command = [sys.executable, "-m", "elastic_trainer", "run", *rest, "--address", self._rig.address]
            self._jobs.append(self._rig.hosts[0].start(command, stdin=subprocess.DEVNULL))
        elif verb == "hosts":
            for host in self._rig.hosts:
                print(f"{host.index}  {host.name}  {host.address}  {len(host.pids('ray::WorkerActor'))} workers")
        else:
            host = self._rig.hosts[int(rest[0])]
            verbs: dict[str, Callable[[], None]] = {
                "off": host.power_off,
                "on": host.boot,
                "cut": host.cut,
                "heal": host.heal,
                "freeze": host.freeze,
                "isolate": host.isolate,
                "oneway": lambda: host.cut_to(self._rig.hosts[0]),
                "slow": lambda: host.slow("100mbit"),
                "preempt": host.announce_preemption,
            }
            verbs[verb]()

    def close(self) -> None:
        """End the jobs that still run."""
        for job in self._jobs:
            job.terminate()


def main() -> None:
    """A rig, and commands from standard input until `quit` or its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3, help="beside the head (default 3)")
    options = parser.parse_args()
    if problem := why_not():
        sys.exit(f"no hosts can be made here: {problem}")
    rig = Rig(options.hosts)
    console = _Console(rig)
    try:
        print(f"starting {options.hosts} hosts", flush=True)
        rig.start()
        print(COMMANDS, flush=True)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            try:
                if line.strip():
                    console.obey(line)
            except (KeyError, IndexError, ValueError):
                print(COMMANDS, flush=True)
    finally:
        console.close()
        rig.close()


if __name__ == "__main__":
    main()
