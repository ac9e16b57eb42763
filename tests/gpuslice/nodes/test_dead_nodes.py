"""A job whose node dies goes on elsewhere, from a copy if there is one; what is left there stands still."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuslice.nodes.replication import held_on
from gpuslice.sched_core.nodes.local_node import rank_endpoint

from ...cli.waiting import until
from ...patience import PATIENCE_S
from .conftest import RayNodes
from .sharing import Nodes, shared_by

pytestmark = pytest.mark.ray


@pytest.fixture
def nodes(tmp_path: Path, rays: RayNodes) -> Iterator[Nodes]:
    rays.reset()
    with shared_by(tmp_path, rays.address, rays.ramdisk) as found:
        yield found
        found.shell("down")


def test_a_job_whose_node_dies_goes_on_from_the_copy_of_its_last_suspend(
    nodes: Nodes, rays: RayNodes, undisturbed: str
) -> None:
    nodes.up("--replicate-every", "1", "--node-timeout", "20s")
    client = nodes.shell.client()
    job, there = away(nodes)
    client.suspend(job)
    while not (copies := nodes.notes("replicated", job)):
        assert client.wait(job, 0.2) is None
    (details,) = [copy["details"] for copy in copies]
    assert (details["from"], details["to"]) == ("b", "here")
    held = held_on(job, rays.find(nodes.here, socket=rank_endpoint(nodes.shell.directory)))
    assert held is not None
    client.resume(job)
    steps = until(client, job, lambda one: one.state == "running").steps
    until(client, job, lambda one: one.steps > steps)
    lose(nodes, rays, there, job)
    nodes.until_noted("went_without", job)
    assert until(client, job, lambda one: one.state == "running").restarts == 0
    nodes.enough.touch()
    until(client, job, lambda one: one.ended)
    assert nodes.digest(job) == undisturbed
    assert nodes.notes("node_lost")[-1]["details"] == {"node": there}
    assert nodes.notes("went_on", job)[-1]["details"] == {"attempt": 3, "boundary": held.boundary}


@pytest.mark.repeats  # covered by sched_core/live/test_lease.py
def test_without_an_agent_a_job_stands_still_before_it_is_started_elsewhere(
    nodes: Nodes, rays: RayNodes, undisturbed: str
) -> None:
    nodes.up("--node-timeout", "20s")
    job, there = away(nodes)
    left = nodes.shell.processes_of(job)
    scheduler = psutil.Process(nodes.shell.pid)
    scheduler.suspend()  # nothing is started elsewhere yet
    try:
        rays.kill(there)
        os.kill(nodes.agent(there), signal.SIGKILL)
        ends_s = time.monotonic() + PATIENCE_S
        while not all(map(stands_still, left)):
            assert time.monotonic() < ends_s
            time.sleep(0.1)
    finally:
        scheduler.resume()
    client = nodes.shell.client()
    nodes.until_noted("went_without", job)
    assert until(client, job, lambda one: one.state == "running").restarts == 0
    assert all(map(stands_still, left))
    nodes.enough.touch()
    until(client, job, lambda one: one.ended)
    assert nodes.digest(job) == undisturbed


def stands_still(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def away(nodes: Nodes) -> tuple[str, str]:
    """A job that has gone to the other node, and that node; its own has an older snapshot."""
    client = nodes.shell.client()
    (there,) = nodes.others
    job = nodes.submit("away", "--max-restarts", "1", "--wait-for-node", "500ms")
    until(client, job, lambda one: one.steps > 20)
    client.migrate(job, [f"{there}/cpu:0"])
    until(client, job, lambda one: one.devices == (f"{there}/cpu:0",) and one.steps > 60)
    return job, there


def lose(nodes: Nodes, rays: RayNodes, name: str, job: str) -> None:
    """A node dies with all that runs there, and what is in its RAM disk."""
    victims = nodes.shell.processes_of(job) + nodes.shell.processes_of(job, supervisors=True)
    agent = nodes.agent(name)
    rays.kill(name)
    for pid in (agent, *(process.pid for process in victims)):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(rays.ramdisk(name))
