"""Where the last lines of a job's output begin."""

from __future__ import annotations

from collections.abc import Callable

#: How far is looked back at once; a scheduler's answer has so much of a log.
_BLOCK_BYTES = 256 << 10


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
