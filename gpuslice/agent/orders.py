"""The state machine of one rank: the scheduler's orders and the rank's phase. It does no I/O.

The I/O thread delivers messages, the main thread asks at boundaries. One lock orders the two. The main
thread counts a boundary before it looks at ``stop_at``; the I/O thread sets ``stop_at`` before it looks at
the count. So one of them sees the other, and where both do (the count *is* ``stop_at``), the lock decides:
the main thread parks, or the I/O thread takes ``stop_at`` back and answers ``Overshot``.

    phase      Resume      Suspend                       Dismiss
    WAITING    grant       stale                         end without the script's own code
    RUNNING    new epoch   stop there, or Overshot       nothing
    PARKED     grant       remembered for after Resume   end without the script's own code
    ON_LEAVE   grant       remembered for after Resume   nothing

A Suspend with ``ending`` says that the job is told to end: it may then run on, with or without a lease, until
it has ended. An order with an epoch smaller than the newest one is stale and changes nothing.
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

#: Interval at which the parked main thread looks for orders: a signal just before the wait wakes no thread.
_LOOK_AGAIN_MS = 500
#: How long a parked job that is told to end waits for the signal, which a launcher may pass on rank by rank.
#: Ranks of a gang that resumed before the signal would end at different batches.
HANDLER_S = 5.0
#: Least ``stop_at`` that is never reached: that of a suspend that was called off.
_CALLED_OFF = 2**62


class Phase(Enum):
    """The phases of a rank."""

    #: The rank has said Hello and has never had a lease.
    WAITING = "waiting"
    RUNNING = "running"
    #: The rank is suspended, or about to be.
    PARKED = "parked"
    #: The rank runs without a lease until the next boundary, mostly because a signal asks the script to end.
    ON_LEAVE = "on leave"


class Orders:
    """The orders that a rank has received, and its phase. Its I/O thread and main thread share them.

    Parameters
    ----------
    boundaries
        The process's counter, whose ``stop_at`` is set here.

    Attributes
    ----------
    released
        True if this process is no rank and trains without orders.
    """

    def __init__(self, boundaries: BoundaryCounter) -> None:
        self.phase = Phase.WAITING
        self.epoch = 0
        self._boundaries = boundaries
        #: Reentrant, because a signal handler may run while the main thread holds the lock.
        self._lock = threading.RLock()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._news).atexit = False  # the I/O thread may still be there
        self._grant: Resume | None = None
        self._dismissal: Dismiss | None = None
        self._asked_to_end = False
        #: Monotonic time when a parked job that is told to end resumes, even if no signal has come.
        self._back_s = float("inf")
        self._refusal: GpusliceError | None = None
        self.released = self._displaced = False
        #: True if the last order to stop was called off because the job is told to end.
        self._ending = False
        #: The boundary to stop at after ON_LEAVE.
        self._later = NEVER
        #: True if ``stop_at`` is no order: the main thread only has to call the agent at the next boundary.
        self._listening = False

    def resume(self, order: Resume) -> list[FromAgent]:
        """Record a new lease, or the present one again because the gang stops later. Return no answer."""
        with self._lock:
            if order.epoch >= self.epoch:
                if self.released:  # the process beside which this one trained has ended
                    self.released, self.phase, self._boundaries.stop_at = False, Phase.ON_LEAVE, 0
                # The boundary at which the former lease was to end does not matter any more.
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
        """Record the boundary to stop at. Return Overshot if the rank has passed it, else no answer."""
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
                    # The script's handler may have run just before the park, and only set a flag.
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
        """Record the job's end, if this rank waits for a lease or is parked. Return no answer."""
        with self._lock:
            if order.epoch >= self.epoch and self.phase in (Phase.WAITING, Phase.PARKED):
                self._dismissal = order
                self._tell()
        return []

    def refuse(self, error: GpusliceError) -> None:
        """Make the main thread raise ``error`` instead of waiting for its first lease."""
        with self._lock:
            self._refusal = error
            self._tell()

    def interrupt(self, signum: int) -> None:
        """Wake the parked main thread if signal ``signum`` asks the script to end.

        The signal's handler calls this in the main thread, between any two instructions.
        """
        if signum in ENDING_SIGNALS:
            with self._lock:
                self._asked_to_end = True
                self._tell()

    def arrive(self, boundary: int) -> bool:
        """Return True if the main thread has to park at ``boundary``, and enter PARKED.

        A rank on leave does not park if the job was told to end.
        """
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
                self._grant = None  # a lease that was sent twice must not end this park
            self._asked_to_end, self._back_s = False, float("inf")
            self.phase = Phase.PARKED
            return True

    def pass_by(self, boundary: int) -> list[FromAgent]:
        """Call off a stop at ``boundary``, where the main thread cannot park. Return Overshot if it was due.

        The main thread may wait for ranks that did park. So the gang has to stop at another boundary.
        """
        with self._lock:
            if self._listening or self.phase is not Phase.RUNNING or boundary < self._boundaries.stop_at:
                return []
            self._boundaries.stop_at = NEVER
            return [Overshot(epoch=self.epoch, boundary=boundary)]

    def run_on(self) -> None:
        """Enter RUNNING: the main thread trains."""
        with self._lock:
            self.phase = Phase.RUNNING

    def lease_on(self, device: str) -> Resume | None:
        """Return the new lease and enter RUNNING, if it is for ``device`` and the main thread is on leave."""
        with self._lock:
            grant = self._grant
            if grant is None or grant.device != device or self.phase is not Phase.ON_LEAVE:
                return None
            self._grant, self.phase = None, Phase.RUNNING
            self._boundaries.stop_at, self._later = self._later, NEVER
            return grant

    @property
    def displaced(self) -> bool:
        """True if this process has lost its rank's place and has not asked for it again."""
        with self._lock:  # the I/O thread may be about to set it
            return self._displaced

    @displaced.setter
    def displaced(self, displaced: bool) -> None:
        self._displaced = displaced

    def withdraw(self, order: Withdraw, holds_nothing: Callable[[], bool]) -> list[FromAgent]:
        """Give the lease up if no boundary was passed and ``holds_nothing``. Return Withdrawn if so."""
        with self._lock:
            boundaries = self._boundaries
            if order.epoch != self.epoch or self.phase is not Phase.RUNNING:
                return []
            stop_at, boundaries.stop_at = boundaries.stop_at, 0  # the main thread counts, then looks at it
            if boundaries.count or not holds_nothing():
                boundaries.stop_at = stop_at
                return []
            self.displace()
            return [Withdrawn(epoch=order.epoch)]

    def displace(self) -> None:
        """Drop the lease, which another process may get. The next boundary calls the agent."""
        with self._lock:
            self._displaced = True
            self.epoch, self.phase, self._grant = 0, Phase.ON_LEAVE, None
            self._boundaries.stop_at, self._later, self._listening = 0, NEVER, False

    def release(self) -> None:
        """Let the main thread run without a lease and without orders from now on."""
        with self._lock:
            self.released = True
            if self.phase is Phase.ON_LEAVE:
                self._run_free()
            self._tell()

    def _run_free(self) -> None:
        self.phase, self._boundaries.stop_at = Phase.RUNNING, NEVER

    def listen(self) -> None:
        """Make the main thread call the agent at the next boundary, unless it has to stop at another one."""
        with self._lock:
            if self._boundaries.stop_at == NEVER:
                self._boundaries.stop_at, self._listening = self._boundaries.count + 1, True

    def take_leave(self) -> None:
        """Enter ON_LEAVE: the main thread runs without a lease until the next boundary.

        If this process is released, enter RUNNING instead.
        """
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
        """True if the job runs and is told to park."""
        ordered = not self._listening and self._boundaries.stop_at < _CALLED_OFF
        return self.phase is Phase.RUNNING and ordered

    def quiet_for(self, duration_s: float) -> bool:
        """Wait up to ``duration_s`` for an order. Return True if none arrived."""
        ends_s = time.monotonic() + duration_s
        while not self.called and (left_s := ends_s - time.monotonic()) > 0:
            self._await_news(left_s * 1e3)
        return not self.called

    def await_order(self) -> Resume | Dismiss | None:
        """Wait for a lease or a dismissal, and return it. Return None if a signal asks the script to end.

        Return None, too, if this process is released.

        Raises
        ------
        GpusliceError
            If the scheduler does not accept this process as a rank (`refuse`).
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
        """Wait up to ``most_ms`` for `_tell`, or return at once if it was called since the last wait.

        A signal just before the wait does not end it, so ``most_ms`` has to be short.
        """
        poller = select.poll()
        poller.register(self._news, select.POLLIN)
        if poller.poll(most_ms):
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)

    def _tell(self) -> None:
        """Wake the main thread from `_await_news`, or make its next wait return at once."""
        os.eventfd_write(self._news, 1)

    @property
    def called(self) -> bool:
        """True if an order or a signal is waiting, so that `await_order` would return at once."""
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
