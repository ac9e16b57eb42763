"""Stacks of threads that run on while they are looked at.

CPython 3.11 makes a frame's object when somebody asks for it, and may collect garbage in the midst of that.
A finalizer or a callback of the collector then lets the other thread go on; its frame is gone when the object
is finished, and whoever reads it ends by a segmentation fault. So nothing is collected meanwhile. A frame
whose object is complete may end: the object takes over what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from .heap import uncollected


def stacks() -> dict[int, list[FrameType]]:
    """Ident of each Python thread -> its frames, the innermost first."""
    with uncollected():
        return {ident: list(stack(frame)) for ident, frame in sys._current_frames().items()}


def stack_of(ident: int) -> list[FrameType]:
    """The frames of one thread, the innermost first; none if it has ended."""
    with uncollected():
        return list(stack(sys._current_frames().get(ident)))


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those below it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
