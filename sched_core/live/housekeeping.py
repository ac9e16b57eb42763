"""Tasks that can wait until no rank or client waits for the scheduler: its log, the disk, garbage.

An order is often answered at once, and then another process waits for what follows from the answer. So the
end of a burst of events is awaited first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

#: How long no event must have happened before the tasks are run.
_QUIET_MS = 5
#: How long the tasks are put off at most while events keep coming.
_AT_MOST_S = 1.0


class Housekeeping:
    """The tasks to be done after something has happened, but not at once."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] = []
        #: Since when the tasks are due; infinite while they are not.
        self._since_s = inf

    def add(self, task: Callable[[], None]) -> None:
        """Call ``task`` in every quiet moment after events; while events keep coming, once a second."""
        self._tasks.append(task)

    def happened(self, now: float) -> None:
        """Note that an event has happened at ``now``: the tasks are due."""
        self._since_s = min(self._since_s, now)

    @property
    def pause_ms(self) -> int | None:
        """The milliseconds to wait for another event before the tasks are run. None: they are not due."""
        return None if self._since_s == inf else _QUIET_MS

    def run_if_due(self, now: float, *, quiet: bool) -> None:
        """Run the tasks if they are due and the last pause was ``quiet``, or were put off for too long."""
        if quiet or now - self._since_s > _AT_MOST_S:
            self.run()

    def run(self) -> None:
        """Run the tasks if they are due."""
        if self._since_s < inf:
            self._since_s = inf
            for task in self._tasks:
                task()
