"""Processes: an interruption in the middle of starting or ending one loses none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.sched_core.core.events import Exited, RankGone
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.nodes.processes import Processes, uninterrupted

from ...patience import PATIENCE_S

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
    assert processes.wait(PATIENCE_S) == [Exited("a", 5)]


def test_a_rank_is_the_process_that_was_last_said_to_be_it(tmp_path: Path) -> None:
    processes, pids = Processes(tmp_path), [_sleeper() for _ in range(2)]
    try:
        former = processes.watch_rank("a", 0, pids[0])
        assert processes.watch_rank("a", 0, pids[0]) is None
        present = processes.watch_rank("a", 0, pids[1])
        assert processes.descriptors == [present]
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids.pop(0), 0)
        assert (former is not None, processes.wait(0.0)) == (True, [])
        os.kill(pids[0], signal.SIGKILL)
        assert processes.wait(PATIENCE_S) == [RankGone("a", 0)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _sleeper() -> int:
    return os.posix_spawn(sys.executable, [*SLEEPER.argv], {})


def test_a_process_that_is_gone_cannot_be_watched(tmp_path: Path) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        Processes(tmp_path).watch_rank("a", 0, pid)
