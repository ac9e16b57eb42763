"""What people see of a job: in a table, and when they press the tabulator key."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from gpuslice.cli import tables
from gpuslice.verbs import JobInfo

from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S
from .conftest import Shell, shell_in
from .waiting import until


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, commands: Servers) -> JobInfo:
    """One that a real scheduler told of, before its first slice."""
    with shell_in(tmp_path_factory.mktemp("job") / "s", commands) as shell:
        shell.up()
        job = shell.submit(10**6, name="a")
        found = until(shell.client(), job, lambda info: info.state == "running")
        shell("down")
    return found


def test_what_is_unusual_about_a_job_is_said(job: JobInfo) -> None:
    assert tables.state(job) == "running"
    unusual = msgspec.structs.replace(
        job, held=True, moving_to=("null:1", "null:2"), missed_boundaries=2, restarts=1, max_restarts=3
    )
    assert tables.state(unusual) == "running, held, to null:1,null:2, late 2x, restart 1/3"
    ended = msgspec.structs.replace(unusual, state="cancelled", missed_boundaries=0, restarts=0)
    assert tables.state(ended) == "cancelled"
    assert tables.ending(job) == "-"
    assert tables.ending(msgspec.structs.replace(job, exit_code=1, failure="user")) == "1 user"
    assert tables.steps(msgspec.structs.replace(job, steps=3, total_steps=9)) == "3/9"
    waiting = msgspec.structs.replace(job, waited_s=12.0, fair_share_delay_s=10.0, fragmentation_delay_s=2.0)
    assert tables.waited(waiting) == "12.0 s (10.0/2.0)"
    assert tables.shares(job) == "-"
    shares = msgspec.structs.replace(job, shares_with=("b",))
    assert tables.shares(shares) == "with b"
    slower = msgspec.structs.replace(shares, slowdown=1.25, slowdown_interval=(1.2, 1.31))
    assert tables.shares(slower) == "with b, 1.25x (1.20-1.31)"
    assert tables.copy(job) == "-"
    assert tables.copy(msgspec.structs.replace(job, copy_on="b", copy_age_s=41.0)) == "b, 41.0 s old"
    assert tables.switch(job) == "-"
    switched = msgspec.structs.replace(job, switch_s=0.13, switch_predicted_s=0.125)
    assert tables.switch(switched) == "130 ms (of 125 ms)"
    assert tables.blackout(msgspec.structs.replace(job, blackout_s=0.52, blackout_mean_s=0.13)) == (
        "0.52 s (130 ms)"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (99.0, "99.0 s"), (180.0, "3 min"), (8000.0, "2.2 h"), (1e6, "11.6 d")],
)
def test_times_for_people(seconds: float | None, text: str) -> None:
    assert tables.duration(seconds) == text


def test_colours_are_for_terminals_only(
    job: JobInfo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables.jobs([job])
    tables.show(table)
    plain = capsys.readouterr().out
    assert plain.splitlines()[1].split("\t")[:3] == ["a", "-", "running"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tables.show(table)
    coloured = capsys.readouterr().out
    assert "\x1b[32mrunning\x1b[0m" in coloured
    assert "\t" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    tables.show(table)
    assert "\x1b" not in capsys.readouterr().out


def completed(shell: Shell, line: str) -> list[str]:
    """What bash is offered at the end of ``line``."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuslice"],
        env={
            **os.environ,
            "GPUSLICE_STATE_DIR": str(shell.directory),
            "_GPUSLICE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_commands_options_and_jobs(shell: Shell) -> None:
    assert completed(shell, "gpuslice can") == ["cancel"]
    assert "--timeout" in completed(shell, "gpuslice wait --t")
    assert completed(shell, "gpuslice wait ") == [], "nobody can be asked"
    shell.up()
    for name in ("train-1", "train-2", "other"):
        shell.submit(1, name=name)
    assert completed(shell, "gpuslice wait train") == ["train-1", "train-2"]
    shell("down")
