"""Ctrl-C ends a simulation between two events, so that what is known by then is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """A context in which Ctrl-C is noted, and raises ``KeyboardInterrupt`` only where nothing is changed.

    Outside of the main thread, and where Ctrl-C is ignored, it does nothing.

    Attributes
    ----------
    came
        Whether there was one.
    raises
        Whether it raises ``KeyboardInterrupt``: while a policy plans, which may take minutes.
    """

    def __init__(self) -> None:
        self.came = self.raises = False
        self._former: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        former = signal.getsignal(signal.SIGINT)
        if callable(former) and threading.current_thread() is threading.main_thread():
            self._former = former
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        assert self._former is not None
        self.came = True
        try:
            self._former(number, frame)
        except KeyboardInterrupt:
            if self.raises:
                raise
