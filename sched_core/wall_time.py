"""The Unix time of the core's moments, as far as the shell has told the core what time it is."""

from __future__ import annotations

from math import inf

#: Drift between the two clocks that the core is told of.
DRIFT_S = 0.5


class WallTime:
    """A converter from Unix time to the core's clock, which stands still while the machine sleeps or is off.

    Attributes
    ----------
    ahead_s
        How far Unix time is ahead of the core's clock. None: not known.
    """

    def __init__(self) -> None:
        self.ahead_s: float | None = None

    def read(self, unix_s: float, now: float) -> None:
        """Note that it is ``unix_s`` at ``now``."""
        self.ahead_s = unix_s - now

    def is_off(self, unix_s: float, now: float) -> bool:
        """Return True if the core takes ``now`` for another time than ``unix_s``, or for none."""
        return self.ahead_s is None or abs(self.ahead_s - (unix_s - now)) > DRIFT_S

    def moment(self, unix_s: float) -> float:
        """Return when it will be ``unix_s`` on the core's clock; infinite if the time of day is not known."""
        return inf if self.ahead_s is None else unix_s - self.ahead_s
