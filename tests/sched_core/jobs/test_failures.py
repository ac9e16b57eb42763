"""Whose fault a failure was, and what follows from it."""

from __future__ import annotations

import signal

import pytest

from gpuslice import wire
from gpuslice.errors import WITHOUT_STATE, IllegalTransitionError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.failures import ATTEMPT_MARK, Failure, Kind, classify, telling, verdict
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Exited,
    Kill,
    Launch,
    Notice,
    RankGone,
    Submitted,
)

from ..driver import PROGRAM, Driver, told

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    work()\n'
TORCHRUN = (
    "E1121 torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: 1) local_rank: 0\n"
    + TRACEBACK
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
)
#: What torchrun says of a gang: first of a rank that it ended itself, then of the rank that was the cause.
TORCHRUN_SUMMARY = (
    "W1126 torch/distributed/elastic/multiprocessing/api.py: Sending process 12 closing signal SIGTERM\n"
    + TORCHRUN
    + """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 12)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 12
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
"""
)


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "reason"),
    [
        (1, TRACEBACK + "ModuleNotFoundError: No module named 'x'", "user", "ModuleNotFoundError: No module"),
        (1, TRACEBACK + "RuntimeError: mat1 and mat2 shapes cannot be multiplied", "user", "RuntimeError"),
        (1, TRACEBACK + "KeyboardInterrupt", "user", "exit code 1"),
        (3, "", "user", "exit code 3"),
        (127, "gpuslice: cannot start: its working directory /gone is", "user", "directory /gone is"),
        (127, "gpuslice: cannot start: No space left on device", "resource", "No space left"),
        (127, "sh: nothing: not found", "user", "does not exist"),
        (-11, "", "user", "crashed with SIGSEGV"),
        (
            1,
            TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "resource",
            "CUDA out",
        ),
        (1, TRACEBACK + "MemoryError", "resource", "MemoryError"),
        (1, TRACEBACK + "OSError: [Errno 28] No space left on device", "resource", "No space"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", "resource", "bad_alloc"),
        (-7, "", "resource", "SIGBUS"),
        # A CUDA error after which torch itself gives up, in the midst of a copy of ours or of the script's.
        (
            -6,
            "terminate called after throwing an instance of 'c10::AcceleratorError'",
            "infrastructure",
            "c10::",
        ),
        (
            -6,
            TRACEBACK
            + "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            + "terminate called after throwing an instance of 'c10::AcceleratorError'",
            "user",
            "SIGABRT",
        ),
        # What failed is our own resume, whatever the script has printed before.
        (
            3,
            TRACEBACK + f"ValueError: passed over\ngpuslice: {WITHOUT_STATE}: the resume failed: CUDA error",
            "infrastructure",
            "the resume failed",
        ),
        (3, f"gpuslice: {WITHOUT_STATE}: the resume failed: MemoryError", "resource", "MemoryError"),
        (-9, "", "infrastructure", "SIGKILL"),
        (137, TRACEBACK + "ValueError: before", "infrastructure", "SIGKILL"),
        (-15, "", "infrastructure", "SIGTERM"),
        (1, TRACEBACK + "torch.distributed.DistBackendError: NCCL error", "infrastructure", "NCCL error"),
        (
            1,
            TRACEBACK + "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "infrastructure",
            "ECC",
        ),
        (
            1,
            TRACEBACK + "ConnectionResetError: [Errno 104] reset by peer",
            "infrastructure",
            "ConnectionReset",
        ),
        # Its interpreter has no gpuslice.
        (
            3,
            "gpuslice: no hooks in this process: install it there: venv/bin/python",
            "user",
            "install it there",
        ),
        # Somebody else listens at the port: the reason names it and what to do.
        (
            1,
            TRACEBACK
            + "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
            "network address. port: 29511, useIPv6: false, code: -98, name: EADDRINUSE, message: address "
            "already in use",
            "infrastructure",
            "port 29511 is in use (EADDRINUSE): a parked job keeps its ports, so each job needs its own",
        ),
        (
            1,
            TRACEBACK + "OSError: [Errno 98] Address already in use",
            "infrastructure",
            "--max-restarts tries again",
        ),
        # One rank's mistake is the others' lost connection; the launcher only knows that somebody failed.
        (
            1,
            "[rank0]: ValueError: bad batch\n[rank1]: RuntimeError: Connection closed by peer\n" + TORCHRUN,
            "user",
            "ValueError: bad batch",
        ),
        # A rank that the launcher ended because another one had failed says nothing of the cause.
        (
            1,
            "t.py: error: unrecognized arguments: --l\n" + TORCHRUN_SUMMARY + "  exitcode  : 2 (pid: 11)\n",
            "user",
            "exit code 1",
        ),
        (
            1,
            TORCHRUN_SUMMARY + "  traceback : Signal 9 (SIGKILL) received by PID 11\n",
            "infrastructure",
            "SIGKILL",
        ),
        # Nothing of this kind is said if the launcher itself was ended.
        (
            1,
            "W1126 torch/distributed/elastic: Sending process 12 closing signal SIGTERM",
            "infrastructure",
            "SIGTERM",
        ),
        # The launcher was ended, and its processes with it: that they were interrupted says nothing.
        (
            1,
            TRACEBACK
            + "RuntimeError: Connection closed by peer\n\nDuring handling of the above exception, another "
            + "exception occurred:\n\nSystemExit: 1\n\nDuring handling of the above exception, another "
            + "exception occurred:\n\nKeyboardInterrupt\n[rank1]: MemoryError\nKeyboardInterrupt\n",
            "resource",
            "MemoryError",
        ),
        # What was being dealt with is not the failure; what caused it is.
        (
            1,
            "KeyError: 'cached'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK
            + "ConnectionRefusedError: [Errno 111]",
            "infrastructure",
            "ConnectionRefusedError",
        ),
        (
            1,
            "MemoryError\n\nThe above exception was the direct cause of the following exception:\n\n"
            + TRACEBACK
            + "RuntimeError: cannot load the data",
            "resource",
            "MemoryError",
        ),
        # Only the last attempt's words count.
        (4, f"MemoryError\n{ATTEMPT_MARK}2\nhello\n", "user", "exit code 4"),
    ],
)
def test_failures_are_classified(code: int, stderr: str, kind: str, reason: str) -> None:
    found = classify(code, telling(stderr))
    assert (found.kind.value, reason in found.reason) == (kind, True), found


def test_that_a_process_was_interrupted_is_no_verdict() -> None:
    assert verdict(telling("SystemExit: 1\nKeyboardInterrupt\nKeyboardInterrupt: \n")) is None


def test_what_is_kept_of_the_output_is_short_and_only_what_tells() -> None:
    noise = "".join(f"epoch {n}: loss 0.1\n" for n in range(1000))
    assert telling(noise + TRACEBACK + "ValueError: x\n") == "ValueError: x"
    assert len(telling("ValueError: " + "x" * 10**5 + "\n" + "KeyError: 1\n" * 500)) < 4000


def submit(driver: Driver, job: str, restarts: int, ranks: int = 1) -> None:
    spec = JobSpec(id=job, submit_s=driver.now_s, devices=ranks, max_restarts=restarts)
    driver.do(Submitted(spec, PROGRAM))


def run(driver: Driver, job: str) -> None:
    driver.hello(job)
    for rank in driver.core.jobs[job].ranks:
        driver.resumed(job, rank.number)
        driver.progress(job, 10, rank.number)


def fail(driver: Driver, job: str, code: int, said: str = "") -> list[Command]:
    commands = driver.do(Exited(job, code, said))
    for rank in driver.core.jobs[job].there():
        commands += driver.do(RankGone(job, rank.number))
    return commands


def notice(commands: list[Command]) -> Notice:
    (found,) = [command for command in commands if isinstance(command, Notice)]
    return found


def test_a_job_that_was_killed_is_started_again_later_and_later_and_gives_up() -> None:
    driver = Driver()
    submit(driver, "a", 2)
    for attempt, wait_s in ((1, 1.0), (2, 2.0)):
        run(driver, "a")
        details = notice(fail(driver, "a", -9)).details
        assert (details["class"], details["attempt"], details["restart_in_s"]) == (
            "infrastructure",
            attempt,
            wait_s,
        )
        job = driver.core.jobs["a"]
        assert (job.state, job.lease, job.command.exit_code, job.ready) == (JobState.QUEUED, (), -9, False)
        assert not any(isinstance(command, Launch) for command in driver.wake(wait_s / 2))
        assert Launch("a", PROGRAM, attempt) in driver.wake(wait_s / 2)
    run(driver, "a")
    assert driver.core.jobs["a"].epoch == 3, "reports of former attempts are fenced off"
    assert driver.core.jobs["a"].executed_s >= 0.0
    assert notice(fail(driver, "a", -9)).details["restart_in_s"] is None
    assert driver.state("a") is JobState.FAILED
    assert driver.core.jobs["a"].verdict.failure == "infrastructure"


def test_a_users_mistake_is_not_tried_again() -> None:
    driver = Driver()
    submit(driver, "a", 5)
    run(driver, "a")
    details = notice(fail(driver, "a", 1, "ValueError: no")).details
    assert (details["class"], details["reason"], details["restart_in_s"]) == ("user", "ValueError: no", None)
    assert (driver.state("a"), driver.core.jobs["a"].verdict.reason) == (JobState.FAILED, "ValueError: no")


def test_a_gang_that_lost_a_rank_is_started_again_when_all_of_it_is_gone() -> None:
    driver = Driver(2)
    submit(driver, "g", 1, 2)
    run(driver, "g")
    assert Kill("g", "rank 1 died", 0, Purpose.FAIL) in driver.do(RankGone("g", 1))
    assert driver.state("g") is JobState.FAILED
    driver.do(Exited("g", -15))
    assert driver.core.jobs["g"].lease == (0, 1), "rank 0 may still be on its device"
    assert notice(driver.do(RankGone("g", 0))).details["reason"] == "rank 1 died"
    assert (driver.state("g"), driver.core.jobs["g"].lease) == (JobState.QUEUED, ())
    driver.wake(1.0)
    run(driver, "g")
    assert driver.state("g") is JobState.RUNNING


def test_others_run_while_a_job_waits_for_its_next_attempt() -> None:
    driver = Driver()
    submit(driver, "a", 1)
    submit(driver, "b", 0)
    run(driver, "a")
    driver.hello("b")
    assert told(fail(driver, "a", -9), wire.Resume) == [("b", 0, wire.Resume(epoch=1, device="null:0"))]


def test_cancel_between_two_attempts_ends_the_job() -> None:
    driver = Driver(2)
    submit(driver, "a", 3)
    run(driver, "a")
    fail(driver, "a", -9)
    assert not any(isinstance(command, Kill) for command in driver.do(Cancelled("a", "enough")))
    assert driver.state("a") is JobState.CANCELLED
    assert driver.core.jobs["a"].processes_gone
    assert driver.wake(100.0) == []


def test_cancel_while_a_failed_gang_is_being_ended_forbids_another_attempt() -> None:
    driver = Driver(2)
    submit(driver, "g", 3, 2)
    run(driver, "g")
    driver.do(RankGone("g", 1))
    driver.do(Cancelled("g", "enough"))
    driver.do(RankGone("g", 0))
    driver.do(Exited("g", -15))
    assert driver.state("g") is JobState.FAILED
    with pytest.raises(IllegalTransitionError):
        driver.do(Cancelled("g", "again"))


@pytest.mark.parametrize(
    "words",
    ["gpuslice: node b was lost", "gpuslice: its state could not be brought to b: nobody has it"],
)
def test_what_we_say_of_nodes_is_no_mistake_of_the_user_s(words: str) -> None:
    assert verdict(words) == classify(-signal.SIGKILL, words) == Failure(Kind.INFRASTRUCTURE, words)
