"""A scheduler with machines that it reaches by ssh, or by a command in its place, and without Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from gpuslice.verbs import NodeInfo
from gpuslice.version import __version__

from ...cli.conftest import Shell
from ...cli.waiting import until
from ...patience import PATIENCE_S
from .machines import Machines, machines_in, shell_of


@pytest.fixture
def machines(shm: Path) -> Iterator[Machines]:
    with machines_in(shm) as found:
        yield found


@pytest.fixture
def shell(machines: Machines) -> Iterator[Shell]:
    with shell_of(machines) as found:
        yield found


def up(shell: Shell, *words: str, code: int = 0) -> str:
    """Start a scheduler of null devices, two on each node. Return what it says."""
    words = ("up", "--devices", "null:1", "--quantum", "100ms", *words)
    return shell(*words, code=code, deadline_s=4 * PATIENCE_S)


def secret(shell: Shell) -> bytes:
    return (shell.directory / "node-keys" / "client.secret").read_bytes().strip()


def devices(shell: Shell) -> list[str]:
    return [one.name for one in shell.status().devices]


def notes(shell: Shell, what: str) -> list[dict[str, object]]:
    events = [msgspec.json.decode(line) for line in shell("events", "--json").splitlines()]
    return [event["details"] for event in events if event["what"] == what]


def nodes(shell: Shell) -> dict[str, NodeInfo]:
    return {one.name: one for one in msgspec.json.decode(shell("nodes", "--json"), type=list[NodeInfo])}


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    ends_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def gone(pid: int) -> None:
    """Wait until a process is gone."""
    if psutil.pid_exists(pid):
        psutil.wait_procs([psutil.Process(pid)], timeout=PATIENCE_S)
    assert not psutil.pid_exists(pid)


def test_jobs_run_on_machines_by_ssh_and_down_leaves_nothing(shell: Shell, machines: Machines) -> None:
    up(shell, "--node", "b=ann@one", "--node", "c=two")
    assert devices(shell) == ["null:0", "b/null:0", "c/null:0"]
    client = shell.client()
    jobs = [shell.submit(shell.directory / "enough") for _ in range(3)]
    found = {until(client, job, lambda one: bool(one.devices)).devices for job in jobs}
    assert found == {("null:0",), ("b/null:0",), ("c/null:0",)}
    assert machines.files_with(secret(shell)) == [str(shell.directory / "node-keys" / "client.secret")]
    agents = [machines.agent("ann@one", "b"), machines.agent("two", "c")]
    agents += [machines.keeper("ann@one", "b"), machines.keeper("two", "c")]
    for words in (psutil.Process(pid).cmdline() for pid in agents):
        assert secret(shell).decode() not in " ".join(words)
    (shell.directory / "enough").touch()
    for job in jobs:
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert ended.state == "succeeded"
    key = secret(shell)
    shell("down")
    for pid in agents:
        gone(pid)
    assert not machines.files_with(key)


def test_a_job_outlives_the_agent_its_keeper_and_the_scheduler(shell: Shell, machines: Machines) -> None:
    words = ("--node", "b=one", "--devices", "b/null:1")
    up(shell, *words)
    assert devices(shell) == ["b/null:0"]
    job = shell.submit(shell.directory / "enough")
    client = shell.client()
    begun = until(client, job, lambda one: one.steps > 0)
    first = machines.agent("one", "b")
    os.kill(first, signal.SIGKILL)
    until(client, job, lambda one: one.steps > begun.steps + 50)
    assert machines.agent("one", "b") != first
    os.kill(machines.keeper("one", "b"), signal.SIGKILL)
    shell.kill()
    up(shell, *words)
    (shell.directory / "enough").touch()
    ended = shell.client().wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    shell("down")


def test_a_machine_that_ssh_does_not_reach_is_left_out_by_name(shell: Shell, machines: Machines) -> None:
    """So is one that is not to be used, which is not asked."""
    machines.break_down("two", "two: Permission denied (publickey).")
    up(shell, "--node", "b=one", "--node", "c=two", "--node", "d=three", "--without", "d")
    assert devices(shell) == ["null:0", "b/null:0"]
    assert "three" not in (machines.root / "logins").read_text().split()
    left_out = {str(note["node"]): note for note in notes(shell, "node_left_out")}
    assert left_out.keys() == {"c", "d"}
    assert "Permission denied (publickey)" in str(left_out["c"]["reason"])
    assert "ssh -o BatchMode=yes two true" in str(left_out["c"]["remedy"])
    found = nodes(shell)
    others = {name: node.state for name, node in found.items() if name != "b"}
    assert others == {"here": "up", "c": "left out", "d": "left out"}
    assert "Permission denied (publickey)" in found["c"].reason
    assert "node c is left out: ssh cannot log in to two" in shell("ps")
    shell("down")


def test_a_machine_that_has_lost_agent_and_keeper_gets_others(shell: Shell, machines: Machines) -> None:
    up(shell, "--node", "b=one", "--devices", "b/null:1")
    job = shell.submit(shell.directory / "enough")
    client = shell.client()
    begun = until(client, job, lambda one: one.steps > 0)
    before = nodes(shell)["b"]
    assert (before.state, before.jobs, before.version) == ("up", (job,), __version__)
    first = machines.agent("one", "b")
    machines.break_down("one", "ssh: connect to host one port 22: No route to host")
    for pid in (machines.keeper("one", "b"), first):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: "No route to host" in nodes(shell)["b"].reason)
    machines.mend("one")
    until(client, job, lambda one: one.steps > begun.steps + 50)
    eventually(lambda: nodes(shell)["b"].state == "up" and nodes(shell)["b"].reason == "")
    assert machines.agent("one", "b") != first
    (shell.directory / "enough").touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    shell("down")


def test_without_a_node_that_can_be_used_there_is_no_scheduler(shell: Shell, machines: Machines) -> None:
    machines.break_down("one", "ssh: connect to host one port 22: No route to host")
    said = up(shell, "--node", "b=one", "--devices", "b/null:1", code=3)
    assert "no node can be used: b: ssh cannot log in to one" in said
    assert "No route to host" in said


def test_a_directory_too_long_for_a_socket_is_said_at_once(shell: Shell, machines: Machines) -> None:
    said = up(shell, "--node", f"b={'h' * 80}", "--devices", "b/null:1", code=3)
    assert "is too long for a socket" in said
