"""Virtual time: what happens when, one after another, and lines that carry messages in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from ...virtual_clock import VirtualClock

Act = Callable[[], object]


class Loop:
    """Does what was put off when its moment has come.

    Attributes
    ----------
    clock
        What time it is.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._put_off: list[tuple[float, int, Act]] = []
        self._order = count()

    @property
    def now_s(self) -> float:
        return self.clock.now()

    def at(self, when_s: float, act: Act) -> None:
        """Call ``act`` at ``when_s``, at once if that has passed."""
        heapq.heappush(self._put_off, (max(when_s, self.now_s), next(self._order), act))

    def after(self, delay_s: float, act: Act) -> None:
        """Call ``act`` after ``delay_s``."""
        self.at(self.now_s + delay_s, act)

    def step(self) -> bool:
        """Do what comes next. Return False if there is nothing."""
        if not self._put_off:
            return False
        when_s, _, act = heapq.heappop(self._put_off)
        self.clock.advance_to(when_s)
        act()
        return True


class Line:
    """Carries messages one way, in order; those on their way when it is cut are lost.

    Parameters
    ----------
    loop
        Virtual time.
    delay_s
        Returns how long the n-th message takes.
    """

    def __init__(self, loop: Loop, delay_s: Callable[[int], float]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._sent = 0
        self._cuts = 0
        self.last_s = 0.0

    def send(self, deliver: Act) -> None:
        """Call ``deliver`` when the message has arrived, unless the line is cut before."""
        cuts = self._cuts
        self.last_s = max(self.last_s, self._loop.now_s + self._delay_s(self._sent))
        self._sent += 1
        self._loop.at(self.last_s, lambda: deliver() if self._cuts == cuts else None)

    def cut(self) -> None:
        """Lose what is on its way."""
        self._cuts += 1
