"""A scheduler of one slot on every node of a Ray cluster, reached by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuslice.node_agents.ray_engine import actor_name, actor_names
from gpuslice.nodes.plan import Answer, Found, Wanted
from gpuslice.verbs import NodeInfo

from ...cli.conftest import Shell, shell_in
from ...patience import PATIENCE_S

ATTACHED = Path(__file__).parents[2] / "cli" / "attached.py"
EPOCHS = "10"


class Nodes:
    """The scheduler; one of the nodes is its own.

    Attributes
    ----------
    here, others
        The names that the scheduler's own node and the others have in Ray.
    enough
        Jobs go slowly after 100 steps until there is this file.
    """

    def __init__(self, shell: Shell, address: str, ramdisk: Callable[[str], Path]) -> None:
        self.shell, self.address = shell, address
        words = [sys.executable, "-m", "gpuslice.node_agents.agents", "find"]
        asked = msgspec.json.encode(Wanted(address=address, devices=("cpu:0",), working_directory="/"))
        done = subprocess.run(words, input=asked, capture_output=True, check=True)
        nodes = msgspec.json.decode(done.stdout, type=Answer).nodes
        self.here, *self.others = [one.ray_name for one in nodes]
        self._ramdisk = ramdisk
        self.enough = shell.directory.parent / "enough"

    def up(self, *words: str) -> None:
        """Start the scheduler, or another that goes on, and wait for its nodes.

        Its jobs change their nodes as policies like.
        """
        os.environ["GPUSLICE_RAMDISK_DIR"] = str(self._ramdisk(self.here))
        shared = ("--devices", "cpu:1", "--quantum", "1s", "--switch-share", "0", "--ray", self.address)
        self.shell("up", *shared, *words, deadline_s=4 * PATIENCE_S)
        eventually(lambda: all(node.state == "up" for node in self.infos()))

    def submit(self, name: str, *options: str) -> str:
        words = ["submit", "--name", name, *options, str(ATTACHED), EPOCHS, str(self.enough)]
        return self.shell(*words).strip()

    def digest(self, job: str) -> str:
        (line,) = [line for line in self.shell("logs", job).splitlines() if line.startswith("digest")]
        return line

    def agent(self, node: str) -> int:
        return int((self.shell.directory / "nodes" / node / "scheduler.pid").read_text())

    def actor(self, node: str) -> str:
        """What the actor of this scheduler is called that has ``node``; for a process of the cluster."""
        (name,) = actor_names(*self._owner(node))
        return name

    def actor_prefix(self, node: str) -> str:
        """What the names of actors of this scheduler begin with that have ``node``."""
        return f"{actor_name(*self._owner(node))}-"

    def _owner(self, node: str) -> tuple[Wanted, Found]:
        return Wanted(directory=str(self.shell.directory)), Found(node, "", node, "")

    def notes(self, what: str, job: str = "") -> list[dict[str, object]]:
        lines = self.shell("events", "--json").splitlines()
        events = [msgspec.json.decode(line) for line in lines]
        return [event for event in events if event["what"] == what and job in ("", event["job"])]

    def infos(self) -> list[NodeInfo]:
        """What people are told of the nodes."""
        return msgspec.json.decode(self.shell("nodes", "--json"), type=list[NodeInfo])

    def info(self, node: str) -> NodeInfo:
        """What people are told of ``node``."""
        return next(one for one in self.infos() if one.name == node)

    def until_noted(self, what: str, job: str) -> None:
        """Wait until the scheduler has noted that of ``job``, which has not ended before."""
        client = self.shell.client()
        while not self.notes(what, job):
            assert client.wait(job, 0.5) is None


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    ends_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends_s
        time.sleep(0.2)


@contextmanager
def shared_by(directory: Path, address: str, ramdisk: Callable[[str], Path]) -> Iterator[Nodes]:
    """The nodes of a cluster; what runs there at the end is ended."""
    former = os.environ.pop("GPUSLICE_RAMDISK_DIR", None)
    with shell_in(directory / "s") as shell:
        try:
            yield Nodes(shell, address, ramdisk)
        finally:
            down = [sys.executable, "-m", "gpuslice", "down", "--state-dir", str(shell.directory)]
            subprocess.run(down, check=False, stdout=subprocess.DEVNULL)
            os.environ.pop("GPUSLICE_RAMDISK_DIR", None)
            if former is not None:
                os.environ["GPUSLICE_RAMDISK_DIR"] = former
