"""Leases, restarts and errors that nobody foresaw, with real processes (rank.py)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.errors import EnvironmentUnusableError, UnforeseenError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Event, Exited, Held, Noted, Submitted, Tell
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.nodes import exit_record
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from .bench import RANK, Bench


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


def test_a_command_that_cannot_be_started_is_tried_again_in_time(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is known before all is done that its start was part of, when to wake up next included."""
    bench = open_bench(1)
    launch, refusals = bench.scheduler.local.processes.launch, [OSError("Too many open files")] * 2

    def refuse(*words: Any, **options: Any) -> int:
        if refusals:
            raise refusals.pop()
        return launch(*words, **options)

    monkeypatch.setattr(bench.scheduler.local.processes, "launch", refuse)
    spec = JobSpec(id="a", submit_s=0.0, max_restarts=2, deadlines=((1e9, 1.0),))
    bench.scheduler.submit(spec, Program((sys.executable, "-c", ""), "/", dict(os.environ)))
    assert bench.finish() == {"a": JobState.SUCCEEDED}


@pytest.mark.parametrize("kill", [False, True])
def test_a_stopped_job_is_reported_and_disturbs_nobody_for_ever(
    open_bench: Callable[[int], Bench], *, kill: bool
) -> None:
    bench = open_bench(1)
    program = Program((sys.executable, str(RANK), str(10**6), "0"), "/", {**os.environ, "WORLD": "1"})
    spec = JobSpec(
        id="a",
        submit_s=0.0,
        boundary_timeout_s=4.0,
        on_boundary_timeout="kill" if kill else "leave",
        grace_s=1.0,
    )
    bench.scheduler.submit(spec, program)
    bench.run(lambda: bench.core.jobs["a"].processes.trains)
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
        Submitted(JobSpec(id="gone", submit_s=0.0, devices=1), program),
        Cancelled("gone", "enough"),
        Submitted(JobSpec(id="again", submit_s=0.0, devices=1, max_restarts=1), program),
        Exited("again", exit_record.KILLED, attempt=0),
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
        patched.setattr(bench.core._reports, "take", lambda *_: 1 / 0)
        bench.run(lambda: "progress of a failed in the core" in caplog.text)
    assert len(mended) >= 2
    assert "held of a failed in the core\nTraceback" in caplog.text
    noted = [event for event, _ in bench.story if isinstance(event, Noted) and event.what == "rejected"]
    assert (noted[0].job, noted[0].details) == ("a", {"event": "held", "reason": "KeyError: 'nobody knows'"})
    bench.scheduler.apply_request(Cancelled("a", "enough"))
    assert bench.finish() == {"a": JobState.CANCELLED}


def test_an_error_that_repeats_is_told_of_ever_less_often(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, tries = open_bench(1), []
    now_s = bench.scheduler.now()
    monkeypatch.setattr(bench.scheduler._clock, "now", lambda: now_s)
    monkeypatch.setattr(
        bench.core.allocation.prestart, "set_limit", lambda jobs: tries.append(jobs) or {}["nobody"]
    )
    tried_at, begun_s = [], now_s
    for _ in range(100):
        bench.scheduler.limit_prestart(3)
        if len(tries) > len(tried_at):
            tried_at.append(now_s - begun_s)
        now_s += 1.0
    assert tried_at == [0, 1, 3, 7, 15, 31, 63]
    noted = [event for event, _ in bench.story if isinstance(event, Noted) and event.what == "rejected"]
    assert len(noted) == len(tried_at) == caplog.text.count("limited of nobody failed in the core")


def test_a_decision_that_takes_long_is_told_of_with_the_policys_name(
    open_bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, clock = open_bench(1), iter(range(0, 10**6, 3))
    monkeypatch.setattr(bench.scheduler._clock, "now", lambda: float(next(clock)))
    bench.scheduler.limit_prestart(1)
    slow = [event for event, _ in bench.story if isinstance(event, Noted) and event.what == "slow_decision"]
    assert [(note.details["policy"], note.details["event"]) for note in slow] == [("rr", "limited")]


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
