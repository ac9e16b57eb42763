"""A supervisor's record: who lives, who ended how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited
from gpuslice.sched_core.nodes import exit_record, processes
from gpuslice.sched_core.nodes.exit_record import KILLED, create, exit_code, read
from gpuslice.sched_core.nodes.processes import Processes
from gpuslice.sched_core.nodes.supervisor import line

from ...patience import PATIENCE_S

Run = Callable[[str], Processes]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    processes = Processes(tmp_path)

    def start(code: str) -> Processes:
        return started(processes, tmp_path, code)

    yield start
    processes.end_all(MonotonicClock())


def started(processes: Processes, directory: Path, code: str) -> Processes:
    processes.launch("a", Program((sys.executable, "-c", code), "/", {}), {})
    pid = None
    while pid is None:  # the supervisor writes its number first of all
        record = read(directory / "a.exit")
        assert record is not None
        pid = record.pid
    return processes


def test_a_living_supervisor_is_found_by_another_scheduler(run: Run, tmp_path: Path) -> None:
    first = run("import signal; signal.pause()")
    second = Processes(tmp_path)
    assert isinstance(second.find("a"), int)
    second.end("a", 0, 0.0)
    assert second.wait(PATIENCE_S) == [Exited("a", -signal.SIGTERM, attempt=0)]
    assert first.wait(PATIENCE_S) == [Exited("a", -signal.SIGTERM, attempt=0)]
    assert Processes(tmp_path).find("a") == Exited("a", -signal.SIGTERM, attempt=0)


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(5)", 5), ("", 0)])
def test_the_exit_code_outlives_everybody(run: Run, tmp_path: Path, code: str, expected: int) -> None:
    assert run(code).wait(PATIENCE_S) == [Exited("a", expected, attempt=0)]
    assert Processes(tmp_path).find("a") == Exited("a", expected, attempt=0)


def test_a_killed_supervisor_counts_as_a_killed_job(run: Run, tmp_path: Path) -> None:
    processes = run("import signal; signal.pause()")
    processes.kill("a", 0)
    assert processes.wait(PATIENCE_S) == [Exited("a", KILLED, attempt=0)]
    assert Processes(tmp_path).find("a") == Exited("a", KILLED, attempt=0)


def test_one_that_is_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of the killed supervisor, which is not gone yet, still has the record's lock."""
    with subprocess.Popen([sys.executable, "-c", ""]) as supervisor:
        supervisor.wait()
    held = create(tmp_path / "a.exit")
    os.pwrite(held, line(supervisor.pid) + line(None), 0)
    looks: list[float] = []

    def look_again() -> None:
        looks.append(time.monotonic())
        if len(looks) == 2000:
            os.close(held)

    with monkeypatch.context() as patch:
        patch.setattr(exit_record, "wait_a_moment", look_again)
        assert Processes(tmp_path).find("a") == Exited("a", KILLED, attempt=0)
    assert len(looks) == 2000
    held = create(tmp_path / "a.exit")
    os.pwrite(held, line(supervisor.pid) + line(None), 0)
    monkeypatch.setattr(processes, "_STARTING_S", 0.1)
    with pytest.raises(EnvironmentUnusableError, match="job a is just ending"):
        Processes(tmp_path).find("a")
    os.close(held)


def test_what_was_never_started_can_be_started(tmp_path: Path) -> None:
    assert Processes(tmp_path).find("a") is None
    os.close(create(tmp_path / "a.exit"))
    assert Processes(tmp_path).find("a") is None, "whoever made the record went before it started anybody"
    assert exit_code(tmp_path / "a.exit") == KILLED


@pytest.mark.parametrize("comes", [True, False])
def test_one_that_is_just_being_started_is_waited_for(tmp_path: Path, comes: bool) -> None:
    descriptor = create(tmp_path / "a.exit")

    def go_on() -> None:
        if comes:
            os.pwrite(descriptor, line(os.getpid()) + line(None), 0)
        else:
            os.close(descriptor)

    later = threading.Timer(0.3, go_on)
    later.start()
    found = Processes(tmp_path).find("a")
    later.join()
    assert isinstance(found, int) if comes else found is None
    if isinstance(found, int):
        os.close(found)
        os.close(descriptor)


def test_the_command_gets_its_signals_back(run: Run, tmp_path: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP))"
    run(code).wait(PATIENCE_S)
    assert (tmp_path / "a.out").read_text() == "0 0\n"


def test_a_rank_is_known_by_its_environment(tmp_path: Path) -> None:
    os.environ["GPUSLICE_TEST_MARK"] = "x"  # set too late to be in the kernel's copy
    processes = Processes(tmp_path)
    assert processes.find_rank("a", 0, 0, os.getpid(), b"GPUSLICE_TEST_MARK=x") is None
    mark = Path("/proc/self/environ").read_bytes().split(b"\0")[0]
    descriptor = processes.find_rank("a", 0, 0, os.getpid(), mark)
    assert descriptor is not None
    os.close(descriptor)


LEAVING = """
import os, signal, sys
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if {deaf}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(writing, b"%d" % os.getpid())
        while True:
            signal.pause()
    os._exit(0)
print(os.read(reading, 9).decode(), flush=True)
sys.exit({code})
"""


def leave_one_behind(directory: Path, code: int, *, deaf: bool = False, keep: str = "") -> int:
    """A job that ends and leaves a process behind, in a session of its own; its number."""
    processes = Processes(directory)
    words = (sys.executable, "-c", LEAVING.format(code=code, deaf=deaf))
    environ = {"GPUSLICE_KEEP_CHILDREN": keep} if keep else {}
    processes.launch("a", Program(words, "/", environ), {})
    (ended,) = processes.wait(PATIENCE_S)
    assert isinstance(ended, Exited)
    assert ended.code == code
    return int((directory / "a.out").read_text())


@pytest.mark.parametrize(("code", "deaf"), [(0, False), (1, False), (0, True)])
def test_what_a_job_left_behind_ends_with_it(tmp_path: Path, code: int, deaf: bool) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(leave_one_behind(tmp_path, code, deaf=deaf), 0)


@pytest.mark.parametrize("keep", ["1", "True"])
def test_a_job_may_ask_to_keep_what_it_leaves_behind(tmp_path: Path, keep: str) -> None:
    left = leave_one_behind(tmp_path, 0, keep=keep)
    os.kill(left, signal.SIGKILL)
