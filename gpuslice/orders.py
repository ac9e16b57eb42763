"""What the scheduler wants of one rank, and where the rank stands: state and rules, no I/O.

The I/O thread brings messages, the main thread comes by at boundaries; one lock orders the two. The main
thread counts a boundary before it looks at ``stop_at``; the I/O thread sets ``stop_at`` before it looks at
the count. So one of them sees the other, and where both do (the count *is* ``stop_at``), the lock decides:
the main thread parks, or the I/O thread takes ``stop_at`` back and answers ``Overshot``.

    phase      Resume            Suspend                       Cancel
    WAITING    grant             stale                         end without the script's own code
    RUNNING    new epoch         stop there, or Overshot       SIGTERM
    PARKED     grant             remembered for after Resume   end without the script's own code

An epoch smaller than the newest one makes any order stale; stale orders change nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from gpuslice.boundaries import NEVER, BoundaryCounter
from gpuslice.wire import Cancel, FromAgent, Overshot, Resume, Suspend


class Phase(Enum):
    """Where a rank stands."""

    #: It has said Hello and has never had a lease.
    WAITING = "waiting"
    RUNNING = "running"
    #: Suspended, or about to be.
    PARKED = "parked"


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
            if self.phase is Phase.PARKED:
                if order.stop_at > boundaries.count:
                    boundaries.stop_at = order.stop_at
                return []
            boundaries.stop_at = order.stop_at
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
            running = self.phase is Phase.RUNNING
        if running:
            self._terminate()
        return []

    def arrive(self, boundary: int) -> bool:
        """The main thread is at ``boundary``: whether it is to park there."""
        with self._changed:
            if boundary < self._boundaries.stop_at:
                return False
            self._boundaries.stop_at = NEVER
            self._grant = None  # one sent twice must not end this stay
            self.phase = Phase.PARKED
            return True

    def run_on(self) -> None:
        """The main thread runs (again)."""
        with self._changed:
            self.phase = Phase.RUNNING

    def await_order(self) -> Resume | Cancel:
        """Wait for a lease or the end; signals are handled meanwhile."""
        with self._changed:
            while self._grant is None and self._cancel is None:
                self._changed.wait()
            if self._cancel is not None:
                return self._cancel
            grant, self._grant = self._grant, None
            assert grant is not None
            return grant
