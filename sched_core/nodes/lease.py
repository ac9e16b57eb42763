"""How long a node lets jobs run of which its scheduler would start another copy elsewhere.

The agent numbers its beats; the scheduler answers which one it has heard, and after how long without a word
the node is lost. What is heard was sent before. So a node that counts from when it sent the newest beat that
was heard, and takes a tenth less, is at its end before the scheduler starts anything elsewhere. No two clocks
have to agree, but they must run at the same speed to within that tenth.

Where the scheduler's machine says that nobody listens there, no scheduler starts anything; the next one gives
every node its whole time anew.

Jobs are stopped (SIGSTOP), not ended, and go on when the scheduler is heard of again.
(Gray and Cheriton, Leases, SOSP 1989.)
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

#: In the environment of these jobs.
LEASED = "GPUSLICE_LEASED"
#: The rest is for clocks of another speed, and for the time that it takes to stop processes.
_SHARE = 0.9
#: How often to look for processes that have come since all were stopped.
_LOOK_AGAIN_S = 1.0
_CONNECT_S = 0.5
_FILE = "lease"
_log = logging.getLogger(__name__)


class Lease:
    """Until when jobs may run here. It outlives the agent, in a file.

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
        #: When beats were sent of which nobody has said yet that they were heard, by number.
        self._sent_s: dict[int, float] = {}
        #: Whether jobs may be stopped, by an earlier agent perhaps; and when they were last.
        self._stopped, self._looked_s, self._asked_s = True, 0.0, 0.0
        self._ends_s = self._length_s = 0.0
        with suppress(OSError, ValueError):
            ends_s, self._length_s = map(float, self._path.read_text().split())
            self._ends_s = min(
                ends_s, self._clock.now() + self._length_s
            )  # the machine may have been started anew

    def sent(self) -> int:
        """The number of a beat that is sent now; no agent here has sent one of that number before."""
        now = self._clock.now()
        number = int(now * 1000.0)
        self._sent_s.setdefault(number, now)
        return number

    def renew(self, number: int, lost_after_s: float) -> None:
        """The scheduler has heard that beat, and will not take the node for lost for so long after it."""
        sent_s = self._sent_s.get(number)
        if sent_s is None:
            return  # of an earlier agent
        self._sent_s = {later: when_s for later, when_s in self._sent_s.items() if later > number}
        self._length_s = _SHARE * lost_after_s
        self._extend(sent_s)

    def renew_if_refused(self, scheduler: str) -> None:
        """Do so, too, if the machine of the scheduler says that nobody listens at its endpoint."""
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
        """Stop what may not run any more, and what it has started since."""
        now = self._clock.now()
        if now < max(self._ends_s, self._looked_s + _LOOK_AGAIN_S):
            return
        again, self._looked_s, self._stopped = self._stopped, now, True
        stopped: set[int] = set()
        while new := signal_marked(self._marks, signal.SIGSTOP) - stopped:  # they may have forked meanwhile
            stopped |= new
        if stopped and not again:
            _log.warning("nothing is heard of the scheduler; stopped %d processes", len(stopped))

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
