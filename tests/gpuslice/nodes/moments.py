"""Trainings on machines by ssh while agents are stopped and killed, and networks cut, at random moments.

    python -m tests.gpuslice.nodes.moments [--moments 50] [--seed N]

Each job must end well, with the digest of an undisturbed training, and use up no restart: every one of them
has another way. A machine's network is a proxy between its agent and the scheduler.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpuslice.config import LOCK_DIR

from ...cli.conftest import Shell
from ...patience import PATIENCE_S
from ...sched_core.live.proxy import Proxy
from .machines import Machines, machines_in, shell_of
from .sharing import ATTACHED, EPOCHS

#: The hosts, by the names of their nodes.
HOSTS = {"b": "one", "c": "two"}
JOBS = 4
NODE_TIMEOUT_S = 10.0
#: Too short to be noticed, so long that a node is silent, and so long that it is lost.
LASTS_S = (0.5, 5.0, NODE_TIMEOUT_S + 3.0)


class Site:
    """A scheduler with two machines whose networks can be cut, and a few jobs that go slowly.

    Parameters
    ----------
    shell, machines
        The scheduler's commands, and the machines.
    proxies
        The network of each machine, by host.
    """

    def __init__(self, shell: Shell, machines: Machines, proxies: dict[str, Proxy]) -> None:
        self.shell, self.machines, self.proxies = shell, machines, proxies
        self.enough = machines.root / "enough"
        self.jobs: list[str] = []

    def submit(self) -> None:
        """Submit the jobs."""
        for number in range(JOBS):
            words = ("submit", "--name", f"j{number}", str(ATTACHED), EPOCHS, str(self.enough))
            self.jobs.append(self.shell(*words).strip())

    def disturb(self, kind: str, node: str, for_s: float) -> None:
        """Disturb ``node`` for a while, or kill its agent."""
        host = HOSTS[node]
        proxy = self.proxies[host]
        if kind in ("cut", "hold"):
            (proxy.cut if kind == "cut" else proxy.hold)()
            time.sleep(for_s)
            proxy.mend()
            return
        with suppress(ProcessLookupError, FileNotFoundError):  # it is just being started again
            agent = self.machines.agent(host, node)
            os.kill(agent, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                time.sleep(for_s)
                os.kill(agent, signal.SIGCONT)

    def check(self) -> None:
        """Raise ``AssertionError`` if a job has failed, or a restart was used up."""
        for job in self.shell.client().jobs():
            assert job.state not in ("failed", "cancelled"), job
            assert job.restarts == 0, job

    def finish(self, undisturbed: str) -> None:
        """Let the jobs end, and compare each with an undisturbed training."""
        self.enough.touch()
        client = self.shell.client()
        for job in self.jobs:
            ended = client.wait(job, PATIENCE_S)
            assert ended is not None, self.shell("ps", "--wide")
            assert (ended.state, ended.restarts) == ("succeeded", 0), ended
            assert self.shell("logs", job).strip() == undisturbed, job


@contextmanager
def site_in(shm: Path) -> Iterator[Site]:
    """A site, with the machines' RAM disks in ``shm``."""
    with ExitStack() as opened:
        machines = opened.enter_context(machines_in(shm))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        proxies = {host: Proxy(port) for host in HOSTS.values()}
        for proxy in proxies.values():
            opened.callback(proxy.close)
        _route(machines, port, proxies)
        shell = opened.enter_context(shell_of(machines))
        shell.variables["GPUSLICE_RAMDISK_DIR"] = str(machines.ramdisks / "own")
        shell.variables[LOCK_DIR] = str(machines.root)
        shell(
            *("up", "--devices", "cpu:1", "--quantum", "2s", "--switch-share", "0"),
            *("--agent-port", f"127.0.0.1:{port}", "--node-timeout", f"{NODE_TIMEOUT_S:g}s"),
            *("--replicate-every", "1"),
            *(word for node, host in HOSTS.items() for word in ("--node", f"{node}={host}")),
            deadline_s=4 * PATIENCE_S,
        )
        yield Site(shell, machines, proxies)
        shell("down")


def _route(machines: Machines, port: int, proxies: dict[str, Proxy]) -> None:
    """Have each machine reach the scheduler's ``port`` by its own proxy."""
    cases = " ".join(f"{host}) proxy={proxy.port};;" for host, proxy in proxies.items())
    *rest, last = machines.command.read_text().splitlines()
    setup, _, _ = last.rpartition(" && exec")
    route = f'{setup} && sed "s/:{port}/:$proxy/g" | sh -c "$2"'
    machines.command.write_text("\n".join([*rest, f'case "$1" in {cases} esac', route]) + "\n")


def main() -> None:
    """Disturb a site as often as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    alone = subprocess.run(
        [sys.executable, ATTACHED, EPOCHS], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, site_in(Path(shm)) as site:
        site.submit()
        for number in range(options.moments):
            time.sleep(draw.uniform(0.0, 3.0))
            kind, node = draw.choice(["stop", "kill", "cut", "hold"]), draw.choice(sorted(HOSTS))
            for_s = draw.choice(LASTS_S)
            print(f"{number}: {kind} {node} {for_s:g} s", flush=True)
            site.disturb(kind, node, for_s)
            site.check()
        site.finish(alone)
    print(f"{options.moments} moments, {JOBS} jobs: all have the digest of an undisturbed training")


if __name__ == "__main__":
    main()
