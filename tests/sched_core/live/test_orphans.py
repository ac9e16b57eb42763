"""Processes that are told by their environment: they get signals however many there are."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from gpuslice.config import variable
from gpuslice.sched_core.nodes.orphans import kill_orphans, signal_marked

from ...patience import PATIENCE_S

ENDPOINT = "ipc:///nowhere/orphans"
MARKS = {variable("socket"): ENDPOINT, variable("job"): "a"}
MANY = 40


@pytest.fixture
def many() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a job, more of them than this process may open files."""
    found = [subprocess.Popen(["sleep", "inf"], env={**os.environ, **MARKS}) for _ in range(MANY)]
    yield found
    for one in found:
        one.kill()
        one.wait()


@pytest.fixture
def few_files(many: list[subprocess.Popen[bytes]]) -> Iterator[int]:
    """How many descriptors there are, and only some more may be."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(former[0]) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[MANY // 2], former[1]))
    yield psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_all_are_signalled_with_few_descriptors(many: list[subprocess.Popen[bytes]], few_files: int) -> None:
    assert signal_marked(MARKS, signal.SIGSTOP) == {one.pid for one in many}
    assert psutil.Process().num_fds() == few_files


def test_all_are_killed_with_few_descriptors(many: list[subprocess.Popen[bytes]], few_files: int) -> None:
    kill_orphans("a", ENDPOINT)
    assert [one.wait(PATIENCE_S) for one in many] == [-signal.SIGKILL] * MANY
    assert psutil.Process().num_fds() == few_files


def test_processes_of_a_later_attempt_are_left_alone() -> None:
    environ = {**os.environ, **MARKS, variable("job"): "b"}  # another test may kill all of job a meanwhile
    later = {**environ, variable("attempt"): "2"}
    former, unnamed, present = (
        subprocess.Popen(["sleep", "inf"], env=env)
        for env in ({**environ, variable("attempt"): "1"}, environ, later)
    )
    try:
        kill_orphans("b", ENDPOINT, 1)
        assert [one.wait(PATIENCE_S) for one in (former, unnamed)] == [-signal.SIGKILL] * 2
        assert present.poll() is None
    finally:
        present.kill()
        present.wait()
