"""The ranks of a job in a simulated day: they do as they are told at once, and all do the same."""

from __future__ import annotations

from math import inf


class Ranks:
    """The ranks of one job, which do the same at the same time, and what they have done.

    Attributes
    ----------
    pids
        The process of each rank that is there, by rank.
    on
        The ranks that are on their devices.
    since_s
        Since when they train; infinite while they do not.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.attempt = self.boundary = self.epoch = self.width = 0
        self.pids: dict[int, int] = {}
        self.on: set[int] = set()
        self.stop_at: int | None = None
        self.since_s, self.granted_s, self.rate = inf, inf, 1.0
        self.progress_s = self.executed_s = self.busy_s = self.lost_s = self.switching_s = 0.0
        self.devices: tuple[int, ...] = ()
        self.holds = False
        self.preemptions = self.migrations = 0
        self.born_job_s = 0.0
        #: Grows with each change, so that what was put off before is void.
        self.edition = 0

    def leave(self, now_s: float) -> None:
        """Add up what the ranks have done on the devices that they leave, if they have some."""
        if not self.holds:
            return
        self.edition += 1
        if self.since_s == inf:
            self.switching_s += now_s - self.granted_s
            self.lost_s += (now_s - self.granted_s) * len(self.devices)
        elapsed_s = max(0.0, now_s - self.since_s)
        self.executed_s += elapsed_s
        self.progress_s += elapsed_s * self.rate
        self.busy_s += elapsed_s * len(self.devices)
        self.since_s, self.holds, self.on = inf, False, set()
