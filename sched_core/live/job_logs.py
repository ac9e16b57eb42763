"""The output of jobs, as users read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.verbs import LogFiles

#: The most bytes of a log that one answer holds.
_LOG_PART_BYTES = 256 << 10


def log_files(log: Callable[[str, str], Path], job: str) -> LogFiles:
    """Return the files of the output of ``job``. ``log`` returns the path of its ``out`` or ``err``."""
    out, err = log(job, "out"), log(job, "err")
    return LogFiles(out=str(out), err=str(err), out_bytes=_size_bytes(out), err_bytes=_size_bytes(err))


def part(log: Path, offset: int) -> bytes:
    """Return a part of the file ``log`` from byte ``offset`` on; nothing if there is no more.

    Raises
    ------
    EnvironmentUnusableError
        If it cannot be read.
    """
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return file.read(_LOG_PART_BYTES)
    except FileNotFoundError:
        return b""  # it has yet to be started
    except (OSError, ValueError, OverflowError) as error:
        raise EnvironmentUnusableError(f"cannot read {log}: {error}", "see the scheduler's logs") from error


def _size_bytes(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0  # it has yet to be started; who reads it is told of any other fault
