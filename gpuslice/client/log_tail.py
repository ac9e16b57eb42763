"""Where the last lines of a job's output begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpuslice.verbs import LogFiles

#: How far is looked back at once; a scheduler's answer has so much of a log.
_BLOCK_BYTES = 256 << 10


class LogReader(Protocol):
    """What has the output of jobs: ``Client``, or the reader of a stopped scheduler's directory."""

    def logs(self, job: str) -> LogFiles:
        """Return the files of the output of ``job``."""
        ...

    def read_log(self, job: str, offset: int = 0, *, err: bool = False) -> bytes:
        """Return some of the output of ``job`` from byte ``offset`` on."""
        ...


def last_lines(reader: LogReader, job: str, lines: int, *, err: bool = False) -> bytes:
    """Return the last ``lines`` of the output of ``job``, or of its stderr, as it is now."""
    files = reader.logs(job)
    size_bytes = files.err_bytes if err else files.out_bytes
    start = start_of_last_lines(lambda offset: reader.read_log(job, offset, err=err), size_bytes, lines)
    return _whole(lambda offset: reader.read_log(job, offset, err=err), start, size_bytes)


def start_of_last_lines(read: Callable[[int], bytes], size_bytes: int, lines: int) -> int:
    """Return the byte at which the last ``lines`` of ``size_bytes`` of output begin.

    A line that has no end yet counts. ``read`` returns some of the output from a byte on.
    """
    if lines <= 0:
        return size_bytes
    # The end of the last line separates it from nothing.
    wanted = lines
    end = size_bytes
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        block = _whole(read, begin, end)
        last = len(block)
        if end == size_bytes and block.endswith(b"\n"):
            last -= 1
        while (found := block.rfind(b"\n", 0, last)) >= 0:
            wanted -= 1
            if not wanted:
                return begin + found + 1
            last = found
        end = begin
    return 0


def _whole(read: Callable[[int], bytes], begin: int, end: int) -> bytes:
    """Return the output from ``begin`` to ``end``. It is shorter only if the file was cut meanwhile."""
    block = b""
    while len(block) < end - begin and (part := read(begin + len(block))):
        block += part
    return block[: end - begin]
