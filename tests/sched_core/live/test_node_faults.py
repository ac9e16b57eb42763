"""An agent that is cut off for a while, and states that cannot be brought to another node."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Exited,
    Held,
    Moved,
    NodeFound,
    NodeLost,
    Released,
    Reported,
    StateWaits,
)
from gpuslice.wire import Suspended

from ...patience import PATIENCE_S
from .bench import alive
from .proxy import Proxy
from .test_nodes import Site

#: Brings a state when there is a file of that name; says of every attempt that it was made.
TRANSFER = """
import os, sys
path = sys.argv[1]
with open(path + ".attempts", "a") as attempts:
    attempts.write("x")
if not os.path.exists(path):
    sys.stderr.write("no Ray cluster answers")
    sys.exit(3)
"""


class Partition:
    """A scheduler whose agent can be cut off: stopped, or its connection lost, or what is sent kept."""

    def __init__(self, directory: Path, lost_after_s: float, way: str) -> None:
        self.site = Site(directory, lost_after_s)
        self.proxy = Proxy(int(self.site.port))
        self.site.detour = f"tcp://127.0.0.1:{self.proxy.port}"
        self.way = way

    def begin(self) -> None:
        if self.way == "stopped":
            self._signal(signal.SIGSTOP)
        elif self.way == "cut":
            self.proxy.cut()
        else:
            self.proxy.hold()

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self.proxy.mend()

    def _signal(self, number: signal.Signals) -> None:
        assert self.site.agent is not None
        self.site.agent.send_signal(number)

    def close(self) -> None:
        self.end()
        self.site.close()
        self.proxy.close()


@pytest.fixture(params=["stopped", "cut", "held"])
def short(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
    made = Partition(tmp_path, PATIENCE_S, request.param)
    yield made
    made.close()


@pytest.fixture(params=["stopped", "held"])
def long(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
    made = Partition(tmp_path, 2.0, request.param)
    yield made
    made.close()


def suspends(site: Site, job: str) -> int:
    reports = [event for event, _ in site.lived if isinstance(event, Reported) and event.job == job]
    return sum(isinstance(report.message, Suspended) for report in reports)


def test_orders_arrive_exactly_once_after_an_agent_was_cut_off(short: Partition) -> None:
    site = short.site
    site.begin_agent()
    job = site.on_b("a", site.directory / "enough")
    pid, epoch = job.ranks[0].pid, job.epoch
    other = site.submit("other", site.directory / "never")
    site.run(lambda: other.command.launched)
    site.scheduler.apply_request(Held("other"))
    short.begin()
    site.scheduler.apply_request(Held("a"))
    # The order to start its command on b, where fewest are, is given while nobody hears it.
    waiting = site.submit("w")
    site.run(lambda: waiting.command.launched)
    assert (job.state, waiting.nodes) == (JobState.SUSPENDING, (1,))
    short.end()
    assert site.finish("w") == [JobState.SUCCEEDED]
    assert site.output("w").count("begins") == 1
    assert (job.state, suspends(site, "a")) == (JobState.SUSPENDED, 1)
    site.scheduler.apply_request(Released("a"))
    site.run(lambda: job.state is JobState.RUNNING)
    assert (job.ranks[0].pid, job.attempt, job.epoch) == (pid, 0, epoch + 1)
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert not site.happened(NodeLost)


@pytest.mark.parametrize("short", ["cut", "held"], indirect=True)
def test_a_job_that_ends_while_its_agent_is_cut_off_has_ended_once(short: Partition) -> None:
    site = short.site
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    short.begin()
    (site.directory / "enough").touch()
    record = site.directory / "b" / "logs" / "a.exit"
    site.run(lambda: record.read_bytes()[16:].strip() == b"0")
    short.end()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert len(site.happened(Exited)) == 1
    assert not site.happened(NodeLost)


def test_what_still_runs_on_a_lost_node_is_dead_before_its_devices_are_given(long: Partition) -> None:
    site = long.site
    site.begin_agent()
    site.run(lambda: site.remote.nodes["b"].joined)
    job = site.on_b("a", site.directory / "enough", max_restarts=1, wait_for_node_s=0)
    pid = job.ranks[0].pid
    long.begin()
    site.run(lambda: bool(site.happened(NodeLost)) and job.attempt == 1)
    site.scheduler.apply_request(Cancelled("here", "make room"))
    site.run(lambda: job.state is JobState.RUNNING)
    waiting = site.submit("w", site.directory / "through")
    site.run(lambda: waiting.command.launched)
    assert alive(pid)
    long.end()
    site.run(lambda: waiting.state is JobState.RUNNING)
    assert site.happened(NodeFound)
    assert not alive(pid)
    (site.directory / "enough").touch()
    (site.directory / "through").touch()
    assert site.finish("a", "w") == [JobState.SUCCEEDED] * 2
    assert waiting.nodes == (1,)
    assert "clash" not in site.output("w"), "a was on b's device still"


class Mover:
    """A job that is to go from node to node while its state cannot be brought."""

    def __init__(self, directory: Path, lost_after_s: float) -> None:
        self.way = directory / "way"
        self.site = Site(directory, lost_after_s, self._command)
        self.site.begin_agent()
        self.site.run(lambda: self.site.remote.nodes["b"].joined)

    def _command(self, job: str, sources: Sequence[str], targets: Sequence[str]) -> Sequence[str]:
        assert (job, {*sources, *targets}, len(targets)) == ("a", {"", "b"}, 1)
        return [sys.executable, "-S", "-c", TRANSFER, str(self.way)]

    def go(self, **spec: int) -> Gang:
        """On its way to b, since the second attempt."""
        job = self.site.submit("a", self.site.directory / "enough", "--portable", **spec)
        self.site.run(lambda: job.state is JobState.RUNNING and job.processes.trains)
        assert job.lease == (0,)
        self.site.scheduler.apply_request(Moved("a", ("b/null:0",)))
        self.site.run(lambda: self.attempts >= 2)
        return job

    def brings_no_more(self) -> None:
        """Wait until the transfer, which was cancelled, has ended."""
        transfers = self.site.remote.transfers
        assert transfers is not None
        self.site.run(lambda: not transfers.under_way("a"))

    @property
    def attempts(self) -> int:
        path = self.way.with_suffix(".attempts")
        return len(path.read_text()) if path.exists() else 0


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[Mover]:
    made = Mover(tmp_path, PATIENCE_S)
    yield made
    made.site.close()


@pytest.fixture
def impatient_mover(tmp_path: Path) -> Iterator[Mover]:
    made = Mover(tmp_path, 2.0)
    yield made
    made.site.close()


def test_a_job_waits_until_its_state_can_be_brought(mover: Mover) -> None:
    job = mover.go()
    assert mover.site.happened(StateWaits) == [StateWaits("a", 1, "b", "no Ray cluster answers")]
    mover.way.touch()
    mover.site.run(lambda: job.state is JobState.RUNNING)
    (mover.site.directory / "enough").touch()
    assert mover.site.finish("a") == [JobState.SUCCEEDED]
    assert (job.nodes, mover.site.notes("failed")) == ((1,), [])
    assert len(mover.site.happened(StateWaits)) == 1


def test_a_job_whose_state_waits_can_be_moved_back(mover: Mover) -> None:
    job = mover.go()
    mover.site.scheduler.apply_request(Moved("a", ("null:0",)))
    mover.site.run(lambda: job.state is JobState.RUNNING)
    assert (job.lease, job.nodes, job.failures) == ((0,), (0,), 0)
    mover.brings_no_more()
    (mover.site.directory / "enough").touch()
    assert mover.site.finish("a") == [JobState.SUCCEEDED]


def test_a_job_whose_state_waits_can_be_cancelled(mover: Mover) -> None:
    mover.go()
    mover.site.scheduler.apply_request(Cancelled("a", "enough"))
    assert mover.site.finish("a") == [JobState.CANCELLED]
    mover.brings_no_more()


def test_why_a_state_cannot_even_be_sent_is_told_although_the_log_of_the_job_cannot_be_written(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = mover.site
    job = site.submit("a", site.directory / "enough", "--portable")
    site.run(lambda: job.state is JobState.RUNNING and job.processes.trains)

    def refuse(*_: object) -> None:
        log = site.scheduler.local.processes.log("a", "err")
        log.unlink()
        log.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(site.remote.transfers, "_command", refuse)
    site.scheduler.apply_request(Moved("a", ("b/null:0",)))
    assert site.finish("a") == [JobState.FAILED], "it cannot be started without a log"
    assert ["No space left on device" in note.details["reason"] for note in site.notes("not_moved")] == [True]


def test_if_the_node_is_lost_to_which_a_state_is_brought_the_job_is_started_where_it_is(
    impatient_mover: Mover,
) -> None:
    site = impatient_mover.site
    job = impatient_mover.go(max_restarts=1)
    assert site.agent is not None
    os.kill(site.agent.pid, signal.SIGSTOP)
    site.run(lambda: job.attempt == 2 and job.state is JobState.RUNNING)  # after the move and the failure
    assert job.nodes == (0,)
    impatient_mover.brings_no_more()
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
