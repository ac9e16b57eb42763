"""A job's command in a node's own terms: its Python, home and paths in place of the submitter's.

What was submitted on another machine names that machine's paths. Most are the same on all nodes; those of
Python, gpuslice and the home need not be.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpuslice.launch.command import PACKAGES, PYTHON, SITEDIR, package_paths
from gpuslice.sched_core.jobs.program import Program

#: Variables that name a directory of the submitter's session; one that is not there is left out.
_DIRECTORIES = (
    *("TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("PWD", "OLDPWD"),
)
_SITEDIR_PARTS = SITEDIR.parts[-3:]


def translated(program: Program) -> Program:
    """Return ``program`` as it is started on this node.

    A command whose first word is the submitter's Python has this node's. A working directory in the
    submitter's home that is not there is looked for in the home here.
    """
    theirs = program.environ.get(PYTHON, "")
    argv = program.argv
    if theirs and argv[:1] == (theirs,):
        argv = (sys.executable, *argv[1:])
    environ = {**program.environ, **_own(program.environ, theirs)}
    for name in _DIRECTORIES:
        if name in environ and not os.path.isdir(environ[name]):
            environ.pop(name)
    directory = at_home(program.directory, program.environ.get("HOME", ""), environ["HOME"])
    return replace(program, argv=argv, directory=directory, environ=environ)


def at_home(path: str, theirs: str, ours: str) -> str:
    """Return ``path``, or the same path below our home if it is below ``theirs`` and exists only there."""
    if not theirs or theirs == ours or os.path.exists(path):
        return path
    try:
        moved = Path(ours) / Path(path).relative_to(theirs)
    except ValueError:
        return path
    return str(moved) if moved.exists() else path


def problem(program: Program) -> str:
    """Return why a translated ``program`` cannot be started on this node; empty if it can."""
    if not os.path.isdir(program.directory):
        return f"there is no directory {program.directory}"
    command = program.argv[0]
    looked = os.path.join(program.directory, command) if "/" in command else command
    if shutil.which(looked, path=program.environ.get("PATH")) is None:
        return f"there is no command {command}"
    return ""


def _own(environ: Mapping[str, str], their_python: str) -> dict[str, str]:
    """Return the variables of a job that are this node's own."""
    user = pwd.getpwuid(os.getuid())
    home = os.environ.get("HOME") or user.pw_dir
    own = {"HOME": home, "USER": user.pw_name, "LOGNAME": user.pw_name, PYTHON: sys.executable}
    own[PACKAGES] = package_paths()
    own["PYTHONPATH"] = _joined([str(SITEDIR), *_without_sitedir(environ.get("PYTHONPATH", ""))])
    own["PATH"] = _path(environ.get("PATH", ""), their_python)
    if environ.get("VIRTUAL_ENV") and sys.prefix != sys.base_prefix:
        own["VIRTUAL_ENV"] = sys.prefix
    return own


def _path(theirs: str, their_python: str) -> str:
    """Return ``PATH``: this node's Python first, then what was submitted, then what this node has besides."""
    before = [str(Path(sys.executable).parent)]
    given = [part for part in theirs.split(os.pathsep) if part != os.path.dirname(their_python)]
    return _joined([*before, *given, *os.environ.get("PATH", os.defpath).split(os.pathsep)])


def _without_sitedir(path: str) -> list[str]:
    """Return the parts of ``PYTHONPATH`` without the submitter's own hooks."""
    return [part for part in path.split(os.pathsep) if part and Path(part).parts[-3:] != _SITEDIR_PARTS]


def _joined(parts: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(part for part in parts if part))
