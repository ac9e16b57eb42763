"""Policies that know how long jobs run: shortest job, shortest remaining time, shortest remaining service."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.sched_core.policy import View

from .ranked import RankedPolicy
from .ranking import Entry, Key


class ShortestJob(RankedPolicy[Entry]):
    """Shortest duration first; a job that does not fit is passed over. No preemption."""

    name = "sjf"
    needs_durations = True
    preemptive = False

    def waiting_key(self, entry: Entry, view: View) -> Key:
        return (1, view.remaining_s(entry.job), entry.job.number)

    def running_key(self, entry: Entry, view: View) -> Key:
        return (0, entry.job.number)

    def settled(self, started: Sequence[Entry], suspended: Sequence[Entry], view: View) -> None:
        for entry in started:
            self.ranking.rekey(entry, self.running_key(entry, view))


class ShortestRemaining(RankedPolicy[Entry]):
    """Shortest remaining time first, preemptive: optimal for the average on one device."""

    name = "srtf"
    needs_durations = True

    def waiting_key(self, entry: Entry, view: View) -> Key:
        return (self.remaining(entry, view), not entry.running, entry.job.number)

    def remaining(self, entry: Entry, view: View) -> float:
        """Return the value by which jobs are ordered.

        It changes only while a job runs; running jobs win ties.
        """
        return view.remaining_s(entry.job)

    def update(self, view: View) -> None:
        if self.contended:
            self.ranking.expire(lambda entry: self.waiting_key(entry, view))

    def settled(self, started: Sequence[Entry], suspended: Sequence[Entry], view: View) -> None:
        for entry in suspended:
            self.ranking.rekey(entry, self.waiting_key(entry, view))


class ShortestRemainingService(ShortestRemaining):
    """Shortest remaining time multiplied by devices first, preemptive (SRSF)."""

    name = "srsf"

    def remaining(self, entry: Entry, view: View) -> float:
        return view.remaining_s(entry.job) * entry.size
