"""Ctrl-C ends a simulation between two events, so that what is known by then is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupts:
    """A context in which Ctrl-C only sets a flag, and ends what ``call`` runs.

    Outside of the main thread, and where Ctrl-C is ignored, it notes nothing.

    Attributes
    ----------
    came
        True if Ctrl-C has been pressed.
    """

    def __init__(self) -> None:
        self.came = self._raises = False
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

    def call(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function that may take long. Return None if Ctrl-C ended it."""
        try:
            self._raises = True
            result = function(*arguments)
            self._raises = False
        except KeyboardInterrupt:
            self.came, self._raises = True, False
            return None
        return result

    def _note(self, number: int, frame: FrameType | None) -> None:
        assert self._former is not None
        self.came = True
        try:
            self._former(number, frame)
        except KeyboardInterrupt:
            if self._raises:
                self._raises = False
                raise
