"""The live shell with real sockets and real processes (which train nothing, see rank.py)."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Event, RankGone, Reported
from gpuslice.sched_core.nodes import processes

from ...patience import PATIENCE_S
from .bench import RANK, Bench, alive, children


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
    assert bench.output("b").endswith(f"ends at {bench.core.jobs['b'].steps}\n")
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    assert bench.finish() == {"a": JobState.CANCELLED, "b": JobState.SUCCEEDED}


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
    spec = JobSpec(id="g", submit_s=0.0, devices=2, boundary_timeout_s=1.0, on_boundary_timeout="kill")
    bench.scheduler.submit(spec, program)
    assert bench.finish() == {"g": JobState.FAILED}
    assert bench.core.jobs["g"].verdict.reason == "it did not start rank 0 within 1 s"


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
    assert bench.core.jobs["pair"].verdict.reason in ("rank 0 died", "rank 1 died")
    assert not alive(launcher)


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
    assert bench.core.jobs["bad"].command.exit_code == 7
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
    assert bench.core.jobs["a"].command.exit_code == -signal.SIGKILL


def test_a_command_that_cannot_be_started_fails(open_bench: Callable[[int], Bench]) -> None:
    bench = open_bench(1)
    bench.scheduler.submit(JobSpec(id="x", submit_s=0.0), Program(("/no/such/program",), "/", {}))
    assert bench.finish() == {"x": JobState.FAILED}
    assert bench.core.jobs["x"].command.exit_code == 127
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
    bench.submit("deaf", 10**6, options=["--deaf"], grace_s=0.2)
    bench.wait_for("deaf", JobState.RUNNING)
    bench.scheduler.apply_request(Cancelled("deaf", "enough"))
    assert bench.finish() == {"deaf": JobState.CANCELLED}
    assert bench.core.jobs["deaf"].command.exit_code == -signal.SIGKILL


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
    bench.scheduler.submit(JobSpec(id="x", submit_s=0.0, grace_s=0.2), program)
    while len(children := bench.output("x").split()) < 2:
        time.sleep(0.01)
    watched = [os.pidfd_open(int(pid)) for pid in children]
    bench.scheduler.apply_request(Cancelled("x", "enough"))
    assert bench.finish() == {"x": JobState.CANCELLED}
    assert bench.core.jobs["x"].command.exit_code == -signal.SIGTERM, "the command itself was not deaf"
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
    assert not any(alive(child) for child in found)
