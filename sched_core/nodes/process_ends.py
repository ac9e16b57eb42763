"""Ends of processes, held back until all of their messages are read: a rank's last messages come first.

libzmq's thread reads the connections; ours watches the processes. So a process may be seen to have ended
while its last reports, a ``Bye`` among them, are still on their way.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuslice.sched_core.lifecycle.events import Exited, RankGone

from .rank_socket import RankSocket

#: Interval at which to look for remaining messages; on a quiet machine one suffices.
PAUSE_MS = 1
#: Longest wait for a dead process's connection to close: a child of it may hold it open.
_HELD_S = 1.0

_End = RankGone | Exited


class ProcessEnds:
    """Processes that have ended, in order.

    Parameters
    ----------
    ranks
        The socket at which ranks send messages.
    """

    def __init__(self, ranks: RankSocket) -> None:
        self._ranks = ranks
        self._waiting: list[tuple[_End, float]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, end: _End, now: float) -> None:
        """Record the end of a rank or of a job's command, once."""
        if all(other != end for other, _ in self._waiting):
            self._waiting.append((end, now + _HELD_S))

    def known(self, now: float) -> Iterator[_End]:
        """Yield the ends before which no further message can come, and forget them.

        The command of a job waits for the job's ranks.
        """
        if not self._waiting:
            return
        candidates = [
            one
            for one in self._waiting
            if now >= one[1]
            or not any(self._may_be_heard(end) for end, _ in self._waiting if end.job == one[0].job)
        ]
        everything_read = self._ranks.receive()  # after the look at the connections
        for one in candidates:
            if everything_read or now >= one[1]:
                self._waiting.remove(one)
                yield self._known(one[0])

    def _known(self, end: _End) -> _End:
        """Return the end, marked as unseen if the rank has not greeted this scheduler.

        Such a rank may have said Bye when no scheduler was there.
        """
        if not isinstance(end, RankGone):
            return end
        greeted = self._ranks.greeted(end.job, end.rank, end.pid)
        self._ranks.forget(end.job, end.rank, end.pid)
        if not greeted:
            return RankGone(end.job, end.rank, unseen=True, pid=end.pid, attempt=end.attempt)
        return end

    def _may_be_heard(self, end: _End) -> bool:
        return isinstance(end, RankGone) and self._ranks.connected(end.job, end.rank, end.pid)
