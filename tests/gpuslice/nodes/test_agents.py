"""A scheduler with the nodes of a Ray cluster: jobs on each, from one to another, and what survives what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpuslice.client.client import Client
from gpuslice.nodes.shipping import ship
from gpuslice.sched_core.nodes.local_node import rank_endpoint

from ...cli.waiting import until
from ...patience import PATIENCE_S
from .conftest import RayNodes
from .sharing import Nodes, shared_by

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, rays: RayNodes) -> Iterator[Nodes]:
    """One scheduler for all tests, the last of which kills the nodes that are not the scheduler's."""
    rays.add("c")
    with shared_by(tmp_path_factory.mktemp("agents"), rays.address, rays.ramdisk) as found:
        found.up()
        yield found
        found.shell("down")


@pytest.fixture
def client(nodes: Nodes) -> Client:
    nodes.enough.unlink(missing_ok=True)
    return nodes.shell.client()


def test_ray_shows_what_is_taken_and_by_whom(nodes: Nodes) -> None:
    import ray

    assert ray.available_resources().get("CPU", 0) == 0
    named = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    assert {nodes.actor(name) for name in (nodes.here, *nodes.others)} <= named


def test_a_job_goes_from_node_to_node_to_node_bit_for_bit(
    nodes: Nodes, client: Client, undisturbed: str
) -> None:
    job = nodes.submit("moved")
    found = until(client, job, lambda one: one.steps > 50)
    assert found.devices == ("cpu:0",)
    for number, node in enumerate(nodes.others):
        client.migrate(job, [f"{node}/cpu:0"])
        steps = 105 + 5 * number
        until(client, job, lambda one: one.devices == (f"{node}/cpu:0",) and one.steps > steps)  # noqa: B023
    nodes.enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    assert nodes.digest(job) == undisturbed
    path = ["here", *nodes.others]
    moves = [msgspec.convert(note["details"], dict[str, Any]) for note in nodes.notes("relocated", job)]
    assert [(move["from"], move["to"]) for move in moves] == list(pairwise(path))
    assert all(move["bytes"] for move in moves)


def test_jobs_take_turns_on_all_nodes(nodes: Nodes, client: Client, undisturbed: str) -> None:
    jobs = [nodes.submit(name) for name in ("t1", "t2", "t3", "t4")]
    # A job that goes to another node counts its suspends anew.
    while not {event.job for event in client.events() if event.what == "suspended"} >= set(jobs):
        assert client.wait(jobs[0], 0.2) is None
    nodes.enough.touch()
    for job in jobs:
        until(client, job, lambda one: one.ended)
    assert {nodes.digest(job) for job in jobs} == {undisturbed}


def test_a_job_outlives_the_agent_the_actor_and_the_scheduler(
    nodes: Nodes, client: Client, undisturbed: str
) -> None:
    import ray

    here, job = nodes.submit("here"), nodes.submit("there")
    (device,) = until(client, job, lambda one: one.steps > 20).devices
    other = device.partition("/")[0]
    assert other in nodes.others
    first = nodes.agent(other)
    os.kill(first, signal.SIGKILL)
    ends_s = time.monotonic() + PATIENCE_S
    while nodes.agent(other) == first:
        assert time.monotonic() < ends_s
        time.sleep(0.1)
    second = nodes.agent(other)
    name = nodes.actor(other)
    ray.kill(ray.get_actor(name, namespace="gpuslice"), no_restart=False)
    assert ray.get(ray.get_actor(name, namespace="gpuslice").ready.remote()) == second
    nodes.shell.kill()
    nodes.up()
    client = nodes.shell.client()
    nodes.enough.touch()
    for name in (here, job):
        until(client, name, lambda one: one.ended)
        assert nodes.digest(name) == undisturbed
    assert nodes.shell("logs", job, "--err").count("made") == 1, "it was never started again"


@pytest.mark.repeats  # covered by sched_core/live/test_nodes.py
def test_a_job_outlives_an_agent_that_is_silent_for_a_while(
    nodes: Nodes, client: Client, undisturbed: str
) -> None:
    lost = nodes.notes("node_lost")  # one that came late to its scheduler
    here, job = nodes.submit("near"), nodes.submit("far")
    (device,) = until(client, job, lambda one: one.steps > 20).devices
    agent = nodes.agent(device.partition("/")[0])
    os.kill(agent, signal.SIGSTOP)
    client.suspend(job)
    assert until(client, job, lambda one: one.held).state != "suspended"
    os.kill(agent, signal.SIGCONT)
    until(client, job, lambda one: one.state == "suspended")
    client.resume(job)
    nodes.enough.touch()
    for name in (here, job):
        ended = until(client, name, lambda one: one.ended)
        assert (nodes.digest(name), ended.restarts) == (undisturbed, 0)
    assert nodes.notes("node_lost") == lost


def test_a_job_whose_node_is_killed_together_with_that_of_its_replica_goes_on_from_an_older_snapshot(
    nodes: Nodes, client: Client, rays: RayNodes, undisturbed: str
) -> None:
    job = nodes.submit("lost", "--max-restarts", "1", "--wait-for-node", "500ms")
    until(client, job, lambda one: one.devices == ("cpu:0",) and one.steps > 20)
    where, replica = nodes.others
    client.migrate(job, [f"{where}/cpu:0"])
    moved = until(client, job, lambda one: one.devices == (f"{where}/cpu:0",))
    until(client, job, lambda one: one.steps > moved.steps + 60)  # so the next snapshot is a newer one
    client.suspend(job)
    until(client, job, lambda one: one.state == "suspended")
    client.resume(job)
    until(client, job, lambda one: one.state == "running")
    there, copy = (
        rays.find(name, socket=rank_endpoint(nodes.shell.directory / "nodes" / name)) for name in nodes.others
    )
    newer = ship(job, there, copy).boundary
    victims = nodes.shell.processes_of(job) + nodes.shell.processes_of(job, supervisors=True)
    agents = [nodes.agent(name) for name in nodes.others]
    for name in nodes.others:
        rays.kill(name)
    for pid in (*agents, *(process.pid for process in victims)):
        os.kill(pid, signal.SIGKILL)
    nodes.until_noted("went_without", job)
    nodes.enough.touch()
    ended = until(client, job, lambda one: one.ended)
    assert (ended.state, ended.restarts) == ("succeeded", 0), ended
    assert nodes.digest(job) == undisturbed
    assert {note["details"]["node"] for note in nodes.notes("node_lost")} == {where, replica}  # type: ignore[index]
    boundaries = [note["details"]["boundary"] for note in nodes.notes("went_on", job)]  # type: ignore[index]
    assert 0 < boundaries[-1] < newer
