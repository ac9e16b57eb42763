"""Trials: a job's first few mini-batches at once, ahead of every queue, so that a broken one fails early.

The Philly study (Jeon et al., ATC 2019, section 6) would run every job on a small pool first. A node has no
devices for that, and a gang has as many ranks as it has; so a trial borrows devices. Their holders are
suspended for it and come back afterwards. The policy sees nothing of that: in its ledger they run on, and the
job arrives when its trial is over.
"""

from __future__ import annotations

from itertools import chain
from math import inf

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState

from . import timeouts
from .contract import CoreContract
from .events import Notice


class Trials:
    """Who is being tried, who waits for that, and who has lent devices for it.

    Parameters
    ----------
    core
        Whose.
    """

    def __init__(self, core: CoreContract) -> None:
        self._core = core
        #: In order of arrival.
        self._waiting: dict[str, Gang] = {}
        self._trying: dict[str, Gang] = {}
        self._lenders: dict[str, Gang] = {}

    def enter(self, job: Gang) -> None:
        """``job``, which is ready, waits for its trial; not if its processes were started anew for that."""
        if job.id not in self._trying:
            self._waiting[job.id] = job

    def leave(self, job: Gang, now: float) -> None:
        """End the trial of ``job``, if it has one, or its waiting for it; it gives back what it borrowed."""
        self._waiting.pop(job.id, None)
        if self._trying.pop(job.id, None) is not None:
            job.give_back(now)
            self._changed(job)

    def waits(self, job: Gang) -> bool:
        """Return True if ``job`` waits for devices to be tried on."""
        return job.id in self._waiting

    @property
    def tried(self) -> list[Gang]:
        """Return the jobs that have borrowed devices for their trial."""
        return list(self._trying.values())

    def avoid(self, late: Gang, now: float) -> None:
        """``late`` does not make room; whoever was to be tried there looks for other devices."""
        for job in [job for job in self._trying.values() if not job.lease]:
            if not set(job.borrowed).isdisjoint(late.lease):
                self.leave(job, now)
                self.enter(job)
        self.update(now)

    def check_progress(self, job: Gang, now: float) -> None:
        """See whether ``job``, of which there is news, has made the mini-batches of its trial."""
        passed = min((rank.boundary for rank in job.training()), default=0)
        if job.borrowed and passed > job.spec.trial_batches:
            self._pass(job, now, Notice("trial_passed", job.id, {"batches": job.spec.trial_batches}))

    def update(self, now: float) -> None:
        """Begin the trials for which there are devices, end those that take too long, and see who lends."""
        for job in [job for job in self._trying.values() if self._ends_s(job) <= now]:
            self._pass(job, now, timeouts.notice(job, "trial", now, kill=False))
        for job in list(self._waiting.values()):
            devices = self._choose(job)
            if devices:
                del self._waiting[job.id]
                self._trying[job.id] = job
                job.borrow(devices)
                job.history.append((now, "trial"))
                self._core.reconcile_later(job)
        if self._trying or self._lenders:
            self._lend(now)

    def due_s(self) -> float:
        """When the next trial will have taken too long; infinite if none will."""
        return min(map(self._ends_s, self._trying.values()), default=inf)

    def _ends_s(self, job: Gang) -> float:
        limit_s = job.spec.boundary_timeout_s
        return job.lateness.told_s + limit_s if limit_s and job.state is JobState.RUNNING else inf

    def _pass(self, job: Gang, now: float, notice: Notice) -> None:
        job.tried = True
        self.leave(job, now)
        self._core.order(notice)
        self._core.announce(job, now)

    def _choose(self, job: Gang) -> tuple[int, ...]:
        """Devices to be borrowed, those where least is disturbed; none if not enough of them can be."""
        taken = {device for other in self._trying.values() for device in other.borrowed}
        if job.width:  # its trial was broken off, and where else it could go on is not known
            present = job.lease or job.home
            return present if taken.isdisjoint(present) else ()
        free = FreeDevices.besides(self._core.relocations.cluster, taken)
        nodes = [list(devices) for devices in free.on_node]
        groups = nodes if job.within else [list(chain.from_iterable(nodes))]
        # Whatever is chosen first, what its holders have besides costs nothing more.
        choices = (
            self._from(first, left, job.demand)
            for left in groups
            if len(left) >= job.demand
            for first in left
        )
        return min(choices, key=lambda devices: (*self._harm(devices), devices), default=())

    def _from(self, first: int, left: list[int], count: int) -> tuple[int, ...]:
        """So many devices, ``first`` and those that disturb least beside it."""
        chosen = [first]
        while len(chosen) < count:
            others = [device for device in left if device not in chosen]
            chosen.append(min(others, key=lambda device: (*self._harm((*chosen, device)), device)))
        return tuple(sorted(chosen))

    def _harm(self, devices: tuple[int, ...]) -> tuple[int, int, int, int, float]:
        """What borrowing costs: who is stuck there, promises, jobs, those on their way, seconds to switch."""
        found = {holder.id: holder for device in devices for holder in self._core.holders(device)}
        holders = found.values()
        return (
            sum(holder.lateness.missed > 0 for holder in holders),
            sum(holder.guaranteed is True for holder in holders),
            len(holders),
            sum(holder.state in IN_TRANSIT for holder in holders),
            sum(self._core.switch_costs.predict_s(holder) or 0.0 for holder in holders),
        )

    def _lend(self, now: float) -> None:
        """Have those lend who hold what is borrowed, and no others."""
        devices = [device for job in self._trying.values() for device in job.borrowed]
        lenders = {holder.id: holder for device in devices for holder in self._core.holders(device)}
        for job in [job for job in self._lenders.values() if job.id not in lenders]:
            job.take_back(now)
            self._core.planning.begun(job)
            self._changed(job)
        for job in [job for job in lenders.values() if job.id not in self._lenders]:
            job.lend()
            self._changed(job)
        self._lenders = lenders

    def _changed(self, job: Gang) -> None:
        if not job.state.ended:
            self._core.reconcile_later(job)
