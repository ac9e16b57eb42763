"""The live shell with real sockets and real processes (which train nothing, see rank.py)."""

from __future__ import annotations

import logging
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import zmq

from gpuslice import wire
from gpuslice.errors import EnvironmentUnusableError, UnforeseenError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.core.events import (
    Cancelled,
    Command,
    Event,
    Exited,
    Held,
    Noted,
    RankGone,
    Reported,
    Submitted,
    Tell,
)
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.nodes import exit_record, processes
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

RANK = Path(__file__).parents[1] / "rank.py"


class Bench:
    """A scheduler, its core, and everything that happened."""

    def __init__(self, directory: Path, device_count: int) -> None:
        devices = [DeviceName("null", index) for index in range(device_count)]
        self.core = Core(devices, RoundRobin(quantum_s=0.05), handover=True)
        self.story: list[tuple[Event, Sequence[Command]]] = []
        self.scheduler = Scheduler(self.core, directory, observer=self.observe)

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        self.core.check()
        self.story.append((event, commands))

    def submit(
        self,
        job: str,
        boundaries: int | Path = 40,
        *,
        code: int = 0,
        ranks: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        argv = (sys.executable, str(RANK), str(boundaries), str(code), *options)
        program = Program(argv, "/", {**os.environ, "WORLD": str(ranks)})
        self.scheduler.submit(JobSpec(id=job, submit_s=0.0, demand=ranks), program)

    def run(self, until: Callable[[], bool]) -> None:
        assert self.scheduler.run(until, timeout_s=PATIENCE_S), {
            job.id: (job.state, list(job.history)) for job in self.core.jobs.values()
        }

    def finish(self) -> dict[str, JobState]:
        self.run(lambda: all(job.state.ended and job.processes_gone for job in self.core.jobs.values()))
        return {job.id: job.state for job in self.core.jobs.values()}

    def wait_for(self, job: str, state: JobState) -> None:
        self.run(lambda: self.core.jobs[job].state is state)

    def output(self, job: str, stream: str = "out") -> str:
        return self.scheduler.local.processes.log(job, stream).read_text()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def former() -> list[psutil.Process]:
    """What other tests let Python start in this process, such as the resource tracker of multiprocessing."""
    return psutil.Process().children(recursive=True)


def children(former: list[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child not in former]


@pytest.fixture
def open_bench(directory: Path, former: list[psutil.Process]) -> Iterator[Callable[[int], Bench]]:
    opened: list[Bench] = []

    def open_one(device_count: int = 1) -> Bench:
        opened.append(Bench(directory, device_count))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.scheduler.close()
    assert children(former) == []


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """A job that trains until there is such a file is suspended in between, however slow the machine is."""
    return tmp_path / "enough"


def test_two_jobs_take_turns_on_one_device(open_bench: Callable[[int], Bench], enough: Path) -> None:
    bench = open_bench(1)
    bench.submit("a", 10**6)
    bench.wait_for("a", JobState.RUNNING)
    bench.submit("b", enough)

    def turns() -> list[str]:
        holders = [event.job for event, _ in bench.story if is_report(event, wire.Resumed)]
        return [job for job, before in zip(holders, [None, *holders], strict=False) if job != before]

    bench.run(lambda: len(turns()) >= 4)
    assert turns()[:4] == ["a", "b", "a", "b"]
    enough.touch()
    bench.wait_for("b", JobState.SUCCEEDED)
    assert bench.output("b").endswith(f"ends at {bench.core.jobs['b'].ranks[0].step}\n")
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    assert bench.finish() == {"a": JobState.CANCELLED, "b": JobState.SUCCEEDED}


def test_a_device_is_handed_over_past_the_scheduler(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK_LOCKS", str(tmp_path))
    bench = open_bench(1)
    for job in "ab":
        bench.submit(job, 10**6)
    bench.run(lambda: all("came through its door" in bench.output(job) for job in "ab"))
    for job in "ab":
        bench.scheduler.apply_request(Cancelled(job, "enough"))
    assert set(bench.finish().values()) == {JobState.CANCELLED}
    assert not any("clash" in bench.output(job) for job in "ab")


def test_the_wall_clock_is_nobody_s_business(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped() -> int:
        if sys._getframe(1).f_globals["__name__"] == logging.__name__:
            return 0  # a line in a log says when it was written
        raise AssertionError("it may have been set to any other time")

    bench = open_bench(1)
    bench.submit("a", 10**6)
    bench.wait_for("a", JobState.RUNNING)
    monkeypatch.setattr(time, "time", stepped)
    monkeypatch.setattr(time, "time_ns", stepped)
    bench.submit("b", 60)
    bench.wait_for("b", JobState.SUCCEEDED)
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    assert bench.finish() == {"a": JobState.CANCELLED, "b": JobState.SUCCEEDED}


def is_report(event: Event, kind: type) -> bool:
    return isinstance(event, Reported) and isinstance(event.message, kind)


def test_a_gang_stops_at_one_boundary(open_bench: Callable[[int], Bench], enough: Path) -> None:
    bench = open_bench(2)
    bench.submit("pair", enough, ranks=2)
    bench.submit("alone", 10**6)
    bench.wait_for("pair", JobState.SUSPENDED)
    ranks = bench.core.jobs["pair"].ranks
    assert len({rank.boundary for rank in ranks}) == 1
    enough.touch()
    bench.wait_for("pair", JobState.SUCCEEDED)
    bench.scheduler.apply_request(Cancelled("alone", "enough"))
    assert bench.finish() == {"pair": JobState.SUCCEEDED, "alone": JobState.CANCELLED}


DIES_AFTER_HELLO = """
import os, sys, zmq
from gpuslice import wire
if os.fork() == 0:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(os.environ["GPUSLICE_SOCKET"])
        hello = wire.Hello(version=wire.PROTOCOL_VERSION, job="a", rank=0, world_size=1, pid=os.getpid())
        dealer.send(wire.encode(hello))
else:
    os.wait()
"""


def test_a_rank_that_is_gone_before_its_hello_is_read_is_not_lost(
    open_bench: Callable[[int], Bench],
) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, "-c", DIES_AFTER_HELLO), "/", dict(os.environ))
    bench.scheduler.submit(JobSpec(id="a", submit_s=0.0), program)
    (command,) = bench.scheduler.local.processes.descriptors
    assert select.select([command], [], [], PATIENCE_S)[0], "rank and launcher are gone now"
    assert bench.finish() == {"a": JobState.SUCCEEDED}
    assert [event.job for event, _ in bench.story if isinstance(event, RankGone)] == ["a"]


def test_a_gang_fails_by_name_if_a_rank_never_comes_and_its_launcher_waits_on(
    open_bench: Callable[[int], Bench],
) -> None:
    """As after the death of rank 0 before its Hello, of which nobody but the launcher can know."""
    bench = open_bench(2)
    program = Program((sys.executable, str(RANK), "40", "0"), "/", {**os.environ, "WORLD": "2", "RANK": "1"})
    spec = JobSpec(id="g", submit_s=0.0, demand=2, boundary_timeout_s=1.0, kill_when_late=True)
    bench.scheduler.submit(spec, program)
    assert bench.finish() == {"g": JobState.FAILED}
    assert bench.core.jobs["g"].reason == "it did not start rank 0 within 1 s"


def command_of(job: str) -> psutil.Process:
    """What the job's supervisor has started."""
    children = psutil.Process().children()
    (supervisor,) = (one for one in children if one.environ().get("GPUSLICE_JOB") == job)
    (command,) = supervisor.children()
    return command


def test_a_killed_rank_fails_the_gang_and_its_launcher_goes_too(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(2)
    bench.submit("pair", 10**6, ranks=2)
    bench.wait_for("pair", JobState.RUNNING)
    launcher = command_of("pair")
    victim = launcher.children()[1]
    victim.send_signal(signal.SIGKILL)
    assert bench.finish() == {"pair": JobState.FAILED}
    assert bench.core.jobs["pair"].reason in ("rank 0 died", "rank 1 died")
    assert not lives(launcher)


def test_what_can_wait_is_done_in_a_quiet_moment_and_before_the_end(
    open_bench: Callable[[int], Bench],
) -> None:
    bench = open_bench(1)
    seen: list[int] = []
    bench.scheduler.housekeeping.add(lambda: seen.append(len(bench.story)))
    bench.submit("a", boundaries=3)
    bench.run(lambda: bool(seen))
    bench.finish()
    assert seen[-1] == len(bench.story), "nothing is left undone"
    assert seen == sorted(set(seen)), "nor done when there was nothing new"


def test_exit_code_and_output_are_kept(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    bench.submit("bad", 3, code=7)
    assert bench.finish() == {"bad": JobState.FAILED}
    assert bench.core.jobs["bad"].exit_code == 7
    assert bench.output("bad") == "begins\nends at 3\n"


def test_a_job_killed_while_parked_fails_and_the_other_goes_on(
    open_bench: Callable[[int], Bench], enough: Path
) -> None:
    bench = open_bench(1)
    bench.submit("a", 10**6)
    bench.submit("b", enough)
    bench.wait_for("a", JobState.SUSPENDED)
    command_of("a").kill()
    enough.touch()
    assert bench.finish() == {"a": JobState.FAILED, "b": JobState.SUCCEEDED}
    assert bench.core.jobs["a"].exit_code == -signal.SIGKILL


def test_a_command_that_cannot_be_started_fails(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    bench.scheduler.submit(JobSpec(id="x", submit_s=0.0), Program(("/no/such/program",), "/", {}))
    assert bench.finish() == {"x": JobState.FAILED}
    assert bench.core.jobs["x"].exit_code == 127
    assert "No such file" in bench.output("x", "err")


def test_a_script_that_never_trains_succeeds(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, "-c", "print('hello')"), "/", dict(os.environ))
    bench.scheduler.submit(JobSpec(id="x", submit_s=0.0), program)
    assert bench.finish() == {"x": JobState.SUCCEEDED}


def test_cancel_ends_a_job_that_ignores_sigterm(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    bench = open_bench(1)
    bench.submit("deaf", 10**6, options=["--deaf"])
    bench.wait_for("deaf", JobState.RUNNING)
    bench.scheduler.apply_request(Cancelled("deaf", "enough"))
    assert bench.finish() == {"deaf": JobState.CANCELLED}
    assert bench.core.jobs["deaf"].exit_code == -signal.SIGKILL


DEAF_CHILDREN = """
import os, signal, time
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork() or os.setsid()
    os.write(1, b"%d\\n" % os.getpid())
time.sleep(3600)
"""


def test_cancel_ends_what_the_command_leaves_behind_in_any_session(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    bench = open_bench(1)
    program = Program((sys.executable, "-c", DEAF_CHILDREN), "/", dict(os.environ))
    bench.scheduler.submit(JobSpec(id="x", submit_s=0.0), program)
    while len(children := bench.output("x").split()) < 2:
        time.sleep(0.01)
    watched = [os.pidfd_open(int(pid)) for pid in children]
    bench.scheduler.apply_request(Cancelled("x", "enough"))
    assert bench.finish() == {"x": JobState.CANCELLED}
    assert bench.core.jobs["x"].exit_code == -signal.SIGTERM, "the command itself was not deaf"
    for descriptor in watched:  # which have an hour to live; a killed one may still be on its way out
        assert select.select([descriptor], [], [], PATIENCE_S)[0]
        os.close(descriptor)


def test_closing_ends_every_process(open_bench: Callable[[int], Bench], former: list[psutil.Process]) -> None:
    bench = open_bench(2)
    bench.submit("pair", 10**6, ranks=2)
    bench.wait_for("pair", JobState.RUNNING)
    found = children(former)
    assert len(found) == 4
    bench.scheduler.close()
    assert not any(lives(child) for child in found)


def lives(process: psutil.Process) -> bool:
    """Whether it does; an orphan that nobody has waited for yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Stranger:
    """Somebody who connects and says things."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(bench.scheduler.local.endpoint)

    def ask(self, *frames: bytes) -> wire.ToAgent:
        self.socket.send_multipart(frames)
        self.bench.run(lambda: bool(self.socket.poll(100)))  # nothing wakes it when the answer is here
        return wire.decode_to_agent(self.socket.recv())

    def close(self) -> None:
        self.context.destroy()


@pytest.fixture
def stranger(open_bench: Callable[[int], Bench]) -> Iterator[Stranger]:
    found = Stranger(open_bench(1))
    yield found
    found.close()


HELLO = wire.Hello(version=wire.PROTOCOL_VERSION, job="a", rank=0, world_size=1, pid=1)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((b"\xff\xfegarbage",), "not a message"),
        ((b"",), "not a message"),
        ((b"a", b"b"), "2 frames"),
        ((b"a",) * 3, "too many frames"),
        ((bytes(1 << 19),) * 30, "too many frames or bytes"),
        ((wire.encode(wire.Welcome(version=1)),), "not a message"),
        ((wire.encode(wire.Progress(epoch=1, boundary=1, step=1)),), "unknown rank"),
        ((wire.encode(wire.Hello(version=99, job="a", rank=0, world_size=1, pid=1)),), "version 99"),
        ((wire.encode(HELLO),), "no job 'a'"),
    ],
)
def test_what_cannot_be_accepted_is_answered_and_dropped(
    stranger: Stranger, frames: tuple[bytes, ...], why: str
) -> None:
    answers = [stranger.ask(*frames)]
    while isinstance(answers[-1], wire.Welcome):
        answers.append(wire.decode_to_agent(stranger.socket.recv()))
    assert isinstance(answers[-1], wire.Rejected)
    assert why in answers[-1].error
    assert stranger.bench.story == []


def test_a_second_hello_is_rejected_and_the_first_rank_keeps_its_place(stranger: Stranger) -> None:
    bench = stranger.bench
    bench.submit("a", 10**6)
    bench.wait_for("a", JobState.RUNNING)
    answers = [stranger.ask(wire.encode(HELLO)), wire.decode_to_agent(stranger.socket.recv())]
    assert [type(answer) for answer in answers] == [wire.Welcome, wire.Rejected]
    bench.submit("b", 10**6)
    bench.wait_for("a", JobState.SUSPENDED)


def test_ten_thousand_garbage_frames_and_an_oversize_one_disturb_nobody(
    stranger: Stranger, enough: Path
) -> None:
    bench = stranger.bench
    bench.submit("a", enough)
    bench.wait_for("a", JobState.RUNNING)

    def may_send() -> bool:
        return bool(stranger.socket.poll(0, zmq.POLLOUT))

    for number in range(10_000):
        bench.run(may_send)
        stranger.socket.send(b"%d" % number, flags=zmq.NOBLOCK)
    bench.run(may_send)
    stranger.socket.send(bytes(wire.MAX_MESSAGE_BYTES + 1), flags=zmq.NOBLOCK)
    enough.touch()
    assert bench.finish() == {"a": JobState.SUCCEEDED}


def test_the_socket_is_private_and_has_one_owner(open_bench: Callable[[int], Bench], directory: Path) -> None:
    bench = open_bench(1)
    for path in (directory, directory / "scheduler.sock", directory / "scheduler.pid"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    with pytest.raises(EnvironmentUnusableError, match=f"pid {os.getpid()}"):
        open_bench(1)
    bench.scheduler.close()
    open_bench(1)


@pytest.mark.parametrize("fault", ["public", "link", "long"])
def test_an_unsuitable_directory_is_refused(tmp_path: Path, fault: str) -> None:
    directory = tmp_path / ("d" * 120 if fault == "long" else "d")
    if fault == "public":
        directory.mkdir(mode=0o755)
    if fault == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    core = Core([DeviceName("null", 0)], RoundRobin())
    with pytest.raises(EnvironmentUnusableError):
        Scheduler(core, directory)


def test_orders_go_to_whoever_holds_the_lease(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    bench.submit("a", 50)
    bench.finish()
    told = [command.job for _, commands in bench.story for command in commands if isinstance(command, Tell)]
    assert set(told) == {"a"}


THIRD_TIME_LUCKY = """
import os, pathlib, sys
print("begins", flush=True)
count = pathlib.Path(sys.argv[1])
count.write_text((count.read_text() if count.exists() else "") + "x")
if len(count.read_text()) < 3:
    raise MemoryError
"""


def test_a_job_is_started_again_after_a_failure_that_was_not_its_users(
    open_bench: Callable[[int], Bench], tmp_path: Path
) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, "-c", THIRD_TIME_LUCKY, str(tmp_path / "x")), "/", dict(os.environ))
    bench.scheduler.submit(JobSpec(id="a", submit_s=0.0, max_restarts=2), program)
    assert bench.finish() == {"a": JobState.SUCCEEDED}
    noted = [event for event, _ in bench.story if isinstance(event, Noted)]
    assert [(event.what, event.details["class"]) for event in noted] == [("failed", "resource")] * 2
    assert bench.output("a") == "begins\n" * 3
    assert "attempt 3" in bench.output("a", "err")


@pytest.mark.parametrize("kill", [False, True])
def test_a_stopped_job_is_reported_and_disturbs_nobody_for_ever(
    open_bench: Callable[[int], Bench], *, kill: bool
) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, str(RANK), str(10**6), "0"), "/", {**os.environ, "WORLD": "1"})
    spec = JobSpec(id="a", submit_s=0.0, boundary_timeout_s=4.0, kill_when_late=kill)
    bench.scheduler.submit(spec, program)
    bench.run(lambda: bench.core.jobs["a"].trains)
    (rank,) = bench.core.jobs["a"].ranks
    os.kill(rank.pid, signal.SIGSTOP)
    bench.submit("b", 20)
    bench.run(lambda: any(isinstance(event, Noted) and event.what == "late" for event, _ in bench.story))
    if kill:
        assert bench.finish() == {"a": JobState.FAILED, "b": JobState.SUCCEEDED}
        return
    assert bench.core.jobs["b"].state is JobState.QUEUED, "nobody is put beside a job that may go on"
    os.kill(rank.pid, signal.SIGCONT)
    bench.wait_for("b", JobState.SUCCEEDED)
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    bench.finish()


def test_a_job_that_is_started_again_while_its_scheduler_takes_over_is_watched_once(
    open_bench: Callable[[int], Bench],
) -> None:
    """What became of the one before has the core ask for what was to be tried again meanwhile."""
    bench = open_bench(1)
    program = Program((sys.executable, str(RANK), "40", "0"), "/", dict(os.environ))
    past: list[Event] = [
        Submitted(JobSpec(id="gone", submit_s=0.0, demand=1), program),
        Cancelled("gone", "enough"),
        Submitted(JobSpec(id="again", submit_s=0.0, demand=1, max_restarts=1), program),
        Exited("again", exit_record.KILLED),
    ]
    bench.scheduler.take_over((event, 0.0, bench.core.handle(event, 0.0)) for event in past)
    assert bench.finish() == {"gone": JobState.CANCELLED, "again": JobState.SUCCEEDED}
    assert [event.code for event, _ in bench.story if isinstance(event, Exited)] == [exit_record.KILLED, 0]


def test_a_wait_that_is_longer_than_poll_can_take_is_no_trouble(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, str(RANK), "40", "0"), "/", dict(os.environ))
    bench.scheduler.submit(JobSpec(id="a", submit_s=0.0, deadlines=((700 * 3600.0, 1.0),)), program)
    assert bench.finish() == {"a": JobState.SUCCEEDED}


@pytest.mark.parametrize(
    "program",
    [
        Program((sys.executable, "a\0"), "/", {}),
        Program((sys.executable,), "/\0", {}),
        Program((sys.executable,), "/", {"A=B": "c"}),
        Program((sys.executable,), "/", {"A": "\0"}),
        Program((sys.executable, "caf\udce9"), "/", {}),
    ],
)
def test_what_no_process_can_be_given_never_becomes_an_event(
    open_bench: Callable[[int], Bench], program: Program
) -> None:
    bench = open_bench(1)
    with pytest.raises(UsageError, match="Submitted is not possible"):
        bench.scheduler.submit(JobSpec(id="a", submit_s=0.0), program)
    assert (bench.story, dict(bench.core.jobs)) == ([], {})


def test_an_error_nobody_foresaw_ends_nothing_and_is_told(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench(1)
    mended: list[bool] = []
    bench.scheduler.restore_core = lambda: mended.append(True)
    bench.submit("a", 10**6)
    bench.wait_for("a", JobState.RUNNING)
    with monkeypatch.context() as patched:
        patched.setattr("gpuslice.sched_core.core.owner_requests.apply", lambda *_: {}["nobody knows"])
        with pytest.raises(UnforeseenError, match="held failed: KeyError: 'nobody knows'"):
            bench.scheduler.apply_request(Held("a"))
        patched.setattr(bench.core.reports, "take", lambda *_: 1 / 0)
        bench.run(lambda: "progress of a failed in the core" in caplog.text)
    assert len(mended) >= 2
    assert "held of a failed in the core\nTraceback" in caplog.text
    noted = [event for event, _ in bench.story if isinstance(event, Noted) and event.what == "rejected"]
    assert (noted[0].job, noted[0].details) == ("a", {"event": "held", "reason": "KeyError: 'nobody knows'"})
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    assert bench.finish() == {"a": JobState.CANCELLED}


def test_a_failure_of_what_follows_from_an_event_is_logged_and_the_rest_is_done(
    open_bench: Callable[[int], Bench], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(1)
    monkeypatch.setattr(bench.scheduler, "_late_observer", lambda *_: 1 / 0)
    bench.submit("a", 20)
    assert bench.finish() == {"a": JobState.SUCCEEDED}
    assert "what follows from Submitted could not be done" in caplog.text


@pytest.mark.parametrize("name", ["scheduler.pid", "logs"])
def test_a_link_in_the_place_of_a_file_of_ours_is_refused_by_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    (directory / name).symlink_to(tmp_path)
    with pytest.raises(EnvironmentUnusableError, match=f"{name} is"):
        Scheduler(Core([DeviceName("null", 0)], RoundRobin()), directory)
    (directory / name).unlink()
    Scheduler(Core([DeviceName("null", 0)], RoundRobin()), directory).close()
