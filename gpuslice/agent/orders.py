"""What the scheduler wants of one rank, and where the rank stands: state and rules, no I/O.

The I/O thread brings messages, the main thread comes by at boundaries; one lock orders the two. The main
thread counts a boundary before it looks at ``stop_at``; the I/O thread sets ``stop_at`` before it looks at
the count. So one of them sees the other, and where both do (the count *is* ``stop_at``), the lock decides:
the main thread parks, or the I/O thread takes ``stop_at`` back and answers ``Overshot``.

    phase      Resume      Suspend                       Dismiss
    WAITING    grant       stale                         end without the script's own code
    RUNNING    new epoch   stop there, or Overshot       nothing
    PARKED     grant       remembered for after Resume   end without the script's own code
    ON_LEAVE   grant       remembered for after Resume   nothing

A Suspend with ``ending`` says that the job is told to end: it may run on then, with or without a lease, until
it has. An epoch smaller than the newest one makes any order stale; stale orders change
nothing.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import NEVER, BoundaryCounter
from gpuslice.runtime.ending import ENDING_SIGNALS
from gpuslice.wire import Dismiss, FromAgent, Overshot, Resume, Suspend, Withdraw, Withdrawn

#: How often the parked main thread looks for itself: a signal may come just before it waits.
_LOOK_AGAIN_MS = 500
#: How long a parked job that is told to end waits for the signal, which a launcher may pass on rank by rank.
#: Ranks of a gang that come back before it would end at different batches.
HANDLER_S = 5.0
#: A ``stop_at`` from here on is never reached: a suspend that was called off.
_CALLED_OFF = 2**62


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

    Attributes
    ----------
    released
        Whether this process is no rank and trains all the same, without being asked for anything.
    """

    def __init__(self, boundaries: BoundaryCounter) -> None:
        self.phase = Phase.WAITING
        self.epoch = 0
        self._boundaries = boundaries
        #: Reentrant: the handler of a signal may find the main thread in here.
        self._lock = threading.RLock()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._news).atexit = False  # the I/O thread may still be there
        self._grant: Resume | None = None
        self._dismissal: Dismiss | None = None
        self._asked_to_end = False
        #: When a parked job that is told to end comes back without a signal, by the monotonic clock.
        self._back_s = float("inf")
        self._refusal: GpusliceError | None = None
        self.released = self._displaced = False
        #: Whether the last order to stop was taken back because the job is told to end.
        self._ending = False
        #: Where to stop after a leave.
        self._later = NEVER
        #: Whether ``stop_at`` is no order, but there to hear of the next boundary.
        self._listening = False

    def resume(self, order: Resume) -> list[FromAgent]:
        """A lease, new or (at a larger ``stop_at`` for the gang) the present one once more."""
        with self._lock:
            if order.epoch >= self.epoch:
                if self.released:  # the process beside which this one trained has ended
                    self.released, self.phase, self._boundaries.stop_at = False, Phase.ON_LEAVE, 0
                # Where a former lease was to end is no matter any more.
                if order.epoch > self.epoch and self.phase is Phase.PARKED:
                    self._boundaries.stop_at = NEVER
                elif order.epoch > self.epoch and self.phase is Phase.ON_LEAVE:
                    self._later = NEVER
                self._ending = self._ending and order.epoch == self.epoch
                self.epoch = order.epoch
                if self.phase is not Phase.RUNNING:
                    self._grant = order
                    self._tell()
        return []

    def suspend(self, order: Suspend) -> list[FromAgent]:
        """A boundary to stop at."""
        with self._lock:
            if order.epoch != self.epoch or self.phase is Phase.WAITING:
                return []
            boundaries = self._boundaries
            self._ending = order.ending
            if self.phase is Phase.ON_LEAVE:
                self._later = order.stop_at
                return []
            if self.phase is Phase.PARKED:
                if self._ending and self._grant is None and _handles_the_end():
                    # The handler may have run just before it parked, and only set a flag.
                    self._back_s = time.monotonic() + HANDLER_S
                if order.stop_at > boundaries.count:
                    boundaries.stop_at = order.stop_at
                return []
            boundaries.stop_at, self._listening = order.stop_at, False
            if boundaries.count < order.stop_at:
                return []
            boundaries.stop_at = NEVER
            return [Overshot(epoch=self.epoch, boundary=boundaries.count)]

    def dismiss(self, order: Dismiss) -> list[FromAgent]:
        """The job is through without this rank."""
        with self._lock:
            if order.epoch >= self.epoch and self.phase in (Phase.WAITING, Phase.PARKED):
                self._dismissal = order
                self._tell()
        return []

    def refuse(self, error: GpusliceError) -> None:
        """Have the main thread, which waits for its first lease, end with ``error``."""
        with self._lock:
            self._refusal = error
            self._tell()

    def interrupt(self, signum: int) -> None:
        """A signal has come while the script is parked; in the main thread, in the midst of anything."""
        if signum in ENDING_SIGNALS:
            with self._lock:
                self._asked_to_end = True
                self._tell()

    def arrive(self, boundary: int) -> bool:
        """The main thread is at ``boundary``: whether it is to park there (not if it was told to end)."""
        with self._lock:
            if boundary < self._boundaries.stop_at:
                return False
            self._boundaries.stop_at = NEVER
            listening, self._listening = self._listening, False
            if listening or self._dismissal is not None:
                return False
            if self.phase is Phase.ON_LEAVE and self._ending:
                return False
            if self.phase is Phase.ON_LEAVE:
                self._boundaries.stop_at, self._later = max(self._later, boundary + 1), NEVER
            else:
                self._grant = None  # one sent twice must not end this stay
            self._asked_to_end, self._back_s = False, float("inf")
            self.phase = Phase.PARKED
            return True

    def pass_by(self, boundary: int) -> list[FromAgent]:
        """The main thread cannot park at ``boundary``; ranks that did may be what it waits for there.

        So they are not left parked: the gang is to stop at another one.
        """
        with self._lock:
            if self._listening or self.phase is not Phase.RUNNING or boundary < self._boundaries.stop_at:
                return []
            self._boundaries.stop_at = NEVER
            return [Overshot(epoch=self.epoch, boundary=boundary)]

    def run_on(self) -> None:
        """The main thread runs (again)."""
        with self._lock:
            self.phase = Phase.RUNNING

    def lease_on(self, device: str) -> Resume | None:
        """Take the lease that has come, if it is of the device where the main thread is without one."""
        with self._lock:
            grant = self._grant
            if grant is None or grant.device != device or self.phase is not Phase.ON_LEAVE:
                return None
            self._grant, self.phase = None, Phase.RUNNING
            self._boundaries.stop_at, self._later = self._later, NEVER
            return grant

    @property
    def displaced(self) -> bool:
        """Return True if the place of this process, which has not trained, is another's or free."""
        with self._lock:  # it may just be about to be
            return self._displaced

    @displaced.setter
    def displaced(self, displaced: bool) -> None:
        self._displaced = displaced

    def withdraw(self, order: Withdraw, holds_nothing: Callable[[], bool]) -> list[FromAgent]:
        """Give the lease up if the script has passed no boundary and ``holds_nothing``."""
        with self._lock:
            boundaries = self._boundaries
            if order.epoch != self.epoch or self.phase is not Phase.RUNNING:
                return []
            stop_at, boundaries.stop_at = boundaries.stop_at, 0  # the main thread counts, then looks at that
            if boundaries.count or not holds_nothing():
                boundaries.stop_at = stop_at
                return []
            self.displace()
            return [Withdrawn(epoch=order.epoch)]

    def displace(self) -> None:
        """Another process may have the lease: come by at the next boundary, and have none from now on."""
        with self._lock:
            self._displaced = True
            self.epoch, self.phase, self._grant = 0, Phase.ON_LEAVE, None
            self._boundaries.stop_at, self._later, self._listening = 0, NEVER, False

    def release(self) -> None:
        """There is no lease to wait for: the main thread runs without one, and is asked for nothing."""
        with self._lock:
            self.released = True
            if self.phase is Phase.ON_LEAVE:
                self._run_free()
            self._tell()

    def _run_free(self) -> None:
        self.phase, self._boundaries.stop_at = Phase.RUNNING, NEVER

    def listen(self) -> None:
        """Have the main thread come by at the next boundary, unless it is told to stop at another."""
        with self._lock:
            if self._boundaries.stop_at == NEVER:
                self._boundaries.stop_at, self._listening = self._boundaries.count + 1, True

    def take_leave(self) -> None:
        """The main thread runs without a lease, to the next boundary at most."""
        with self._lock:
            if self.released:
                self._run_free()
                return
            self.phase = Phase.ON_LEAVE
            if self._boundaries.stop_at > self._boundaries.count:
                self._later = self._boundaries.stop_at
            self._boundaries.stop_at = 0

    @property
    def asked(self) -> bool:
        """Whether the job runs and is to park."""
        ordered = not self._listening and self._boundaries.stop_at < _CALLED_OFF
        return self.phase is Phase.RUNNING and ordered

    def quiet_for(self, duration_s: float) -> bool:
        """Wait up to ``duration_s`` for an order. Return True if none arrived."""
        ends_s = time.monotonic() + duration_s
        while not self.called and (left_s := ends_s - time.monotonic()) > 0:
            self._await_news(left_s * 1e3)
        return not self.called

    def await_order(self) -> Resume | Dismiss | None:
        """Wait for a lease or the end; ``None`` if a signal asks the script to end (``interrupt``).

        Raises
        ------
        GpusliceError
            If the scheduler does not take this process for a rank (``refuse``).
        """
        while not self.called:
            self._await_news(_LOOK_AGAIN_MS)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if self._told_to_end or self.released:
                return None
            if self._dismissal is not None:
                return self._dismissal
            grant, self._grant = self._grant, None
            return grant

    def _await_news(self, most_ms: float) -> None:
        """Wait up to ``most_ms`` for news, which may have come before.

        A signal that comes just before the wait wakes nobody, so it does not last.
        """
        poller = select.poll()
        poller.register(self._news, select.POLLIN)
        if poller.poll(most_ms):
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)

    def _tell(self) -> None:
        """Wake the main thread, if it waits, or let it not begin to."""
        os.eventfd_write(self._news, 1)

    @property
    def called(self) -> bool:
        """Whether `await_order` would not wait."""
        with self._lock:
            return (
                self._grant is not None
                or self._dismissal is not None
                or self._told_to_end
                or self._refusal is not None
                or self.released
            )

    @property
    def _told_to_end(self) -> bool:
        return self._asked_to_end or (self._ending and time.monotonic() >= self._back_s)


def _handles_the_end() -> bool:
    """Return True if the script has a handler for the signal by which the scheduler tells it to end."""
    return callable(signal.getsignal(signal.SIGTERM))
