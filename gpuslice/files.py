"""Private directories, files that are replaced as a whole, and closed standard streams."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError, UsageError


def private_directory(path: Path, *, option: str, parents: bool = False, by_link: bool = False) -> None:
    """Make the directory ``path`` with mode 0700, or check that it is one: this user's, and no link.

    Parameters
    ----------
    option
        The option of the command line that chooses another directory, for the error's remedy.
    parents
        True to make missing parent directories, too.
    by_link
        True to accept a symbolic link to such a directory, if no other user can replace either.

    Raises
    ------
    EnvironmentUnusableError
        If it is anything else or cannot be made. The operating system's error is its cause.
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
    status = os.lstat(path)
    if by_link and stat.S_ISLNK(status.st_mode):
        problem = _problem_behind(path)
    else:
        problem = _problem(status)
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


def _problem_behind(link: Path) -> str | None:
    """Return what is wrong with the directory behind a link, or with the path to it; None if nothing is."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return "is a symbolic link that leads nowhere"
    if problem := _problem(os.lstat(target)):
        return f"is a symbolic link to {target}, which {problem}"
    for entry in _way(link):
        if who := _who_replaces(entry):
            return f"is a symbolic link, and {who} could replace {entry} on the way to its directory"
    return None


def _way(link: Path) -> Iterator[Path]:
    """Yield every directory and link on the way when the kernel resolves ``link``."""
    left = list(link.absolute().parts)
    here = Path(left.pop(0))
    while left:
        part = left.pop(0)
        if part == "..":
            here = here.parent
            continue
        entry = here / part
        yield entry
        if entry.is_symlink():
            parts = Path(os.readlink(entry)).parts
            here = Path(parts[0]) if parts[0] == "/" else here
            left = [*(parts[1:] if parts[0] == "/" else parts), *left]
        else:
            here = entry


def _who_replaces(entry: Path) -> str:
    """Return which user other than root and this one could replace ``entry``; empty if none could."""
    above, status = os.lstat(entry.parent), os.lstat(entry)
    trusted = {0, os.geteuid()}
    if above.st_uid not in trusted:
        return f"user {above.st_uid}"
    if not above.st_mode & 0o022:
        return ""
    if not above.st_mode & stat.S_ISVTX:
        return "whoever may write there"
    return "" if status.st_uid in trusted else f"user {status.st_uid}"


def occupy_closed_streams() -> None:
    """Open the null device in place of each closed standard stream, until the next ``exec``.

    Otherwise the next file that gpuslice opens would become the process's stdout or stderr, and C libraries
    would write their messages into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def working_directory() -> str:
    """Return the path of the working directory.

    Raises
    ------
    UsageError
        If it is gone.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        was = os.environ.get("PWD", "")
        raise UsageError(
            f"the working directory {was}".rstrip() + " is gone", "cd to one that exists"
        ) from error


def check_working_directory() -> None:
    """Raise if the working directory is gone or this user may not enter it.

    Raises
    ------
    UsageError
        In either case.
    """
    path = working_directory()
    if closed := closed_directory(Path(path)):
        raise UsageError(f"permission denied: the working directory {path} ({closed})", "cd to another one")


def closed_directory(path: Path) -> str:
    """Return which directory on the way into ``path`` this user may not enter, and its owner.

    Return an empty text if there is none.
    """
    for part in (*reversed(path.parents), path):
        if part.is_dir() and not os.access(part, os.X_OK, effective_ids=True):
            return f"{part} belongs to user {part.stat().st_uid}"
    return ""


def draft_path(path: Path) -> Path:
    """Return the temporary path that this process writes and then renames to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def replace_file(path: Path, content: bytes) -> os.stat_result:
    """Replace a file as a whole. A reader, even after a crash, sees either the old file or the new one.

    Returns
    -------
    os.stat_result
        The status of the new file.

    Raises
    ------
    OSError
        If it cannot be written. The old file is unchanged.
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
