"""Orders that never change: who came first, who asks for least. Without and with preemption."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.sched_core.policy import View

from .ranked import RankedPolicy
from .ranking import Entry, Key


class FitFirst(RankedPolicy[Entry]):
    """Order of arrival; a job that does not fit is passed over. No preemption."""

    name = "fjf"
    preemptive = False

    def waiting_key(self, entry: Entry, view: View) -> Key:
        return (1, entry.job.number)

    def running_key(self, entry: Entry, view: View) -> Key:
        return (0, entry.job.number)

    def settled(self, started: Sequence[Entry], suspended: Sequence[Entry], view: View) -> None:
        for entry in started:
            self.ranking.rekey(entry, self.running_key(entry, view))


class Fifo(FitFirst):
    """Strict order of arrival; the first job that does not fit blocks the rest. No preemption."""

    name = "fifo"
    strict = True


class SmallestFirst(RankedPolicy[Entry]):
    """Fewest devices first, preemptive."""

    name = "smallest"

    def waiting_key(self, entry: Entry, view: View) -> Key:
        return (entry.size, entry.job.number)
