"""A job's command on another node: that node's Python, home and paths in place of the submitter's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuslice.launch.command import PYTHON, SITEDIR
from gpuslice.node_agents.own_terms import problem, translated
from gpuslice.sched_core.jobs.program import Program

THEIRS = "/opt/their/bin/python"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of this node, which is not the submitter's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def program(*argv: str, directory: str = "/", **environ: str) -> Program:
    given = {PYTHON: THEIRS, "HOME": "/home/ann", "PATH": "/opt/their/bin:/usr/bin", **environ}
    return Program(argv=argv, environ=given, directory=directory)


def test_the_submitters_python_is_that_of_the_node(home: Path) -> None:
    ours = translated(program(THEIRS, "train.py"))
    assert ours.argv == (sys.executable, "train.py")
    assert ours.environ[PYTHON] == sys.executable
    assert ours.environ["HOME"] == str(home)
    first, *rest = ours.environ["PATH"].split(os.pathsep)
    assert first == os.path.dirname(sys.executable)
    assert "/opt/their/bin" not in rest


def test_any_other_command_stays_as_it_is(home: Path) -> None:
    assert translated(program("/opt/other/python", THEIRS)).argv == ("/opt/other/python", THEIRS)


def test_the_submitters_hooks_are_left_out_and_other_paths_stay(home: Path) -> None:
    theirs = "/opt/their/lib/" + "/".join(SITEDIR.parts[-3:])
    ours = translated(program(THEIRS, PYTHONPATH=os.pathsep.join((theirs, "/data/lib"))))
    assert ours.environ["PYTHONPATH"].split(os.pathsep) == [str(SITEDIR), "/data/lib"]


def test_a_directory_below_the_home_is_looked_for_in_the_home_of_the_node(home: Path) -> None:
    (home / "work").mkdir()
    assert translated(program("true", directory="/home/ann/work")).directory == str(home / "work")
    there = translated(program("true", directory="/home/ann/nothing"))
    assert there.directory == "/home/ann/nothing"
    assert problem(there) == "there is no directory /home/ann/nothing"


def test_directories_of_the_session_that_are_not_there_are_left_out(home: Path) -> None:
    ours = translated(program("true", TMPDIR="/home/ann/tmp", XDG_CACHE_HOME=str(home)))
    assert "TMPDIR" not in ours.environ
    assert ours.environ["XDG_CACHE_HOME"] == str(home)


def test_a_command_that_is_not_there_is_named(home: Path) -> None:
    assert problem(translated(program("no-such-command"))) == "there is no command no-such-command"
    assert problem(translated(program("./no-such-file"))) == "there is no command ./no-such-file"
    assert problem(translated(program("sh", "-c", "true"))) == ""
