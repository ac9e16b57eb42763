"""Ray is killed, as a whole or its control store alone, and started again, while a scheduler uses it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ...cli.waiting import until
from ...patience import PATIENCE_S
from .ray_start import StartedRay
from .sharing import Nodes, eventually, shared_by

pytestmark = pytest.mark.ray


@pytest.fixture
def ray() -> Iterator[StartedRay]:
    pytest.importorskip("ray", reason="Ray is not installed: ./x test-gangs")
    root = Path(tempfile.mkdtemp(prefix="gpuslice-test-", dir="/dev/shm"))
    made = StartedRay(root, ("a", "b"))
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(root)


@pytest.fixture
def nodes(tmp_path: Path, ray: StartedRay) -> Iterator[Nodes]:
    with shared_by(tmp_path, ray.address, ray.ramdisk) as found:
        yield found


@pytest.mark.parametrize(
    "killed", ["all of Ray", pytest.param("the control store", marks=pytest.mark.repeats)]
)
def test_jobs_run_on_while_ray_is_away_and_move_when_it_is_there_again(
    nodes: Nodes, ray: StartedRay, undisturbed: str, killed: str
) -> None:
    nodes.up()
    client = nodes.shell.client()
    near, far = nodes.submit("near"), nodes.submit("far")
    (there,) = nodes.others
    found = [until(client, job, lambda one: one.steps > 20).devices for job in (near, far)]
    assert found == [("cpu:0",), (f"{there}/cpu:0",)]
    agent = nodes.agent(there)
    if killed == "all of Ray":
        ray.kill()
    else:
        ray.kill_gcs()
    client.suspend(far)
    until(client, far, lambda one: one.state == "suspended")
    client.resume(far)
    steps = until(client, far, lambda one: one.state == "running").steps
    until(client, far, lambda one: one.steps > steps)
    client.suspend(far)
    until(client, far, lambda one: one.state == "suspended")
    client.migrate(near, [f"{there}/cpu:0"])
    while not (notes := nodes.notes("state_waits", near)):
        assert client.wait(near, 0.2) is None
    assert "no Ray cluster answers" in str(notes[0]["details"])
    assert psutil.Process(agent).is_running()
    ray.kill()  # what is left: without its head a node ends after a minute
    ray.start()
    until(client, near, lambda one: one.devices == (f"{there}/cpu:0",) and one.steps > steps)
    actors = ray.actors()
    assert all(nodes.actor_prefix(name) in actors for name in (nodes.here, there))
    client.resume(far)
    nodes.enough.touch()
    for job in (near, far):
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert (ended.state, ended.restarts) == ("succeeded", 0)
        assert nodes.digest(job) == undisturbed
    assert nodes.agent(there) == agent


def test_a_node_that_comes_back_is_used_again_and_down_ends_without_ray(
    nodes: Nodes, ray: StartedRay
) -> None:
    shell = nodes.shell
    nodes.up("--devices", "null:1")
    (there,) = nodes.others
    ray.kill(there)
    first = nodes.agent(there)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: "not in the Ray cluster" in nodes.info(there).reason)
    ray.start()
    eventually(lambda: nodes.info(there).state == "up")
    second = nodes.agent(there)
    assert second != first
    job = shell.submit(nodes.enough, ranks=2)
    assert f"{there}/null:0" in until(shell.client(), job, lambda one: one.steps > 0).devices
    secret = (shell.directory / "node-keys" / "client.secret").read_bytes().strip()
    ray.kill("a")  # the head
    shell("down")
    eventually(lambda: not psutil.pid_exists(second))
    files = [path for path in shell.directory.rglob("*") if path.is_file()]
    assert not [path for path in files if secret in path.read_bytes()]
