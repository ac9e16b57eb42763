"""Nodes of a Ray cluster on one machine, each with a RAM disk of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuslice.nodes import ray_nodes
from gpuslice.nodes.ray_nodes import Node

from ...patience import PATIENCE_S
from .sharing import ATTACHED, EPOCHS

#: Ray would make a token in the user's home for the clusters here, which only this machine can reach.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
#: The head sees soon that a node was killed; one that only answers slowly has as long as ever.
_SYSTEM = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 500}
#: No tests need the dashboard, the autoscaler or Ray's logs, each of which is a Python.
_LITTLE: dict[str, Any] = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "object_store_memory": 100 << 20,
}


@pytest.fixture
def source(shm: Path) -> Path:
    return shm / "source"


@pytest.fixture
def target(shm: Path) -> Path:
    return shm / "target"


class RayNodes:
    """A cluster to which this process belongs, with the nodes ``a`` and ``b``."""

    def __init__(self, cluster: Any, root: Path) -> None:
        self._cluster = cluster
        self._root = root
        self._raylets: dict[str, Any] = {}
        self.address = ""

    def ramdisk(self, name: str) -> Path:
        return self._root / name

    def add(self, name: str) -> Node:
        """A node of that name, which finds in its RAM disk what one of the same name has left."""
        environ = {"GPUSLICE_RAMDISK_DIR": str(self.ramdisk(name))}
        self._raylets[name] = self._cluster.add_node(
            node_name=name,
            env_vars=environ,
            **_LITTLE,
            **({} if self._raylets else {"_system_config": _SYSTEM}),
        )
        self.address = self._cluster.address
        return self.find(name) if len(self._raylets) > 1 else Node("", name)

    def find(self, name: str, **flags: str) -> Node:
        return ray_nodes.find(name, flags)

    def kill(self, name: str) -> None:
        """Kill a node with all its processes; its RAM disk is where it was."""
        node = self._raylets.pop(name)
        self._cluster.remove_node(node, allow_graceful=False)
        ends_s = time.monotonic() + PATIENCE_S
        while any(living.id == node.node_id for living in ray_nodes.nodes()):
            assert time.monotonic() < ends_s
            time.sleep(0.1)

    def reset(self) -> None:
        """Be the nodes ``a`` and ``b`` again, whatever was killed and added."""
        for name in set(self._raylets) - {"a", "b"}:
            self.kill(name)
        if "b" not in self._raylets:
            self.add("b")

    def kill_actor(self, name: str, kind: str) -> None:
        """SIGKILL for the processes on a node in which an object of that kind lives."""
        (raylet,) = (row.process for row in self._raylets[name].all_processes["raylet"])
        workers = [one for one in psutil.Process(raylet.pid).children() if _title(one).startswith(kind)]
        assert len(workers) == 1, [_title(one) for one in psutil.Process(raylet.pid).children()]
        os.kill(workers[0].pid, signal.SIGKILL)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).removeprefix("ray::")


@pytest.fixture(scope="module")
def rays(started: RayNodes) -> Iterator[RayNodes]:
    """Nodes a and b, of which each file of tests may kill what it likes."""
    yield started
    started.reset()


@pytest.fixture(scope="session")
def started() -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="Ray is not installed: ./x test-gangs")
    from ray.cluster_utils import Cluster

    root = Path(tempfile.mkdtemp(prefix="gpuslice-test-", dir="/dev/shm"))
    cluster = Cluster()
    try:
        nodes = RayNodes(cluster, root)
        nodes.add("a")
        with ray_nodes.connected(nodes.address):
            nodes.add("b")
            yield nodes
    finally:
        cluster.shutdown()
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job of ``Nodes.submit`` prints if nobody does anything to it."""
    enough = tmp_path_factory.mktemp("undisturbed") / "enough"
    enough.touch()
    words = [sys.executable, str(ATTACHED), EPOCHS, str(enough)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
