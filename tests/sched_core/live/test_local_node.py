"""A command that cannot be started has ended, whatever can be written of that."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from gpuslice.clock import MonotonicClock
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone
from gpuslice.sched_core.nodes.local_node import LocalNode
from gpuslice.sched_core.nodes.node import Reports

from .bench import children

SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")


class Alone:
    """A node without a scheduler."""

    def __init__(self, directory: Path) -> None:
        self.ended: list[Exited | RankGone] = []
        self.context = zmq.Context()
        reports = Reports(
            lambda *_: None, lambda node, event: self.ended.append(event), lambda *_: None, lambda *_: None
        )
        self.node = LocalNode(self.context, directory, MonotonicClock(), reports)

    def launch(self, directory: Path, attempt: int = 0) -> None:
        self.node.launch("a", Program(SLEEPER, str(directory), dict(os.environ)), {}, attempt)

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.node.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path)
    yield made
    made.close()


def test_what_earlier_attempts_wrote_stays(alone: Alone, tmp_path: Path) -> None:
    log = alone.node.processes.log("a", "err")
    log.write_text("first\n")
    alone.launch(tmp_path / "vanished", attempt=1)
    (ended,) = alone.ended
    assert (ended.job, ended.code) == ("a", 127)
    assert "vanished" in ended.said
    first, mark, reason = log.read_text().splitlines()
    assert (first, mark) == ("first", "gpuslice: started again, attempt 2")
    assert reason.startswith("gpuslice: cannot start: ")


def test_its_end_is_told_although_its_log_cannot_be_written(alone: Alone, tmp_path: Path) -> None:
    alone.node.processes.log("a", "err").mkdir()
    alone.launch(tmp_path)
    (ended,) = alone.ended
    assert (ended.job, ended.code) == ("a", 127)
    assert "cannot start" in ended.said


def test_nothing_runs_that_cannot_be_watched_and_its_user_is_not_to_blame(
    alone: Alone, tmp_path: Path, former: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refuse)
        alone.launch(tmp_path)
    assert alone.ended == [
        Exited("a", 127, "gpuslice: cannot start: [Errno 24] Too many open files", attempt=0)
    ]
    assert children(former) == []


def test_the_end_of_a_rank_that_is_gone_when_it_has_greeted_is_told_once_after_its_last_words(
    alone: Alone,
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    for _ in range(2):
        alone.node.watch_rank("a", 0, 0, process.pid, b"a:0")
    assert alone.ended == []  # a Bye may follow its Hello
    alone.node.attend()
    assert alone.ended == [RankGone("a", 0, pid=process.pid, attempt=0)]
