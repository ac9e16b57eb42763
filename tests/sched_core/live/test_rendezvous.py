"""The ranks of a gang on several nodes meet at one free port, whatever is killed before all are started."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Moved, NodeLost, StateWaits
from gpuslice.sched_core.nodes import rendezvous
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode

from ...patience import PATIENCE_S
from .bench import RANK
from .test_node_faults import TRANSFER
from .test_nodes import AGENT, ON_EACH_NODE, Site

SCRIPT = f"""
import os
print("port", os.environ["MASTER_PORT"], flush=True)
{ON_EACH_NODE}
"""


def test_a_port_is_free_and_remains_that_of_its_attempt(tmp_path: Path) -> None:
    ports = rendezvous.Ports()
    first = ports.find("g", tmp_path / "g~0.port")
    with socket.create_server(("", first)):
        assert ports.find("g", tmp_path / "g~0.port") == first
        assert ports.find("g", tmp_path / "g~1.port") != first
    ports.close()


@pytest.mark.parametrize("libuv", [True, False])
def test_nobody_is_given_it_but_who_asks_for_it_as_torch_does(tmp_path: Path, libuv: bool) -> None:
    ports = rendezvous.Ports()
    port = ports.find("g", tmp_path / "g~0.port")
    assert ports.find("g", tmp_path / "g~0.port") == port, "a scheduler asks again"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    patience = timedelta(seconds=PATIENCE_S)
    ranks = TCPStore("127.0.0.1", port, is_master=True, timeout=patience, use_libuv=libuv)
    ranks.set("met", "here")
    assert ranks.get("met") == b"here"
    del ranks
    ports.close()
    ports.release("g")  # it has none now


@pytest.mark.parametrize("content", [b"", b"\xff"])
def test_one_that_could_not_be_written_down_is_chosen_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "g~0.port"
    path.write_bytes(content)
    ports = rendezvous.Ports()
    found = ports.find("g", path)
    assert ports.find("g", path) == found
    assert ports.find("h", tmp_path / "gone" / "g~0.port") > 0
    ports.close()


class Apart(Site):
    """A scheduler with a gang on nodes b and c; agents are started one by one."""

    others = ("b", "c")

    def __init__(self, directory: Path) -> None:
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.way = directory / "way"
        self.joined: list[str] = []
        super().__init__(directory, PATIENCE_S, self._command)

    def _command(self, job: str, sources: Sequence[str], targets: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-S", "-c", TRANSFER, str(self.way)]

    def open(self, *, keep: bool = True) -> None:
        super().open(keep=keep)
        changed = self.remote.changed

        def note(node: RemoteNode) -> None:
            self.joined += [node.name] * node.joined
            changed(node)

        self.remote.changed = note

    def begin(self, name: str) -> None:
        joined = self.joined.count(name)
        words = [name, str(self.directory / name), self.remote.endpoint, str(self.keys)]
        self.agents[name] = subprocess.Popen([sys.executable, str(AGENT), *words])
        self.run(lambda: self.joined.count(name) > joined)

    def end(self, name: str) -> None:
        """Kill its agent."""
        agent = self.agents.pop(name)
        agent.kill()
        agent.wait()

    def gang(self, **spec: int) -> Gang:
        self.submit("here", self.directory / "never")
        self.run(lambda: self.core.jobs["here"].state is JobState.RUNNING)
        argv = [sys.executable, "-c", SCRIPT, sys.executable, str(RANK), str(self.directory / "enough")]
        found = self.start("g", [*argv, "0", "--portable"], 2, **spec)
        self.run(lambda: found.command.launched)
        assert found.nodes == (1, 2)
        return found

    @property
    def attempts(self) -> int:
        """To bring its state to where it is to be."""
        return len(self.way.with_suffix(".attempts").read_text())

    def ports(self) -> list[str]:
        """What each of its commands was told, as far as they have printed it."""
        log = self.scheduler.local.processes.log("g", "out")
        return re.findall(r"^port (\d+)$", log.read_text(), re.MULTILINE) if log.exists() else []

    def trains(self) -> None:
        """Both parts of the gang, which have been told the same port."""
        job = self.core.jobs["g"]
        self.run(lambda: job.state is JobState.RUNNING and job.processes.trains and len(self.ports()) == 2)
        assert len(set(self.ports())) == 1

    def ends(self) -> None:
        (self.directory / "enough").touch()
        assert self.finish("g") == [JobState.SUCCEEDED]

    def close(self) -> None:
        for name in set(self.others) - set(self.agents):
            self.begin(name)
        for job in self.core.jobs.values():
            if not job.state.ended:
                self.scheduler.apply_request(Cancelled(job.id, "the test is over"))
        self.run(lambda: all(job.processes_gone for job in self.core.jobs.values()))
        self.remote.dismiss()
        self.scheduler.close()
        for agent in self.agents.values():
            agent.wait(PATIENCE_S)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    made = Apart(tmp_path)
    yield made
    made.close()


def test_the_agent_of_the_first_rank_s_node_chooses(apart: Apart) -> None:
    apart.begin("b")
    apart.begin("c")
    apart.gang()
    apart.trains()
    assert (apart.directory / "b" / "logs" / "g~0.port").read_text().split() == apart.ports()[:1]
    apart.ends()


@pytest.mark.parametrize("anew", [False, True])
def test_all_wait_for_the_node_where_they_meet(apart: Apart, anew: bool) -> None:
    """Also those of a scheduler that has just been started anew."""
    apart.begin("c")
    apart.gang()
    if anew:
        apart.reopen()
        apart.run(lambda: apart.joined.count("c") == 2)
    apart.begin("b")
    apart.trains()
    apart.ends()


@pytest.mark.parametrize("anew", [False, True])
def test_who_is_started_later_is_told_the_same_port_by_another_agent(apart: Apart, anew: bool) -> None:
    """The others run already; their agent is away when it is asked."""
    apart.begin("b")
    apart.gang()
    apart.run(lambda: len(apart.ports()) == 1)
    apart.end("b")
    if anew:
        apart.reopen()
    apart.begin("c")
    apart.begin("b")
    apart.trains()
    apart.ends()


def test_a_gang_whose_state_waits_is_started_once_on_a_node_that_was_away(apart: Apart) -> None:
    apart.begin("b")
    apart.begin("c")
    job = apart.gang()
    apart.trains()
    apart.scheduler.apply_request(Cancelled("here", "make room"))
    apart.scheduler.apply_request(Moved("g", ("null:0", "b/null:0")))
    apart.run(lambda: bool(apart.happened(StateWaits)))
    apart.end("b")
    apart.begin("b")
    attempts = apart.attempts
    apart.run(lambda: apart.attempts > attempts + 1)
    apart.way.touch()
    apart.run(lambda: job.state is JobState.RUNNING and job.processes.trains and job.nodes == (0, 1))
    apart.ends()
    assert len(apart.ports()) == 4, "two commands of each attempt"


def test_a_gang_that_waits_for_its_port_can_be_cancelled(apart: Apart) -> None:
    apart.begin("c")
    apart.gang()
    apart.scheduler.apply_request(Cancelled("g", "enough"))
    assert apart.finish("g") == [JobState.CANCELLED]
    assert apart.ports() == []


def test_a_gang_whose_first_node_is_lost_before_it_could_be_asked_is_started_elsewhere(apart: Apart) -> None:
    apart.begin("c")
    job = apart.gang()

    def taken_back() -> bool:
        apart.remote.nodes["b"].heard_s = -PATIENCE_S
        return bool(apart.happened(NodeLost)) and job.attempt == 1

    apart.run(taken_back)
    assert job.failures == 0
    apart.scheduler.apply_request(Cancelled("here", "make room"))
    apart.trains()
    assert job.nodes == (0, 2)
    apart.ends()
