"""Processes: an interruption in the middle of starting or ending one loses none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.sched_core.core.events import Exited
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.live.processes import Processes, uninterrupted

SLEEPER = Program((sys.executable, "-c", "import signal; signal.pause()"), "/", dict(os.environ))


def test_ctrl_c_is_put_off_to_the_end_of_the_block() -> None:
    reached: list[str] = []

    def interrupted_twice() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")
        reached.append("what follows it")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_may_do_without() -> None:
    passed: list[bool] = []

    def enter() -> None:
        with uninterrupted():
            passed.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert passed == [True]


def test_ending_all_waits_until_they_are_gone(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    for job in "ab":
        processes.launch(job, SLEEPER, {})
    assert processes.jobs == {"a", "b"}
    processes.end_all(MonotonicClock())
    assert (processes.jobs, processes.descriptors) == (set(), [])


def test_waiting_tells_the_exit_code(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.launch("a", Program((sys.executable, "-c", "raise SystemExit(5)"), "/", {}), {})
    assert processes.wait(30.0) == [Exited("a", 5)]


def test_a_process_that_is_gone_cannot_be_watched(tmp_path: Path) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        Processes(tmp_path).watch_rank("a", 0, pid)
