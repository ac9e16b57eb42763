"""A scheduler with jobs on another node, whose agent is a process of its own; both are killed and cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Event,
    Exited,
    NodeFound,
    NodeLost,
    NodeSilent,
    Noted,
    Reported,
)
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes
from gpuslice.sched_core.nodes.transfers import Command as TransferCommand
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName
from gpuslice.wire import Hello

from ...patience import PATIENCE_S
from ...ports import unused_port
from .bench import RANK, alive
from .test_process_ends import RANKS, STEPS

AGENT = Path(__file__).with_name("node_process.py")
#: Ranks of a gang on several nodes: as many on each as a launcher is told.
ON_EACH_NODE = """
import os, subprocess, sys
first, count = int(os.environ["PET_NODE_RANK"]), int(os.environ["PET_NPROC_PER_NODE"])
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": str(first * count + number)})
    for number in range(count)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


class Site:
    """A scheduler of one device here and one on each of the others."""

    others: tuple[str, ...] = ("b",)
    #: What the agent is told besides.
    variables: tuple[str, ...] = ()

    def __init__(self, directory: Path, lost_after_s: float, transfer: TransferCommand | None = None) -> None:
        self.directory = directory
        self.transfer = transfer
        #: Where the agent is told to connect, if not to the scheduler itself.
        self.detour = ""
        self.keys = directory / "keys"
        self.lost_after_s = lost_after_s
        self.port = unused_port()
        self.lived: list[tuple[Event, float]] = []
        self.agent: subprocess.Popen[bytes] | None = None
        if not self.keys.exists():
            curve.make(self.keys)
        self.open()

    def open(self, *, keep: bool = True) -> None:
        nodes = ("", *self.others)
        devices = [DeviceName("null", 0, node=node) for node in nodes]
        self.core = Core(devices, RoundRobin(quantum_s=60.0))
        self.remote = RemoteNodes(
            dict.fromkeys(nodes, "127.0.0.1"),
            f"tcp://127.0.0.1:{self.port}",
            self.keys,
            MonotonicClock(),
            lost_after_s=self.lost_after_s,
            transfer=self.transfer,
        )
        self.scheduler = Scheduler(
            self.core, self.directory / "s", keep_jobs=keep, observer=self._observe, remote=self.remote
        )

    def _observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        self.core.check()
        self.lived.append((event, now))

    def reopen(self) -> None:
        """Another scheduler, that goes on with the jobs of this one."""
        self.scheduler.close()
        self.take_over()

    def take_over(self) -> None:
        """Another scheduler, after this one was closed."""
        self.open()
        past = [(event, now, self.core.handle(event, now)) for event, now in list(self.lived)]
        self.scheduler.take_over(past)

    def begin_agent(self) -> None:
        endpoint = self.detour or self.remote.endpoint
        words = ["b", str(self.directory / "b"), endpoint, str(self.keys), f"RANK_LOCKS={self.directory}"]
        self.agent = subprocess.Popen([sys.executable, str(AGENT), *words, *self.variables])

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def submit(
        self, job: str, boundaries: int | Path = 40, *options: str, ranks: int = 1, **spec: int
    ) -> Gang:
        argv = [sys.executable, str(RANK), str(boundaries), "0", *options]
        return self.start(job, argv, ranks, **spec)

    def start(self, job: str, argv: Sequence[str], ranks: int = 1, **spec: int) -> Gang:
        environ = {**os.environ, "WORLD": str(ranks)}
        program = Program(tuple(argv), "/", environ)
        self.scheduler.submit(JobSpec(id=job, submit_s=0.0, devices=ranks, **spec), program)
        return self.core.jobs[job]

    def on_b(self, job: str, boundaries: int | Path, **spec: int) -> Gang:
        """A job that runs on node b."""
        self.submit("here", self.directory / "never")
        found = self.submit(job, boundaries, **spec)
        self.run(lambda: found.state is JobState.RUNNING and found.processes.trains)
        assert found.lease == (1,)
        return found

    def run(self, until: Callable[[], bool]) -> None:
        assert self.scheduler.run(until, timeout_s=PATIENCE_S), {
            job.id: (job.state, list(job.history)) for job in self.core.jobs.values()
        }

    def finish(self, *jobs: str) -> list[JobState]:
        found = [self.core.jobs[job] for job in jobs]
        self.run(lambda: all(job.state.ended and job.processes_gone for job in found))
        return [job.state for job in found]

    def output(self, job: str, stream: str = "out") -> str:
        return self.scheduler.local.processes.log(job, stream).read_text()

    def happened(self, kind: type[Event]) -> list[Event]:
        return [event for event, _ in self.lived if isinstance(event, kind)]

    def hellos(self) -> int:
        return sum(isinstance(one, Reported) and isinstance(one.message, Hello) for one, _ in self.lived)

    def notes(self, what: str) -> list[Noted]:
        return [one for one, _ in self.lived if isinstance(one, Noted) and one.what == what]

    def close(self) -> None:
        """Nothing is left behind."""
        if self.agent is not None:
            self.agent.send_signal(signal.SIGCONT)
            if self.agent.poll() is not None:
                self.begin_agent()
            self.scheduler.run(lambda: self.remote.nodes["b"].joined, timeout_s=PATIENCE_S)
            for job in self.core.jobs.values():
                if not job.state.ended:
                    self.scheduler.apply_request(Cancelled(job.id, "the test is over"))
            self.scheduler.run(
                lambda: all(job.processes_gone for job in self.core.jobs.values()), timeout_s=PATIENCE_S
            )
            self.remote.dismiss()
        self.scheduler.close()
        if self.agent is not None:
            self.agent.wait(PATIENCE_S)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, lost_after_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, lost_after_s=2.0)
    yield made
    made.close()


def test_jobs_run_on_both_nodes_and_their_output_comes_here(site: Site) -> None:
    site.begin_agent()
    for job in "abcd":
        site.submit(job)
    site.start("e", [sys.executable, "-c", "import os, sys; print(os.environ['NODE']); sys.exit(3)"])
    site.run(lambda: site.core.jobs["e"].state.ended)
    assert site.finish(*"abcd") == [JobState.SUCCEEDED] * 4
    assert {site.core.jobs[job].nodes for job in "abcd"} == {(0,), (1,)}


def test_what_a_job_prints_elsewhere_is_here_when_it_has_ended(site: Site) -> None:
    site.begin_agent()
    site.submit("here", site.directory / "never")
    script = "import os, sys; print(os.environ['NODE'] * 600000); sys.stderr.write('oh'); sys.exit(3)"
    site.start("e", [sys.executable, "-c", script])
    assert site.finish("e") == [JobState.FAILED]
    assert site.output("e") == "b" * 600000 + "\n"
    assert site.output("e", "err") == "oh"
    assert site.core.jobs["e"].command.exit_code == 3


def test_a_command_that_cannot_be_started_there_says_so(site: Site) -> None:
    site.begin_agent()
    site.submit("here", site.directory / "never")
    site.start("e", ["/no/such/program"])
    assert site.finish("e") == [JobState.FAILED]
    assert site.core.jobs["e"].command.exit_code == 127
    assert "cannot start /no/such/program" in site.output("e", "err")


def test_all_that_a_rank_there_said_is_heard_before_its_end(site: Site) -> None:
    site.begin_agent()
    site.submit("here", site.directory / "never")
    site.start("a", [sys.executable, "-c", RANKS, "1"])
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert site.core.jobs["a"].steps == STEPS


def test_a_job_waits_for_its_node_to_be_reached(site: Site) -> None:
    site.submit("here", site.directory / "never")
    job = site.submit("a")
    site.run(lambda: site.core.jobs["here"].state is JobState.RUNNING)
    assert job.command.launched
    site.begin_agent()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_a_job_outlives_the_agent_and_is_told_to_end_by_the_next(site: Site) -> None:
    site.begin_agent()
    job = site.on_b("a", site.directory / "enough")
    pid = job.ranks[0].pid
    site.kill_agent()
    site.begin_agent()
    hellos = site.hellos()
    site.run(lambda: site.hellos() > hellos)
    assert (job.state, job.ranks[0].pid) == (JobState.RUNNING, pid)
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert [end for end in site.happened(Exited) if isinstance(end, Exited) and end.code] == []


def test_a_job_that_ends_while_there_is_no_agent_has_ended_all_the_same(site: Site) -> None:
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    site.kill_agent()
    (site.directory / "enough").touch()
    record = site.directory / "b" / "logs" / "a.exit"
    site.run(lambda: record.read_bytes()[16:].strip() == b"0")
    site.begin_agent()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_another_scheduler_goes_on_with_jobs_there(site: Site) -> None:
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    site.reopen()
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_no_node_is_lost_before_its_agent_could_be_heard(site: Site) -> None:
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    site.reopen()
    # So long the journal was read, or the clock went ahead to where it ends.
    site.remote.nodes["b"].heard_s -= PATIENCE_S
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert not site.happened(NodeLost)


def test_a_cancelled_job_that_does_not_listen_is_killed(site: Site) -> None:
    site.begin_agent()
    site.submit("here", site.directory / "never")
    job = site.submit("a", site.directory / "enough", "--deaf", grace_s=1)
    site.run(lambda: job.state is JobState.RUNNING)
    pid = job.ranks[0].pid
    site.scheduler.apply_request(Cancelled("a", "enough"))
    assert site.finish("a") == [JobState.CANCELLED]
    assert not alive(pid)


def test_a_short_silence_changes_nothing(site: Site) -> None:
    site.begin_agent()
    job = site.on_b("a", site.directory / "enough")
    assert site.agent is not None
    site.agent.send_signal(signal.SIGSTOP)
    (site.directory / "enough").touch()
    record = site.directory / "b" / "logs" / "a.exit"
    site.run(lambda: record.read_bytes()[16:].strip() == b"0")
    assert job.state is JobState.RUNNING
    site.agent.send_signal(signal.SIGCONT)
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert not site.happened(NodeLost)


def test_a_node_that_is_silent_for_long_is_lost_and_what_ran_there_is_ended_when_it_is_found(
    impatient: Site,
) -> None:
    site = impatient
    site.begin_agent()
    site.run(lambda: site.remote.nodes["b"].joined)
    job = site.on_b("a", site.directory / "enough", max_restarts=1, wait_for_node_s=0)
    pid = job.ranks[0].pid
    assert site.agent is not None
    site.agent.send_signal(signal.SIGSTOP)
    site.run(lambda: bool(site.happened(NodeLost)) and job.attempt == 1)
    assert [note.details["node"] for note in site.notes("went_without")] == ["b"]
    assert (job.failures, site.notes("failed")) == (0, [])
    site.scheduler.apply_request(Cancelled("here", "make room"))
    site.run(lambda: job.state is JobState.RUNNING)
    assert job.nodes == (0,)
    assert alive(pid)
    site.agent.send_signal(signal.SIGCONT)
    site.run(lambda: bool(site.happened(NodeFound)) and not alive(pid))
    assert job.state is JobState.RUNNING
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_a_training_goes_on_when_its_node_was_lost_and_is_found(impatient: Site) -> None:
    site = impatient
    site.begin_agent()
    site.run(lambda: site.remote.nodes["b"].joined)
    job = site.on_b("a", site.directory / "enough")
    pid = job.ranks[0].pid
    assert site.agent is not None
    site.agent.send_signal(signal.SIGSTOP)
    site.run(lambda: job.activity is Activity.WAITS)
    assert NodeSilent("b") in site.happened(NodeSilent)
    assert NodeLost("b") in site.happened(NodeLost)
    site.agent.send_signal(signal.SIGCONT)
    site.run(lambda: bool(site.happened(NodeFound)) and job.activity is Activity.TRAINS)
    assert (job.attempt, job.ranks[0].pid) == (0, pid)
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_a_job_that_has_not_begun_is_started_elsewhere_when_its_node_is_silent(site: Site) -> None:
    """Its command is not known to have started there. When the node answers again, it is told to end."""
    site.begin_agent()
    site.run(lambda: site.remote.nodes["b"].joined)
    assert site.agent is not None
    site.agent.send_signal(signal.SIGSTOP)
    site.submit("here", site.directory / "never")
    job = site.submit("a", site.directory / "enough")
    assert job.nodes == (1,)
    site.run(lambda: job.nodes == (0,) and job.ready)
    site.scheduler.apply_request(Cancelled("here", "make room"))
    site.run(lambda: job.state is JobState.RUNNING)
    site.agent.send_signal(signal.SIGCONT)
    site.run(lambda: bool(site.happened(NodeFound)))
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert (job.attempt, job.failures, site.output("a").count("begins")) == (1, 0, 1)
    assert not site.happened(NodeLost)


def test_a_gang_has_ranks_on_both_nodes(site: Site) -> None:
    site.begin_agent()
    argv = [sys.executable, "-c", ON_EACH_NODE, sys.executable, str(RANK), "40", "0"]
    job = site.start("g", argv, 2)
    assert site.finish("g") == [JobState.SUCCEEDED]
    assert job.nodes == (0, 1)
    assert {(end.node, end.code) for end in site.happened(Exited)} == {("", 0), ("b", 0)}
    assert len(site.happened(Exited)) == 2, "each of the two commands has one end"


def test_when_one_part_of_a_gang_fails_the_other_is_ended(site: Site) -> None:
    site.begin_agent()
    failing = "import os, signal, sys\nif os.environ['PET_NODE_RANK'] == '1': sys.exit(9)\nsignal.pause()"
    job = site.start("g", [sys.executable, "-c", failing], 2)
    assert site.finish("g") == [JobState.FAILED]
    assert job.command.exit_code == 9
