"""What the scheduler wants of one rank, and where the rank stands: state and rules, no I/O.

The I/O thread brings messages, the main thread comes by at boundaries; one lock orders the two. The main
thread counts a boundary before it looks at ``stop_at``; the I/O thread sets ``stop_at`` before it looks at
the count. So one of them sees the other, and where both do (the count *is* ``stop_at``), the lock decides:
the main thread parks, or the I/O thread takes ``stop_at`` back and answers ``Overshot``.

    phase      Resume            Suspend                       Cancel
    WAITING    grant             stale                         end without the script's own code
    RUNNING    new epoch         stop there, or Overshot       SIGTERM
    PARKED     grant             remembered for after Resume   SIGTERM, once the state is back
    ON_LEAVE   grant             remembered for after Resume   SIGTERM

An epoch smaller than the newest one makes any order stale; stale orders change nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from gpuslice.boundaries import NEVER, BoundaryCounter
from gpuslice.ending import ENDING_SIGNALS
from gpuslice.wire import Cancel, FromAgent, Overshot, Resume, Suspend

#: How often the parked main thread looks for itself: a signal may come just before it waits.
_LOOK_AGAIN_S = 0.5


class Phase(Enum):
    """Where a rank stands."""

    #: It has said Hello and has never had a lease.
    WAITING = "waiting"
    RUNNING = "running"
    #: Suspended, or about to be.
    PARKED = "parked"
    #: Back without a lease, until the next boundary, because a signal asks the script to end.
    ON_LEAVE = "on leave"


class Orders:
    """The rank's side of a lease.

    Parameters
    ----------
    boundaries
        Its ``stop_at`` is ours to set.
    terminate
        Ends a running job as SIGTERM would.
    """

    def __init__(self, boundaries: BoundaryCounter, terminate: Callable[[], None]) -> None:
        self.phase = Phase.WAITING
        self.epoch = 0
        self._boundaries = boundaries
        self._terminate = terminate
        self._changed = threading.Condition()
        self._grant: Resume | None = None
        self._cancel: Cancel | None = None
        self._asked_to_end = False
        #: Where to stop after a leave.
        self._later = NEVER
        #: Whether ``stop_at`` is no order, but there to hear of the next boundary.
        self._listening = False

    def resume(self, order: Resume) -> list[FromAgent]:
        """A lease, new or (at a larger ``stop_at`` for the gang) the present one once more."""
        with self._changed:
            if order.epoch >= self.epoch:
                self.epoch = order.epoch
                if self.phase is not Phase.RUNNING:
                    self._grant = order
                    self._changed.notify_all()
        return []

    def suspend(self, order: Suspend) -> list[FromAgent]:
        """A boundary to stop at."""
        with self._changed:
            if order.epoch != self.epoch or self.phase is Phase.WAITING:
                return []
            boundaries = self._boundaries
            if self.phase is Phase.ON_LEAVE:
                self._later = order.stop_at
                return []
            if self.phase is Phase.PARKED:
                if order.stop_at > boundaries.count:
                    boundaries.stop_at = order.stop_at
                return []
            boundaries.stop_at, self._listening = order.stop_at, False
            if boundaries.count < order.stop_at:
                return []
            boundaries.stop_at = NEVER
            return [Overshot(epoch=self.epoch, boundary=boundaries.count)]

    def cancel(self, order: Cancel) -> list[FromAgent]:
        """The job is to end."""
        with self._changed:
            if order.epoch < self.epoch:
                return []
            self._cancel = order
            self._changed.notify_all()
            running = self.phase in (Phase.RUNNING, Phase.ON_LEAVE)
        if running:
            self._terminate()
        return []

    def interrupt(self, signum: int) -> None:
        """A signal has come while the script is parked; in the main thread, in the midst of anything."""
        if signum in ENDING_SIGNALS:
            with self._changed:  # reentrant: the main thread may be in here already
                self._asked_to_end = True
                self._changed.notify_all()

    def arrive(self, boundary: int) -> bool:
        """The main thread is at ``boundary``: whether it is to park there (not if it was told to end)."""
        with self._changed:
            if boundary < self._boundaries.stop_at:
                return False
            self._boundaries.stop_at = NEVER
            listening, self._listening = self._listening, False
            if listening or self._cancel is not None:
                return False
            if self.phase is Phase.ON_LEAVE:
                self._boundaries.stop_at, self._later = max(self._later, boundary + 1), NEVER
            else:
                self._grant = None  # one sent twice must not end this stay
            self._asked_to_end = False
            self.phase = Phase.PARKED
            return True

    def run_on(self) -> None:
        """The main thread runs (again)."""
        with self._changed:
            self.phase = Phase.RUNNING

    def listen(self) -> None:
        """Have the main thread come by at the next boundary, unless it is told to stop at another."""
        with self._changed:
            if self._boundaries.stop_at == NEVER:
                self._boundaries.stop_at, self._listening = self._boundaries.count + 1, True

    def take_leave(self) -> None:
        """The main thread runs without a lease, to the next boundary at most."""
        with self._changed:
            self.phase = Phase.ON_LEAVE
            if self._boundaries.stop_at > self._boundaries.count:
                self._later = self._boundaries.stop_at
            self._boundaries.stop_at = 0

    def quiet_for(self, duration_s: float) -> bool:
        """Wait for an order, but not longer than this; whether there was none."""
        with self._changed:
            return not self._changed.wait_for(self._called, duration_s)

    def await_order(self) -> Resume | Cancel | None:
        """Wait for a lease or the end; ``None`` if a signal asks the script to end (``interrupt``)."""
        with self._changed:
            while not self._called():
                # A signal that comes between this look and the wait wakes nobody.
                self._changed.wait(_LOOK_AGAIN_S)
            if self._asked_to_end:
                return None
            if self._cancel is not None:
                return self._cancel
            grant, self._grant = self._grant, None
            return grant

    def _called(self) -> bool:
        return self._grant is not None or self._cancel is not None or self._asked_to_end
