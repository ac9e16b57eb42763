"""The time of day, for a core with jobs that wait for one.

The core is told what time it is when something first needs that, and then whenever it changes against the
core's clock: somebody has set the machine's clock, or the machine has slept or was off.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Clocked

#: How long a scheduler may sleep without a look at the time of day.
_LOOK_AGAIN_S = 60.0


class TimeOfDay:
    """Tells ``core`` the time of day.

    Parameters
    ----------
    core
        The core.
    now, unix_s
        Return the time on the core's clock, and in seconds since 1970.
    occur
        Has the core take an event.
    """

    def __init__(
        self,
        core: Core,
        now: Callable[[], float],
        occur: Callable[[Clocked], object],
        unix_s: Callable[[], float],
    ) -> None:
        self._core, self._now, self._occur, self._unix_s = core, now, occur, unix_s

    @property
    def _is_needed(self) -> bool:
        return self._core.state.wall.ahead_s is not None

    def tell(self) -> None:
        """Tell the core the time of day, unless the core knows it."""
        unix_s = self._unix_s()
        if self._core.state.wall.is_off(unix_s, self._now()):
            self._occur(Clocked(unix_s))

    def look(self) -> None:
        """Tell the core that the time of day has changed, if it has and the core was told it before."""
        if self._is_needed:
            self.tell()

    def due_s(self) -> float | None:
        """Return when to look again at the latest. None if nothing needs the time of day."""
        return self._now() + _LOOK_AGAIN_S if self._is_needed else None
