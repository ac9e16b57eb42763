"""The lease of a node: how long it may run jobs that the scheduler would start again elsewhere.

The agent numbers its beats. The scheduler answers which beat it has received, and after how long without a
message it counts the node as lost. A beat was sent before it was received. So a node that counts from the
sending of the newest received beat, and takes a tenth less, stops before the scheduler starts anything
elsewhere. The clocks need not agree, but must run at the same speed to within that tenth.

If the scheduler's machine reports that no process listens there, no scheduler starts anything; the next one
gives every node its whole time again.

What was just started can be taken back sooner: the scheduler starts it elsewhere when the node has been
silent for ``SILENT_AFTER_S`` and no rank of it was heard. So it is stopped that much sooner, too.

Jobs are stopped (SIGSTOP), not ended, and continue when the scheduler is heard again. (Gray and Cheriton,
Leases, SOSP 1989.)
"""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import suppress
from pathlib import Path

from gpuslice import config
from gpuslice.clock import BoottimeClock, Clock

from .endpoint import host_and_port
from .orphans import signal_marked

#: Variable in the environment of these jobs.
LEASED = "GPUSLICE_LEASED"
#: Used share of the scheduler's time. The rest allows for clocks of other speed, and for stopping processes.
_SHARE = 0.9
#: The scheduler gives a node nothing new after this time without a message.
SILENT_AFTER_S = 3.0
#: A command of which no rank was heard for so long is not taken back. The scheduler's time is shorter.
_STARTING_S = 70.0
#: Interval at which to look for new processes after all were stopped.
_LOOK_AGAIN_S = 1.0
_CONNECT_S = 0.5
_FILE = "lease"
_log = logging.getLogger(__name__)


class Lease:
    """The time until which jobs may run on this node. A file keeps it, so it outlives the agent.

    Parameters
    ----------
    directory
        The agent's.
    ranks
        The endpoint at which its jobs report.
    clock
        One that goes on from one agent to the next.
    """

    def __init__(self, directory: Path, ranks: str, clock: Clock | None = None) -> None:
        self._path = directory / _FILE
        self._marks = {config.variable("socket"): ranks, LEASED: "1"}
        self._clock = clock or BoottimeClock()
        #: Sending times of beats that were not acknowledged yet, by number.
        self._sent_s: dict[int, float] = {}
        #: True if jobs may be stopped, perhaps by an earlier agent; and the times of the last checks.
        self._stopped, self._looked_s, self._asked_s = True, 0.0, 0.0
        #: When commands were started of which no rank was heard, by job; those of them that were stopped.
        self._starting: dict[str, float] = {}
        self._held: set[str] = set()
        self._answered_s = self._clock.now()
        self._ends_s = self._length_s = 0.0
        with suppress(OSError, ValueError):
            ends_s, self._length_s = map(float, self._path.read_text().split())
            self._ends_s = min(
                ends_s, self._clock.now() + self._length_s
            )  # the machine may have been started anew

    def sent(self) -> int:
        """Return the number of the beat that is sent now. No agent here has used that number before."""
        now = self._clock.now()
        number = int(now * 1000.0)
        self._sent_s.setdefault(number, now)
        return number

    def renew(self, number: int, lost_after_s: float) -> None:
        """Extend the lease: the scheduler has answered that beat, and waits ``lost_after_s`` after it."""
        sent_s = self._sent_s.get(number)
        if sent_s is None:
            return  # of an earlier agent
        self._sent_s = {later: when_s for later, when_s in self._sent_s.items() if later > number}
        self._length_s = _SHARE * lost_after_s
        self._extend(sent_s)
        self._let_go(sent_s)

    def started(self, job: str) -> None:
        """Note that the command of ``job`` is started now."""
        self._starting[job] = self._clock.now()

    def is_known(self, job: str) -> None:
        """Note that the scheduler has heard a rank of ``job``, or has ended the job."""
        self._starting.pop(job, None)

    def renew_if_refused(self, scheduler: str) -> None:
        """Extend the lease if the scheduler's machine reports that no process listens at its endpoint."""
        now = self._clock.now()
        if not self._length_s or now < max(self._ends_s - self._length_s / 2, self._asked_s + _LOOK_AGAIN_S):
            return
        self._asked_s = now
        host, port = host_and_port(scheduler)
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except ConnectionRefusedError:
            self._extend(now)
        except OSError:
            return  # its machine cannot be reached

    def enforce(self) -> None:
        """Stop the jobs that may not run any more, and processes that they have started since."""
        now = self._clock.now()
        self._hold(now)
        if now < max(self._ends_s, self._looked_s + _LOOK_AGAIN_S):
            return
        again, self._looked_s, self._stopped = self._stopped, now, True
        stopped: set[int] = set()
        while new := signal_marked(self._marks, signal.SIGSTOP) - stopped:  # they may have forked meanwhile
            stopped |= new
        if stopped and not again:
            _log.warning("nothing is heard of the scheduler; stopped %d processes", len(stopped))

    def _hold(self, now: float) -> None:
        """Stop the commands that the scheduler may have taken back, because it has not heard of them."""
        if now < self._answered_s + _SHARE * SILENT_AFTER_S:
            return
        self._starting = {job: at_s for job, at_s in self._starting.items() if now < at_s + _STARTING_S}
        for job in self._starting.keys() - self._held:
            signal_marked(self._marks | {config.variable("job"): job}, signal.SIGSTOP)
            self._held.add(job)

    def _let_go(self, answered_s: float) -> None:
        """Let the commands run that were held: the scheduler has answered what was sent ``answered_s``."""
        self._answered_s = answered_s
        if self._clock.now() >= answered_s + _SHARE * SILENT_AFTER_S:
            return
        for job in self._held:
            signal_marked(self._marks | {config.variable("job"): job}, signal.SIGCONT)
        self._held.clear()

    def _extend(self, since_s: float) -> None:
        self._ends_s = since_s + self._length_s
        try:
            self._path.write_text(f"{self._ends_s} {self._length_s}\n")
        except OSError as error:  # it holds all the same, but for the next agent
            _log.warning("cannot write %s: %s", self._path, error.strerror)
        if self._stopped and self._clock.now() < self._ends_s:
            self._stopped = False
            if count := len(signal_marked(self._marks, signal.SIGCONT)):
                _log.info("%d processes may run", count)
