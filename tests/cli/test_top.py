"""``gpuslice top``: a picture of a real scheduler's state, and the screen on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios

import msgspec
import pytest
from rich.console import Console

from gpuslice.cli import dashboard, tables
from gpuslice.verbs import SchedulerStatus, SliceInfo

from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S
from .conftest import Shell, shell_in
from .waiting import until


def drawn(standing: SchedulerStatus, height: int = 50, notice: str = "", width: int = 200) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(dashboard.picture(standing, width, height, notice))
    return console.export_text().splitlines()


def line(lines: list[str], begins: str) -> str:
    return next(one for one in lines if one.startswith(begins))


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, commands: Servers) -> SchedulerStatus:
    """Of a scheduler with queues, two endless jobs that have taken turns, and one that failed."""
    with shell_in(tmp_path_factory.mktemp("standing") / "s", commands) as shell:
        return told(shell)


def told(shell: Shell) -> SchedulerStatus:
    shell("up", "--devices", "null:1", "--policy", "2das", "--set", "thresholds=0.2,1000")
    client = shell.client()
    failed = shell.submit(1, 3, name="short")
    assert client.wait(failed, PATIENCE_S) is not None
    for name in ("first", "second"):
        shell.submit(10**6, name=name, steps=2 * 10**6)
        until(client, name, lambda info: info.slices > 0)
    until(client, "first", lambda info: info.state == "suspended" or info.slices > 1)
    found = client.status()
    shell("down")
    return found


def test_the_picture_of_a_real_scheduler(standing: SchedulerStatus) -> None:
    lines = drawn(standing, notice="careful")
    assert "2das" in lines[0]
    assert "1 ended" in lines[0]
    assert lines[0].endswith("careful")
    holder = standing.devices[0].jobs
    for job in holder:
        assert job in line(lines, "null:0")
    for job in standing.jobs:
        (row,) = [one for one in lines if one.startswith(f"{job.id} ")]
        assert job.state in row
        if job.total_steps:
            assert f"{job.steps}/{job.total_steps}" in row
    start = lines.index(line(lines, "QUEUE"))
    queues = [one.split()[0] for one in lines[start + 1 : start + 4] if one.strip()]
    assert {str(job.level) for job in standing.jobs if job.level is not None} <= set(queues)


@pytest.mark.parametrize("width", [80, 100, 130, 150, 170, 190])
def test_three_devices_and_ten_jobs_fit_on_every_screen(standing: SchedulerStatus, width: int) -> None:
    jobs = [
        msgspec.structs.replace(
            standing.jobs[number % 3], id=f"train-{number}", state="running", why=None, reason=""
        )
        for number in range(10)
    ]
    devices = [msgspec.structs.replace(standing.devices[0], name=f"cuda:{number}") for number in range(3)]
    crowd = msgspec.structs.replace(standing, jobs=tuple(jobs), devices=tuple(devices), job_count=10)
    lines = drawn(crowd, width=width)
    assert not any("…" in one for one in lines)
    for job in jobs:
        assert tables.steps(job) in line(lines, f"{job.id} ")
    assert [one.split()[0] for one in lines if one.startswith("cuda:")] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("width", [80, 100, 150])
def test_why_a_job_waits_is_cut_before_anything_else(standing: SchedulerStatus, width: int) -> None:
    why = "waits for 2 devices; cuda:0 and cuda:1 are used by the jobs of others, " * 5
    jobs = tuple(msgspec.structs.replace(job, why=why) for job in standing.jobs)
    lines = drawn(msgspec.structs.replace(standing, jobs=jobs), width=width)
    assert max(map(len, lines)) <= width
    for job in jobs:
        (row,) = [one for one in lines if one.startswith(f"{job.id} ")]
        assert job.state in row
        assert re.search(r"waits for.*…", row)
        assert row.count("…") == 1


def test_more_jobs_than_lines_are_counted(standing: SchedulerStatus) -> None:
    lines = drawn(standing, height=5)
    assert lines[-1].split() == ["and", "2", "more"]


def test_the_strip_shows_when_a_job_had_devices(standing: SchedulerStatus) -> None:
    length_s = dashboard.WINDOW_S / dashboard.STRIP
    slices = (
        SliceInfo(devices=("null:0",), since_s=100.0 - 4 * length_s, until_s=100.0 - 2 * length_s),
        SliceInfo(devices=("null:0",), since_s=100.0 - length_s / 2, until_s=None),
    )
    job = msgspec.structs.replace(standing.jobs[1], recent=slices)
    found = msgspec.structs.replace(standing, now_s=100.0, jobs=(job,))
    lines = drawn(found)
    assert line(lines, "first").rstrip().endswith(" ██ ▄")
    assert "██ ▄" in line(lines, "null:0")


def test_without_a_terminal_it_says_what_to_use(shell: Shell) -> None:
    assert "top needs a terminal" in shell("top", code=2)
    assert "ps --watch" in shell("top", code=2)


class Terminal:
    """``gpuslice top`` on a terminal of its own."""

    def __init__(self, shell: Shell) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 160))
        self.before = termios.tcgetattr(self.ours)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuslice", "top", "--interval", "100ms"],
            env={**os.environ, "GPUSLICE_STATE_DIR": str(shell.directory), "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            assert select.select([self.ours], [], [], PATIENCE_S)[0], self.seen
            self.seen += os.read(self.ours, 65536)

    def leaves(self) -> int:
        """Wait for its end, which gives the terminal back as it was."""
        self.read_until(b"\x1b[?1049l")
        code = self.process.wait(PATIENCE_S)
        assert termios.tcgetattr(self.ours)[3] == self.before[3]
        os.close(self.ours)
        return code


@pytest.mark.parametrize("how", ["q", "ctrl-c"])
def test_on_a_terminal_it_shows_jobs_and_leaves_cleanly(shell: Shell, how: str) -> None:
    shell.up()
    job = shell.submit(10**6, name="endless")
    until(shell.client(), job, lambda info: info.state == "running")
    terminal = Terminal(shell)
    terminal.read_until(b"endless")
    if how == "q":
        os.write(terminal.ours, b"q")
    else:
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.leaves() == (0 if how == "q" else 130)
    shell("down")


def test_it_outlives_the_scheduler(shell: Shell) -> None:
    shell.up()
    terminal = Terminal(shell)
    terminal.read_until(b"null:0")
    shell("down")
    terminal.read_until(b"no scheduler runs")
    os.write(terminal.ours, b"q")
    assert terminal.leaves() == 0
