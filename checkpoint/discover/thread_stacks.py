"""Stacks of threads that keep running while they are read.

CPython 3.11 makes a frame's object on request, and may collect garbage meanwhile. A finalizer or a callback
of the collector then lets the other thread go on. Its frame is gone when the object is finished, and reading
it ends in a segmentation fault. So garbage collection is off here. A frame whose object is complete may end,
because the object keeps what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from .heap import uncollected


def stacks() -> dict[int, list[FrameType]]:
    """Return the frames of each Python thread by its ident, innermost first."""
    with uncollected():
        return {ident: list(stack(frame)) for ident, frame in sys._current_frames().items()}


def stack_of(ident: int) -> list[FrameType]:
    """Return the frames of one thread, innermost first; an empty list if the thread has ended."""
    with uncollected():
        return list(stack(sys._current_frames().get(ident)))


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back
