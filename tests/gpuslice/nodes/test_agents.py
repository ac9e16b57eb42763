"""A scheduler with the nodes of a Ray cluster: jobs on each, from one to another, and what survives what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gpuslice.client.client import Client
from gpuslice.nodes import ray_nodes
from gpuslice.nodes.shipping import ship
from gpuslice.sched_core.nodes.local_node import SOCKET
from gpuslice.verbs import JobInfo

from ...cli.conftest import Shell, shell_in
from ...cli.waiting import until
from ...patience import PATIENCE_S
from .conftest import RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ATTACHED = Path(__file__).parents[2] / "cli" / "attached.py"
EPOCHS = "10"


class Nodes:
    """A scheduler of one slot on every node of a cluster, reached by the command line."""

    def __init__(self, shell: Shell, rays: RayNodes) -> None:
        import ray

        self.shell, self.rays = shell, rays
        here = ray.get_runtime_context().get_node_id()
        self.names = {node.id: node.name for node in ray_nodes.nodes()}
        self.here = self.names[here]
        self.others = sorted(name for name in self.names.values() if name != self.here)
        self.enough = shell.directory.parent / "enough"

    def up(self, *words: str, code: int = 0) -> str:
        os.environ["GPUSLICE_RAMDISK_DIR"] = str(self.rays.ramdisk(self.here))
        shared = ("--devices", "cpu:1", "--quantum", "1s", "--ray", self.rays.address)
        return self.shell("up", *shared, *words, code=code, deadline_s=4 * PATIENCE_S)

    def submit(self, name: str, *options: str) -> str:
        words = ["submit", "--name", name, *options, str(ATTACHED), EPOCHS, str(self.enough)]
        return self.shell(*words).strip()

    def until(self, client: Client, job: str, holds: Callable[[JobInfo], bool]) -> JobInfo:
        return until(client, job, holds)

    def digest(self, job: str) -> str:
        (line,) = [line for line in self.shell("logs", job).splitlines() if line.startswith("digest")]
        return line

    def agent(self, node: str) -> int:
        return int((self.shell.directory / "nodes" / node / "scheduler.pid").read_text())

    def notes(self, what: str) -> list[dict[str, object]]:
        lines = self.shell("events", "--json").splitlines()
        events = [msgspec.json.decode(line) for line in lines]
        return [event for event in events if event["what"] == what]


@pytest.fixture
def nodes(tmp_path: Path, rays: RayNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", "")
    with shell_in(tmp_path / "s") as shell:
        found = Nodes(shell, rays)
        try:
            yield found
        finally:
            down = [sys.executable, "-m", "gpuslice", "down", "--state-dir", str(shell.directory)]
            subprocess.run(down, check=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    enough = tmp_path_factory.mktemp("undisturbed") / "enough"
    enough.touch()
    done = subprocess.run(
        [sys.executable, str(ATTACHED), EPOCHS, str(enough)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_job_goes_from_node_to_node_bit_for_bit(nodes: Nodes, undisturbed: str) -> None:
    nodes.up()
    client = nodes.shell.client()
    job = nodes.submit("moved")
    (other, *_) = nodes.others
    found = until(client, job, lambda one: one.steps > 50)
    assert found.devices == ("cpu:0",)
    client.migrate(job, [f"{other}/cpu:0"])
    until(client, job, lambda one: one.devices == (f"{other}/cpu:0",) and one.steps > 110)
    client.migrate(job, ["cpu:0"])
    nodes.enough.touch()
    until(client, job, lambda one: one.ended)
    assert nodes.digest(job) == undisturbed
    assert next(note["details"] for note in nodes.notes("relocated")) == {"from": "here", "to": other}
    assert nodes.shell.status().jobs[0].restarts == 0


def test_jobs_take_turns_on_both_nodes(nodes: Nodes, undisturbed: str) -> None:
    nodes.up()
    client = nodes.shell.client()
    jobs = [nodes.submit(name) for name in ("t1", "t2", "t3", "t4")]
    for job in jobs:
        until(client, job, lambda one: one.suspends >= 1 and one.steps > 20)
    nodes.enough.touch()
    for job in jobs:
        until(client, job, lambda one: one.ended)
    assert {nodes.digest(job) for job in jobs} == {undisturbed}


def test_ray_shows_what_is_taken_and_by_whom(nodes: Nodes) -> None:
    import ray

    before = ray.available_resources()["CPU"]
    nodes.up()
    assert ray.available_resources().get("CPU", 0) < before
    named = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    assert {f"gpuslice-agent-{name}" for name in nodes.names.values()} <= named
    nodes.shell("down")
    ends_s = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU", 0) < before:
        assert time.monotonic() < ends_s
        time.sleep(0.1)


def test_a_job_outlives_the_agent_the_actor_and_the_scheduler(nodes: Nodes, undisturbed: str) -> None:
    nodes.up()
    client = nodes.shell.client()
    here, job = nodes.submit("here"), nodes.submit("there")
    (other, *_) = nodes.others
    until(client, job, lambda one: one.devices == (f"{other}/cpu:0",) and one.steps > 20)
    agent = nodes.agent(other)
    os.kill(agent, signal.SIGKILL)
    ends_s = time.monotonic() + PATIENCE_S
    while nodes.agent(other) == agent:
        assert time.monotonic() < ends_s
        time.sleep(0.1)
    import ray

    second = nodes.agent(other)
    actor = ray.get_actor(f"gpuslice-agent-{other}", namespace="gpuslice")
    ray.kill(actor, no_restart=False)
    assert ray.get(ray.get_actor(f"gpuslice-agent-{other}", namespace="gpuslice").ready.remote()) == second
    nodes.shell.kill()
    nodes.up()
    client = nodes.shell.client()
    nodes.enough.touch()
    for name in (here, job):
        until(client, name, lambda one: one.ended)
        assert nodes.digest(name) == undisturbed
    assert nodes.shell("logs", job, "--err").count("made") == 1, "it was never started again"


def test_a_node_that_is_killed_loses_no_job_that_has_a_snapshot_elsewhere(
    nodes: Nodes, undisturbed: str
) -> None:
    rays = nodes.rays
    rays.add("c")
    nodes.up("--node-timeout", "30s")
    client = nodes.shell.client()
    job = nodes.submit("lost", "--max-restarts", "1", "--checkpoint-every", "10")
    until(client, job, lambda one: one.steps > 20)
    client.migrate(job, ["c/cpu:0"])
    until(client, job, lambda one: one.devices == ("c/cpu:0",) and one.steps > 60)
    there = rays.find("c", socket=f"ipc://{nodes.shell.directory}/nodes/c/{SOCKET}")
    ship(job, there, rays.find(nodes.here, socket=f"ipc://{nodes.shell.directory}/{SOCKET}"), replace=True)
    agent = nodes.agent("c")
    victims = nodes.shell.processes_of(job) + nodes.shell.processes_of(job, supervisors=True)
    rays.kill("c")
    for pid in (agent, *(process.pid for process in victims)):
        os.kill(pid, signal.SIGKILL)
    until(client, job, lambda one: one.restarts == 1 and one.steps > 60)
    nodes.enough.touch()
    until(client, job, lambda one: one.ended)
    assert nodes.digest(job) == undisturbed
    assert "c" in [note["details"]["node"] for note in nodes.notes("node_lost")]  # type: ignore[index]
    assert nodes.notes("went_on")
