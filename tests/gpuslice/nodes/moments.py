"""Trainings on several nodes while agents are stopped and killed, and networks cut, at random moments.

    python -m tests.gpuslice.nodes.moments [--engine ssh|ray] [--moments 50] [--seed N]

Each job must end well, with the digest of an undisturbed training: every one of them has another way. A
node's network is a proxy between its agent and the scheduler. On nodes of Ray, Ray is killed and started
again, too, with or without all that runs there.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from gpuslice.config import LOCK_DIR

from ...cli.conftest import Shell, shell_in
from ...patience import PATIENCE_S
from ...sched_core.live.proxy import Proxy
from .machines import Machines, machines_in, shell_of
from .ray_start import StartedRay
from .sharing import ATTACHED, EPOCHS

#: The hosts by ssh, by the names of their nodes.
HOSTS = {"b": "one", "c": "two"}
KINDS = ("stop", "kill", "cut", "hold")
#: What Python runs at the start of each process of a Ray node.
_SITECUSTOMIZE = """
import sys
if "gpuslice.node_agents.agent_process" in sys.orig_argv:
    import zmq
    direct = zmq.Socket.connect
    zmq.Socket.connect = lambda self, at: direct(self, at.replace(":{port}", ":{proxy}"))
"""
JOBS = 4
NODE_TIMEOUT_S = 10.0
#: Too short to be noticed, so long that a node is silent, and so long that it is lost.
LASTS_S = (0.5, 5.0, NODE_TIMEOUT_S + 3.0)


class Site:
    """A scheduler with two other nodes whose networks can be cut, and a few jobs that go slowly.

    Parameters
    ----------
    shell, root
        The scheduler's commands, and a directory for what jobs wait for.
    proxies
        The network of each node.
    agent
        Returns the process id of a node's agent.
    """

    kinds = KINDS
    restarts = 0

    def __init__(
        self, shell: Shell, root: Path, proxies: dict[str, Proxy], agent: Callable[[str], int]
    ) -> None:
        self.shell, self.proxies, self._agent = shell, proxies, agent
        self.enough = root / "enough"
        self.jobs: list[str] = []

    def submit(self) -> None:
        """Submit the jobs."""
        for number in range(JOBS):
            words = ("submit", "--name", f"j{number}", "--max-restarts", str(self.restarts))
            self.jobs.append(self.shell(*words, str(ATTACHED), EPOCHS, str(self.enough)).strip())

    def disturb(self, kind: str, node: str, for_s: float) -> None:
        """Disturb ``node`` for a while, or kill its agent."""
        proxy = self.proxies[node]
        if kind in ("cut", "hold"):
            (proxy.cut if kind == "cut" else proxy.hold)()
            time.sleep(for_s)
            proxy.mend()
            return
        with suppress(ProcessLookupError, FileNotFoundError):  # it is just being started again
            agent = self._agent(node)
            os.kill(agent, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                time.sleep(for_s)
                os.kill(agent, signal.SIGCONT)

    def check(self) -> None:
        """Raise ``AssertionError`` if a job has failed, or a restart was used up."""
        for job in self.shell.client().jobs():
            assert job.state not in ("failed", "cancelled"), job
            assert job.restarts <= self.restarts, job

    def finish(self, undisturbed: str) -> None:
        """Let the jobs end, and compare each with an undisturbed training."""
        self.enough.touch()
        client = self.shell.client()
        for job in self.jobs:
            ended = client.wait(job, PATIENCE_S)
            assert ended is not None, self.shell("ps", "--wide")
            assert ended.state == "succeeded", ended
            assert ended.restarts <= self.restarts, ended
            assert self.shell("logs", job).strip() == undisturbed, job


class RaySite(Site):
    """The same on nodes of Ray, which can be killed.

    Parameters
    ----------
    ray
        The cluster.
    """

    kinds = (*KINDS, "ray", "reboot")
    #: A training whose processes are gone with its node begins its next attempt: more than there are moments.
    restarts = 1000

    def __init__(self, shell: Shell, ray: StartedRay, proxies: dict[str, Proxy]) -> None:
        super().__init__(shell, ray.root, proxies, self._pid)
        self._ray = ray

    def _pid(self, node: str) -> int:
        return int((self.shell.directory / "nodes" / node / "scheduler.pid").read_text())

    def disturb(self, kind: str, node: str, for_s: float) -> None:
        """Kill Ray on ``node``, or all that runs there, and start Ray again; else as for all sites."""
        if kind not in ("ray", "reboot"):
            super().disturb(kind, node, for_s)
            return
        self._ray.kill(node)
        if kind == "reboot":
            self._kill_all_on(node)
        time.sleep(for_s)
        self._ray.start(wait=False)

    def _kill_all_on(self, node: str) -> None:
        """Kill the agent and the jobs of ``node``, and empty its RAM disk, as a reboot does."""
        place = str(self.shell.directory / "nodes" / node)
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self._pid(node), signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has just ended, or is somebody else's
                if place in process.environ().get("GPUSLICE_SOCKET", ""):
                    process.kill()
        shutil.rmtree(self._ray.ramdisk(node), ignore_errors=True)


@contextmanager
def ssh_site_in(shm: Path) -> Iterator[Site]:
    """A site of machines by ssh, with their RAM disks in ``shm``."""
    with ExitStack() as opened:
        machines = opened.enter_context(machines_in(shm))
        port, proxies = _networks(opened)
        _route(machines, port, {host: proxies[node] for node, host in HOSTS.items()})
        shell = opened.enter_context(shell_of(machines))
        shell.variables["GPUSLICE_RAMDISK_DIR"] = str(machines.ramdisks / "own")
        shell.variables[LOCK_DIR] = str(machines.root)
        hosts = (word for node, host in HOSTS.items() for word in ("--node", f"{node}={host}"))
        _up(shell, port, "--switch-share", "0", *hosts)
        yield Site(shell, machines.root, proxies, lambda node: machines.agent(HOSTS[node], node))
        shell("down")


@contextmanager
def ray_site_in(shm: Path) -> Iterator[Site]:
    """A site of nodes of Ray, with their RAM disks in ``shm``."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray makes a token in the user's home
    with ExitStack() as opened:
        port, proxies = _networks(opened)
        environs = {node: _routed(shm / f"net-{node}", port, proxy) for node, proxy in proxies.items()}
        ray = StartedRay(shm, ("a", *proxies), environs)
        opened.callback(ray.kill)
        ray.start()
        root = opened.enter_context(tempfile.TemporaryDirectory(prefix="g-"))
        shell = opened.enter_context(shell_in(Path(root) / "s"))
        shell.variables["GPUSLICE_RAMDISK_DIR"] = str(ray.ramdisk("a"))
        shell.variables[LOCK_DIR] = root
        _up(shell, port, "--ray", ray.address, "--wait-for-node", "5s")
        yield RaySite(shell, ray, proxies)
        shell("down")


SITES = {"ssh": ssh_site_in, "ray": ray_site_in}


def _networks(opened: ExitStack) -> tuple[int, dict[str, Proxy]]:
    """A port for agents, and the network of each node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    proxies = {node: Proxy(port) for node in HOSTS}
    for proxy in proxies.values():
        opened.callback(proxy.close)
    return port, proxies


def _up(shell: Shell, port: int, *words: str) -> None:
    shell(
        *("up", "--devices", "cpu:1", "--quantum", "2s"),
        *("--agent-port", f"127.0.0.1:{port}", "--node-timeout", f"{NODE_TIMEOUT_S:g}s"),
        *("--replicate-every", "1", *words),
        deadline_s=4 * PATIENCE_S,
    )


def _routed(directory: Path, port: int, proxy: Proxy) -> dict[str, str]:
    """Variables with which an agent reaches the scheduler's ``port`` by a proxy."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(port=port, proxy=proxy.port))
    return {"PYTHONPATH": str(directory)}


def _route(machines: Machines, port: int, proxies: dict[str, Proxy]) -> None:
    """Have each machine reach the scheduler's ``port`` by its own proxy."""
    cases = " ".join(f"{host}) proxy={proxy.port};;" for host, proxy in proxies.items())
    *rest, last = machines.command.read_text().splitlines()
    setup, _, _ = last.rpartition(" && exec")
    route = f'{setup} && sed "s/:{port}/:$proxy/g" | sh -c "$2"'
    machines.command.write_text("\n".join([*rest, f'case "$1" in {cases} esac', route]) + "\n")


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)  # what was started is ended, too


def main() -> None:
    """Disturb a site as often as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(SITES), default="ssh")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    signal.signal(signal.SIGTERM, _end)
    alone = subprocess.run(
        [sys.executable, ATTACHED, EPOCHS], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, SITES[options.engine](Path(shm)) as site:
        site.submit()
        for number in range(options.moments):
            time.sleep(draw.uniform(0.0, 3.0))
            kind, node = draw.choice(site.kinds), draw.choice(sorted(HOSTS))
            for_s = draw.choice(LASTS_S)
            print(f"{number}: {kind} {node} {for_s:g} s", flush=True)
            site.disturb(kind, node, for_s)
            site.check()
        site.finish(alone)
        restarts = sum(job.restarts for job in site.shell.client().jobs())
    print(f"{options.moments} moments, {JOBS} jobs, {restarts} restarts: all digests as undisturbed")


if __name__ == "__main__":
    main()
