"""Directories that only their user may enter, and files that are replaced whole."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError


def private_directory(path: Path, *, option: str, parents: bool = False) -> None:
    """Make ``path`` with mode 0700, or check that it is one: ours, no link, closed to others.

    Parameters
    ----------
    option
        Of the command line, by which another directory can be chosen; for the error's remedy.
    parents
        Also make what is missing above it.

    Raises
    ------
    EnvironmentUnusableError
        If it is anything else or cannot be made; the operating system's error is its cause.
    """
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        remedy = f"choose another directory with {option}"
        raise EnvironmentUnusableError(f"cannot make {path}: {error.strerror}", remedy) from error
    problem = _problem(os.lstat(path))
    if problem:
        raise EnvironmentUnusableError(
            f"{path} {problem}", f"choose a new or private (0700) directory of your own with {option}"
        )


def _problem(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o} instead of 0700"
    return None


def draft_path(path: Path) -> Path:
    """Where this process writes what is then renamed to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def replace_file(path: Path, content: bytes) -> os.stat_result:
    """Write a file whole: who reads meanwhile, or after a crash of this process, sees the old one.

    Returns
    -------
    os.stat_result
        Of the new file.

    Raises
    ------
    OSError
        If it cannot be written; the old one is as it was.
    """
    draft = draft_path(path)
    try:
        draft.write_bytes(content)
        status = draft.stat()
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return status
