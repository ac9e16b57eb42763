"""Trainings that go from machine to machine by ssh, and their snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...cli.conftest import Shell
from ...cli.waiting import until
from ...patience import PATIENCE_S
from .machines import Machines, machines_in, shell_of
from .sharing import ATTACHED, EPOCHS
from .synthetic import found, storages, take
from .test_ssh_nodes import notes

pytestmark = pytest.mark.nodes


@pytest.fixture
def machines(shm: Path) -> Iterator[Machines]:
    with machines_in(shm) as made:
        yield made


@pytest.fixture
def shell(machines: Machines) -> Iterator[Shell]:
    with shell_of(machines) as made:
        made.variables["GPUSLICE_RAMDISK_DIR"] = str(machines.ramdisks / "own")
        yield made


def test_a_job_goes_from_machine_to_machine_and_has_a_copy(
    shell: Shell, machines: Machines, undisturbed: str
) -> None:
    nodes = ("--node", "b=one", "--node", "c=two", "--replicate-every", "1")
    shell("up", "--devices", "cpu:1", "--quantum", "60s", *nodes, deadline_s=4 * PATIENCE_S)
    enough, client = machines.root / "enough", shell.client()
    job = shell("submit", str(ATTACHED), EPOCHS, str(enough)).strip()
    steps = 50
    for devices in ("b/cpu:0", "c/cpu:0"):
        steps = until(client, job, lambda one: one.steps > steps).steps + 5  # noqa: B023
        said = shell("migrate", job, "--to", devices, "--wait", deadline_s=4 * PATIENCE_S)
        assert f"{job} goes from " in said
        assert f" to {devices}, " in said
        found = until(client, job, lambda one: one.id == job)
        assert (found.devices, found.not_moved) == ((devices,), None)
        assert found.steps >= steps - 5
    client.suspend(job)
    while not notes(shell, "replicated"):
        assert client.wait(job, 0.2) is None
    client.resume(job)
    enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    assert shell("logs", job).strip() == undisturbed
    assert notes(shell, "replicated")[0]["to"] == "here"
    ends_s = time.monotonic() + PATIENCE_S
    while left := list(machines.ramdisks.glob(f"*/{job}@*")):
        assert time.monotonic() < ends_s, left
        time.sleep(0.05)
    shell("down")
    assert not list((shell.directory / "nodes").glob("bring-*"))


def test_ship_brings_the_snapshot_of_a_run_to_a_machine(shell: Shell, machines: Machines) -> None:
    shell("up", "--devices", "null:1", "--node", "b=one", deadline_s=4 * PATIENCE_S)
    contents = [storages(0, (3_000_000,))]
    take(machines.ramdisks / "own", "mine", 4, contents)
    assert "mine: the snapshot of boundary 4 is on b, too" in shell("ship", "mine", "--to", "b")
    assert [found(machines.ramdisks / "one", "mine", 4, 0)] == contents
    assert "no node besides here" not in shell("ship", "mine", "--to", "here", "--from", "b")
    assert "has no node x" in shell("ship", "mine", "--to", "x", code=2)
    shell("down")
    assert "the scheduler that has these nodes does not answer" in shell("ship", "mine", "--to", "b", code=3)
