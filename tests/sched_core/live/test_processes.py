"""Processes: an interruption in the middle of starting or ending one loses none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Event, Exited, RankGone
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
    assert processes.wait(PATIENCE_S) == [Exited("a", 5, attempt=0)]


def test_every_process_that_is_or_was_a_rank_is_watched(tmp_path: Path) -> None:
    processes, pids = Processes(tmp_path), [_sleeper() for _ in range(2)]
    try:
        former = processes.watch_rank("a", 0, 0, pids[0])
        assert processes.watch_rank("a", 0, 0, pids[0]) is None
        present = processes.watch_rank("a", 0, 0, pids[1])
        assert processes.descriptors == [former, present]
        while pids:
            os.kill(pids[0], signal.SIGKILL)
            assert processes.wait(PATIENCE_S) == [RankGone("a", 0, pid=pids[0], attempt=0)]
            os.waitpid(pids.pop(0), 0)
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
        Processes(tmp_path).watch_rank("a", 0, 0, pid)


#: Trains with a worker; told to end, it saves what the worker answers, and says so.
SAVES_WITH_A_WORKER = """
import os, signal, sys
to_worker, to_us = os.pipe(), os.pipe()
if not os.fork():
    os.write(to_us[1], b"." * len(os.read(to_worker[0], 1)))
    signal.pause()
saved = 0
def save(*_):
    global saved
    saved += 1
    os.write(to_worker[1], b"?")
    os.close(to_us[1])
    print("saved", os.read(to_us[0], 1), saved, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
os.write(1, b"trains\\n")  # whole, or the signal comes before the newline
signal.pause()
"""


def _saver(*before: str) -> Program:
    return Program((*before, sys.executable, "-S", "-c", SAVES_WITH_A_WORKER), "/", dict(os.environ))


def _await(processes: Processes, said: str) -> None:
    while said not in processes.log("a", "out").read_text():
        assert not processes.wait(0.01)


def _told_to_end(processes: Processes, grace_s: float = PATIENCE_S, *, times: int = 1) -> list[Event]:
    """End the job's processes as a scheduler does; returns how they ended."""
    clock = MonotonicClock()
    for _ in range(times):
        processes.end("a", 0, clock.now(), grace_s)
    found: list[Event] = []
    while processes.descriptors:
        found += processes.wait(0.02)
        processes.enforce(clock.now())
    return found


@pytest.mark.parametrize("before", [(), ("sh", "-c", '"$@"; exit 1', "sh")], ids=["alone", "below a shell"])
def test_a_handler_that_saves_still_has_its_workers(tmp_path: Path, before: tuple[str, ...]) -> None:
    processes = Processes(tmp_path)
    for _ in range(10):
        processes.launch("a", _saver(*before), {})
        _await(processes, "trains")
        assert _told_to_end(processes) == [Exited("a", -signal.SIGTERM if before else 7, attempt=0)]
        assert processes.log("a", "out").read_text() == "trains\nsaved b'.' 1\n"
        processes.log("a", "out").unlink()


def test_a_handler_is_not_interrupted_by_asking_again(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.launch("a", _saver(), {})
    _await(processes, "trains")
    assert _told_to_end(processes, times=5) == [Exited("a", 7, attempt=0)]


def test_after_the_grace_those_are_asked_that_the_command_has_not_told(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.launch("a", _saver("sh", "-c", 'trap "" TERM; "$@"', "sh"), {})
    _await(processes, "trains")
    # The shell ignores the signal, and what it starts begins with that; Python's handler is another matter.
    assert _told_to_end(processes, grace_s=0.05) == [Exited("a", 7, attempt=0)]
    assert "saved" in processes.log("a", "out").read_text()


def test_who_does_not_end_within_the_grace_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuslice.sched_core.nodes.processes.GRACE_S", 0.05)
    processes = Processes(tmp_path)
    deaf = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True); signal.pause()"
    )
    processes.launch("a", Program((sys.executable, "-S", "-c", deaf), "/", dict(os.environ)), {})
    _await(processes, "deaf")
    assert _told_to_end(processes, grace_s=0.05) == [Exited("a", -signal.SIGKILL, attempt=0)]
