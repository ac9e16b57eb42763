"""A clock for tests."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when told to.

    Parameters
    ----------
    start_s
        The first reading, in seconds.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, when_s: float) -> None:
        """Move to ``when_s``.

        Raises
        ------
        ValueError
            If that lies in the past.
        """
        if when_s < self._now_s:
            raise ValueError(f"time cannot go back from {self._now_s} to {when_s}")
        self._now_s = when_s
