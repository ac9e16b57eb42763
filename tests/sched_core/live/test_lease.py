"""Jobs that would be started elsewhere stand still on a node whose scheduler is not heard of, and go on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuslice.clock import BoottimeClock
from gpuslice.config import variable
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, NodeFound, NodeLost
from gpuslice.sched_core.nodes import exit_record, supervisor
from gpuslice.sched_core.nodes.lease import LEASED, SILENT_AFTER_S, Lease
from gpuslice.sched_core.nodes.local_node import rank_endpoint

from ...patience import PATIENCE_S
from ...virtual_clock import VirtualClock
from .proxy import Proxy
from .test_nodes import Site, alive

ENDPOINT = "ipc:///nowhere"
#: A process with a child; both say nothing and wait.
CHILD = "import signal; signal.pause()"
FAMILY = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def child_runs(parent: psutil.Process) -> bool:
    """Until its exec the child has the words of its parent, which waits for that and cannot be stopped."""
    return any(one.cmdline()[-1:] == [CHILD] for one in parent.children(recursive=True))


def wait_for(holds: Callable[[], bool]) -> None:
    """Until something becomes true while nobody serves."""
    ends_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def wait_until_stopped(family: list[psutil.Process]) -> None:
    wait_for(lambda: all(stopped(one.pid) for one in family))


def renewed(directory: Path) -> tuple[Lease, VirtualClock]:
    """A lease of a scheduler that takes a node for lost after 10 s; it begins at 1000 s."""
    clock = VirtualClock(1000.0)
    lease = Lease(directory, ENDPOINT, clock)
    lease.renew(lease.sent(), 10.0)
    return lease, clock


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """A process that is leased, and its child."""
    environ = {**os.environ, variable("socket"): ENDPOINT, LEASED: "1", variable("job"): "a"}
    with subprocess.Popen([sys.executable, "-c", FAMILY], env=environ) as process:
        parent = psutil.Process(process.pid)
        try:
            wait_for(lambda: child_runs(parent))
            yield [parent, *parent.children()]
        finally:
            for one in [parent, *parent.children()]:
                one.kill()


def test_what_was_just_started_is_stopped_before_the_scheduler_takes_it_back(
    tmp_path: Path, family: list[psutil.Process]
) -> None:
    lease, clock = renewed(tmp_path)
    lease.started("a")
    clock.advance_to(1000.0 + 0.8 * SILENT_AFTER_S)
    lease.enforce()
    assert not any(stopped(one.pid) for one in family)
    number = lease.sent()
    clock.advance_to(1000.0 + 1.75 * SILENT_AFTER_S)
    lease.enforce()
    wait_until_stopped(family)
    lease.renew(number, 10.0)
    assert stopped(family[0].pid), "that answer is as old as a silence"
    lease.renew(lease.sent(), 10.0)
    wait_for(lambda: not any(stopped(one.pid) for one in family))
    lease.is_known("a")
    clock.advance_to(1000.0 + 2.8 * SILENT_AFTER_S)
    lease.enforce()
    assert not any(stopped(one.pid) for one in family)


def test_it_ends_a_tenth_before_the_scheduler_takes_the_node_for_lost(
    tmp_path: Path, family: list[psutil.Process]
) -> None:
    clock = VirtualClock(1000.0)
    lease = Lease(tmp_path, ENDPOINT, clock)
    number = lease.sent()
    clock.advance_to(1005.0)  # so long the answer is on its way
    lease.renew(number, 10.0)
    clock.advance_to(1008.9)
    lease.enforce()
    assert not any(stopped(one.pid) for one in family)
    clock.advance_to(1009.1)
    lease.enforce()
    wait_until_stopped(family)
    later = lease.sent()
    lease.renew(later, 10.0)
    wait_for(lambda: not any(stopped(one.pid) for one in family))


def test_what_another_agent_has_sent_renews_nothing(tmp_path: Path, family: list[psutil.Process]) -> None:
    clock = VirtualClock(1000.0)
    former = Lease(tmp_path, ENDPOINT, clock).sent()
    clock.advance_to(1001.0)
    lease = Lease(tmp_path, ENDPOINT, clock)
    assert lease.sent() != former
    lease.renew(former, 10.0)
    lease.enforce()
    wait_until_stopped(family)


def test_an_answer_that_comes_too_late_lets_nothing_go_on(
    tmp_path: Path, family: list[psutil.Process]
) -> None:
    clock = VirtualClock(1000.0)
    lease = Lease(tmp_path, ENDPOINT, clock)
    number = lease.sent()
    clock.advance_to(1020.0)
    lease.enforce()
    lease.renew(number, 10.0)
    wait_until_stopped(family)


def test_the_next_agent_goes_on_with_it(tmp_path: Path, family: list[psutil.Process]) -> None:
    _, clock = renewed(tmp_path)
    following = Lease(tmp_path, ENDPOINT, clock)
    clock.advance_to(1008.9)
    following.enforce()
    assert not any(stopped(one.pid) for one in family)
    clock.advance_to(1009.1)
    following.enforce()
    wait_until_stopped(family)


@pytest.mark.parametrize("content", [b"", b"2000.0", b"\xff"])
def test_a_file_that_cannot_be_read_is_no_lease(
    tmp_path: Path, family: list[psutil.Process], content: bytes
) -> None:
    (tmp_path / "lease").write_bytes(content)
    Lease(tmp_path, ENDPOINT, VirtualClock(1000.0)).enforce()
    wait_until_stopped(family)


def test_others_are_left_alone(tmp_path: Path) -> None:
    environ = {**os.environ, variable("socket"): ENDPOINT}
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=environ) as process:
        try:
            Lease(tmp_path, ENDPOINT, VirtualClock(1000.0)).enforce()
            assert not stopped(process.pid)
        finally:
            process.kill()


def test_after_a_restart_of_the_machine_its_clock_begins_anew(
    tmp_path: Path, family: list[psutil.Process]
) -> None:
    renewed(tmp_path)
    clock = VirtualClock(5.0)
    after = Lease(tmp_path, ENDPOINT, clock)
    clock.advance_to(14.1)
    after.enforce()
    wait_until_stopped(family)


@pytest.mark.parametrize("listens", [False, True])
def test_it_is_renewed_where_the_scheduler_s_machine_says_that_there_is_none(
    tmp_path: Path, family: list[psutil.Process], listens: bool
) -> None:
    """Not if somebody listens who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scheduler = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        if not listens:
            listener.close()
        lease, clock = renewed(tmp_path)
        for _ in range(10):
            clock.advance_to(clock.now() + 2.0)
            lease.renew_if_refused(scheduler)
            lease.enforce()
        wait_for(lambda: [stopped(one.pid) for one in family] == [listens, listens])


def test_on_a_full_disk_it_holds_all_the_same(tmp_path: Path, family: list[psutil.Process]) -> None:
    lease, clock = renewed(tmp_path / "gone")
    lease.enforce()
    assert not any(stopped(one.pid) for one in family)
    clock.advance_to(1009.1)
    lease.enforce()
    wait_until_stopped(family)


def test_a_supervisor_stops_all_that_its_command_has_started_until_the_lease_is_renewed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lease"
    file.write_text(f"{BoottimeClock().now() + PATIENCE_S} 9.0\n")
    environ = {**os.environ, variable("socket"): rank_endpoint(tmp_path), LEASED: "1"}
    record = exit_record.create(tmp_path / "a.exit")
    words = [sys.executable, "-I", "-S", supervisor.__file__, str(record), sys.executable, "-c"]
    family = FAMILY.replace("])", "], start_new_session=True)")
    with subprocess.Popen([*words, family], env=environ, pass_fds=[record]) as process:
        parent = psutil.Process(process.pid)
        try:
            wait_for(lambda: child_runs(parent))
            started = parent.children(recursive=True)
            file.write_text("0.0 9.0\n")
            wait_until_stopped(started)
            file.write_text("")
            file.write_text(f"{BoottimeClock().now() + PATIENCE_S} 9.0\n")
            wait_for(lambda: not any(stopped(one.pid) for one in started))
        finally:
            for one in [*parent.children(recursive=True), parent]:
                one.kill()


def ends_s(file: Path) -> float:
    """When a lease is over, as its file says; it may be about to be written."""
    return float((file.read_text() or "inf").split()[0])


class Cut(Site):
    """A scheduler whose agent on node b is behind a proxy, and gets short leases when that is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, PATIENCE_S)
        self.proxy = Proxy(int(self.port))
        self.detour = f"tcp://127.0.0.1:{self.proxy.port}"

    def leased(self, job: str, **spec: int) -> Gang:
        """A job on node b, which will stand still in a moment unless the scheduler is heard of."""
        self.begin_agent()
        found = self.on_b(job, self.directory / "enough", **spec)
        self.remote._lost_after_s = 1.0
        file = self.directory / "b" / "lease"
        soon_s = BoottimeClock().now() + PATIENCE_S / 2
        self.run(lambda: file.exists() and ends_s(file) < soon_s)
        self.remote._lost_after_s = PATIENCE_S
        return found

    def close(self) -> None:
        self.proxy.mend()
        super().close()
        self.proxy.close()


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Cut]:
    made = Cut(tmp_path)
    yield made
    made.close()


def test_a_job_that_is_started_elsewhere_does_not_run_twice(cut: Cut) -> None:
    job = cut.leased("a", max_restarts=1, wait_for_node_s=0)
    pid = job.ranks[0].pid
    cut.proxy.cut()
    wait_for(lambda: stopped(pid))  # before anything is started elsewhere: nobody serves
    assert not cut.happened(NodeLost)
    cut.remote._lost_after_s = 0.5
    cut.run(lambda: bool(cut.happened(NodeLost)))
    cut.remote._lost_after_s = PATIENCE_S
    cut.scheduler.apply_request(Cancelled("here", "make room"))
    cut.run(lambda: job.attempt == 1 and job.state is JobState.RUNNING)
    assert stopped(pid)
    cut.proxy.mend()
    cut.run(lambda: bool(cut.happened(NodeFound)) and not alive(pid))
    (cut.directory / "enough").touch()
    assert cut.finish("a") == [JobState.SUCCEEDED]


@pytest.mark.parametrize("way", ["served again", "started anew", "with its agent"])
def test_a_job_goes_on_when_its_scheduler_is_there_again(cut: Cut, way: str) -> None:
    job = cut.leased("a", max_restarts=1)
    pid = job.ranks[0].pid
    wait_for(lambda: stopped(pid))
    if way == "started anew":
        cut.reopen()
    elif way == "with its agent":
        cut.kill_agent()
        cut.begin_agent()
    cut.run(lambda: not stopped(pid))
    (cut.directory / "enough").touch()
    assert cut.finish("a") == [JobState.SUCCEEDED]
    assert cut.core.jobs["a"].attempt == 0
    assert not cut.happened(NodeLost)


def test_a_job_stands_still_although_its_agent_was_killed_and_goes_on_with_the_next(cut: Cut) -> None:
    job = cut.leased("a", max_restarts=1)
    pid = job.ranks[0].pid
    cut.kill_agent()
    wait_for(lambda: stopped(pid))
    cut.begin_agent()
    cut.run(lambda: not stopped(pid))
    (cut.directory / "enough").touch()
    assert cut.finish("a") == [JobState.SUCCEEDED]
    assert cut.core.jobs["a"].attempt == 0


def test_a_job_runs_on_while_there_is_no_scheduler(tmp_path: Path) -> None:
    site = Cut(tmp_path)
    try:
        site.detour = ""
        job = site.leased("a", max_restarts=1)
        pid, file = job.ranks[0].pid, tmp_path / "b" / "lease"
        site.scheduler.close()
        renewed = ends_s(file)
        wait_for(lambda: ends_s(file) > renewed + 1.0)
        # On a busy machine so short a lease may have been over for a moment.
        wait_for(lambda: not stopped(pid))
        site.take_over()
        (tmp_path / "enough").touch()
        assert site.finish("a") == [JobState.SUCCEEDED]
        assert site.core.jobs["a"].attempt == 0
    finally:
        site.close()


def test_a_job_that_nobody_would_start_again_runs_on(cut: Cut) -> None:
    job = cut.leased("a")
    pid = job.ranks[0].pid
    (cut.directory / "enough").touch()
    wait_for(lambda: not alive(pid))  # it ends although nobody serves
    assert cut.finish("a") == [JobState.SUCCEEDED]
